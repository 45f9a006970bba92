"""A PodDisruptionBudget for each job: a drain of many nodes evicts one pod of a gang, and the next once it is replaced.

It delays only evictions; it does not stop deletions of pods, the operator's included.
"""

import logging
from typing import Final

from regrow.core.ids import Instant, Seconds
from regrow_clusters.operator.api import ApiFailure, ApiKind, ClusterApi, Manifest
from regrow_clusters.operator.objects import budget
from regrow_clusters.operator.resource import TrainingJob

_KEEP_EVERY: Final[Seconds] = 300.0
"""Interval of checks that the budget still exists: somebody may have deleted it."""
_LOG: Final = logging.getLogger("regrow.operator")


class BudgetKeeper:
    """Creates the budgets, and updates the budget of a job whose gang has changed. No job waits for its budget.

    Args:
        api: the cluster.
    """

    def __init__(self, api: ClusterApi) -> None:
        self._api = api
        self._kept: dict[str, tuple[int, Instant]] = {}
        """By job uid: the number of pods that must stay, and the time of the last write or check."""

    async def keep(self, job: TrainingJob, now: Instant) -> None:
        """Ensure that a job's budget exists and matches its present specification."""
        body = budget(job)
        least: int = body["spec"]["minAvailable"]
        known, at = self._kept.get(job.uid, (-1, 0.0))
        if known == least and now < at + _KEEP_EVERY:
            return
        try:
            await self._write(body)
        except ApiFailure as failure:
            _LOG.warning("job %s/%s: it has no disruption budget: %s", job.namespace, job.name, failure)
            if not failure.refused:
                return  # retried when the job is reconciled next
        self._kept[job.uid] = least, now

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
