"""A Kueue that obeys ClusterQueues of one cohort as they are written: quotas of GPUs, borrowing, and taking back.

After kueue.sigs.k8s.io/docs/concepts/cluster_queue (Cohort, Preemption) and docs/concepts/preemption: within its quota
a queue takes back from any that borrow; in its own queue it takes from lower priorities; the lowest go first.
"""

from typing import Any

from tests.cluster.fake_kueue import GroupedKueue, Workload
from tests.cluster.fake_store import FakeStore, Manifest

_GPUS = "nvidia.com/gpu"


class FakeCohort(GroupedKueue):
    """`objects`: ClusterQueues, LocalQueues and WorkloadPriorityClasses, as kubectl would apply them."""

    def __init__(self, store: FakeStore, objects: list[Manifest]) -> None:
        super().__init__(store)
        kinds: dict[str, list[Manifest]] = {}
        for each in objects:
            kinds.setdefault(each["kind"], []).append(each)
        self._classes = {each["metadata"]["name"]: each["value"] for each in kinds["WorkloadPriorityClass"]}
        self._queues = {each["metadata"]["name"]: each["spec"] for each in kinds["ClusterQueue"]}
        self._local = {
            (each["metadata"]["namespace"], each["metadata"]["name"]): each["spec"]["clusterQueue"]
            for each in kinds["LocalQueue"]
        }
        assert len({spec["cohortName"] for spec in self._queues.values()}) == 1
        assert {spec["queueingStrategy"] for spec in self._queues.values()} == {"BestEffortFIFO"}

    def used(self, queue: str) -> int:
        """GPUs that a ClusterQueue holds."""
        return sum(_gpus(each) for each in self.held() if self._queue(each) == queue)

    def fits(self, workload: Workload) -> bool:
        """As `GroupedKueue.fits`."""
        queue = self._queue(workload)
        after = self.used(queue) + _gpus(workload)
        most = self._quota(queue, "nominalQuota") + self._quota(queue, "borrowingLimit", 1 << 30)
        whole = sum(self._quota(each, "nominalQuota") for each in self._queues)
        return after <= most and sum(map(self.used, self._queues)) + _gpus(workload) <= whole

    def victims(self, workload: Workload) -> list[Workload]:
        """As `GroupedKueue.victims`."""
        queue, rules = self._queue(workload), self._queues[self._queue(workload)]["preemption"]
        within = self.used(queue) + _gpus(workload) <= self._quota(queue, "nominalQuota")
        victims = []
        for each in self.held():
            other = self._queue(each)
            lower = self.priority(each) < self.priority(workload)
            if other == queue and rules["withinClusterQueue"] == "LowerPriority" and lower:
                victims.append(each)
            borrows = self.used(other) > self._quota(other, "nominalQuota")
            if other != queue and within and borrows and (lower or rules["reclaimWithinCohort"] == "Any"):
                victims.append(each)
        return sorted(victims, key=lambda each: (self.priority(each), -each.born))

    def priority(self, workload: Workload) -> int:
        """As `GroupedKueue.priority`."""
        return int(self._classes[workload.priority_class])

    def _queue(self, workload: Workload) -> str:
        return str(self._local[(workload.namespace, workload.queue)])

    def _quota(self, queue: str, name: str, default: int = 0) -> int:
        (flavor,) = self._queues[queue]["resourceGroups"][0]["flavors"]
        (resource,) = [each for each in flavor["resources"] if each["name"] == _GPUS]
        return int(resource.get(name, default))


def _gpus(workload: Workload) -> int:
    limits: dict[str, Any] = workload.first["spec"]["containers"][0]["resources"]["limits"]
    return int(limits[_GPUS]) * workload.count
