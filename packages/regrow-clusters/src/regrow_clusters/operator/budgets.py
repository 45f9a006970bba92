"""A PodDisruptionBudget for each job: a drain of many nodes takes one pod of a gang, the next when that is replaced.

Evictions alone are held up by it; whoever deletes pods, the operator too, is not.
"""

import logging
from typing import Final

from regrow_clusters.operator.api import ApiFailure, ApiKind, ClusterApi, Manifest
from regrow_clusters.operator.objects import budget
from regrow_clusters.operator.resource import TrainingJob

_LOG: Final = logging.getLogger("regrow.operator")


class BudgetKeeper:
    """Makes the budgets, and changes that of a job whose gang has changed. No job waits for its own.

    Args:
        api: the cluster.
    """

    def __init__(self, api: ClusterApi) -> None:
        self._api = api
        self._kept: dict[str, int] = {}
        """By the jobs' uids, how many pods are to stay."""

    async def keep(self, job: TrainingJob) -> None:
        """See to it that a job's budget is there, and as its specification has it now."""
        body = budget(job)
        least: int = body["spec"]["minAvailable"]
        if self._kept.get(job.uid) == least:
            return
        try:
            await self._write(body)
        except ApiFailure as failure:
            _LOG.warning("job %s/%s: it has no disruption budget: %s", job.namespace, job.name, failure)
            if not failure.refused:
                return  # asked again when the job is looked at next
        self._kept[job.uid] = least

    async def _write(self, body: Manifest) -> None:
        try:
            await self._api.create(ApiKind.BUDGETS, body)
        except ApiFailure as failure:
            if not failure.conflict:
                raise
            meta = body["metadata"]
            found = await self._api.get(ApiKind.BUDGETS, meta["namespace"], meta["name"])
            if found["spec"] != body["spec"]:
                await self._api.replace(ApiKind.BUDGETS, {**found, "spec": body["spec"]})
