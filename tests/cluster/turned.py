"""A job under an operator, turn by turn, with everything else of a cluster: no HTTP, no process, no waiting."""

import asyncio
from collections.abc import Callable
from typing import Any, Final

from tests.cluster.fake_kueue import FakeKueue
from tests.cluster.fake_nodes import SaidToRun
from tests.cluster.fake_store import FakeStore, Manifest, Refused
from tests.cluster.fake_volcano import FakeVolcano
from tests.cluster.jobs import training_job
from tests.cluster.scheduled_operator import ScheduledOperator

from regrow_clusters.operator.crd import crd
from regrow_clusters.operator.objects import PLACE_LABEL

QUEUE: Final = {"queueName": "queue", "priorityClass": "high", "elasticPriorityClass": "low"}


class TurnedJob:
    """A job of a gang of 2, and an operator; a turn is a second.

    Args:
        quota: of its queue, in pods; None: it has no Kueue.
        spec: more of the job's.
    """

    def __init__(self, quota: int | None = None, **spec: Any) -> None:
        self.now = 1_800_000_000.0
        self.store = FakeStore(lambda: self.now)
        self.store.install(crd())
        self.kueue = FakeKueue(self.store, {"queue": quota or 0}, {"high": 10, "low": 1, "urgent": 100})
        self.nodes = FakeVolcano(self.store, {f"n{number}": 1 for number in range(6)})
        self.store.refuse = self._admit
        self.kubelets = SaidToRun(self.store, lease=15.0)
        self.operator = ScheduledOperator(self.store)
        self.operator.relist()
        queued = {} if quota is None else {"backend": "kueue", "kueue": QUEUE}
        body: dict[str, Any] = {"replicaCount": 2, "gracefulShutdownTimeoutInSeconds": 5, **queued}
        self.store.create("trainingjobs", "team", training_job(**(body | spec)))

    def _admit(self, verb: str, plural: str, body: Manifest) -> Refused | None:
        if (verb, plural) == ("create", "pods"):
            self.kueue.admit_pod(body)
        return self.nodes.admit(verb, plural, body)

    def turn(self) -> None:
        """A second goes by, and everybody looks once."""
        self.now += 1.0
        self.operator.hear()
        asyncio.run(self.operator.look())
        for part in (self.kueue.turn, self.nodes.turn, self.kubelets.turn, self.store.collect):
            part()

    def turns(self, count: int) -> None:
        """Turn for `count` seconds."""
        for _ in range(count):
            self.turn()

    def until(self, holds: Callable[[], bool], within: int = 120) -> None:
        """Turn until it holds."""
        for _ in range(within):
            if holds():
                return
            self.turn()
        raise AssertionError(f"not seen: {self.status()} {self.pods()} {self.store.all_of('pods')}")

    def status(self) -> Any:
        """The job's."""
        return self.store.get("trainingjobs", "team", "job").get("status") or {}

    def condition(self, type: str) -> Manifest:
        """One of the job's; empty: it has not been said."""
        found = [each for each in self.status().get("conditions", []) if each["type"] == type]
        return dict(found[0]) if found else {}

    def patch(self, **spec: Any) -> None:
        """Edit the job."""
        self.store.patch("trainingjobs", "team", "job", {"spec": spec})

    def pods(self, phase: str = "") -> list[str]:
        """Names, of those in a phase that nobody has deleted; or of all objects there are."""
        return [
            pod["metadata"]["name"]
            for pod in self.store.all_of("pods", "team")
            if not phase or (pod["status"]["phase"] == phase and "deletionTimestamp" not in pod["metadata"])
        ]

    def at(self, place: int) -> Manifest:
        """The pod at a place that nobody has deleted, the first one of several."""
        found = [
            pod
            for pod in self.store.all_of("pods", "team")
            if pod["metadata"]["labels"].get(PLACE_LABEL) == str(place) and "deletionTimestamp" not in pod["metadata"]
        ]
        return found[0]

    def trains(self, attempt: int, replicas: int = 2) -> bool:
        """True if this number of replicas train, and nothing is left of others."""
        status = self.status()
        return bool(
            (status.get("phase"), status.get("replicas"), status.get("attempt")) == ("Training", replicas, attempt)
            and len(self.pods()) == replicas
        )
