"""A Kueue that obeys ClusterQueues of one cohort as they are written: quotas of GPUs, borrowing, and taking back.

After kueue.sigs.k8s.io/docs/concepts/cluster_queue (Cohort, Preemption) and docs/concepts/preemption: within its quota
a queue takes back from any that borrow; in its own queue it takes from lower priorities; the lowest go first.
"""

from typing import Any

from tests.cluster.fake_nodes import GATE
from tests.cluster.fake_store import FakeStore, Manifest

_QUEUE, _CLASS = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
_GROUP, _COUNT = "kueue.x-k8s.io/pod-group-name", "kueue.x-k8s.io/pod-group-total-count"
_GPUS = "nvidia.com/gpu"


class FakeCohort:
    """`objects`: ClusterQueues, LocalQueues and WorkloadPriorityClasses, as kubectl would apply them."""

    def __init__(self, store: FakeStore, objects: list[Manifest]) -> None:
        self._store = store
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

    def admit_pod(self, body: Manifest) -> None:
        """The webhook: a new pod of a queue waits at the gate."""
        if _QUEUE in (body["metadata"].get("labels") or {}):
            body["spec"]["schedulingGates"] = [{"name": GATE}]

    def used(self, queue: str) -> int:
        """GPUs that a ClusterQueue holds."""
        return sum(_gpus(each) for each in self._groups() if self._queue(each) == queue and not _gated(each))

    def turn(self) -> None:
        """Admit what fits, the most important first; take back for what has a right to it."""
        groups = self._groups()
        waiting = [each for each in groups if _gated(each) and _whole(each)]
        for group in sorted(waiting, key=lambda each: (-self._priority(each), _age(each))):
            if self._fits(group):
                for pod in group:
                    pod["spec"]["schedulingGates"] = []
                    self._store.replace("pods", pod["metadata"]["namespace"], pod["metadata"]["name"], pod)
            elif self._takes_back(group):
                return  # what becomes free is for this one

    def _fits(self, group: list[Manifest]) -> bool:
        queue = self._queue(group)
        after = self.used(queue) + _gpus(group)
        most = self._quota(queue, "nominalQuota") + self._quota(queue, "borrowingLimit", 1 << 30)
        whole = sum(self._quota(each, "nominalQuota") for each in self._queues)
        return after <= most and sum(map(self.used, self._queues)) + _gpus(group) <= whole

    def _takes_back(self, group: list[Manifest]) -> bool:
        queue, rules = self._queue(group), self._queues[self._queue(group)]["preemption"]
        held = [each for each in self._groups() if not _gated(each)]
        if any("deletionTimestamp" in pod["metadata"] for each in held for pod in each):
            return True  # it is becoming free
        within = self.used(queue) + _gpus(group) <= self._quota(queue, "nominalQuota")
        victims = []
        for each in held:
            other = self._queue(each)
            lower = self._priority(each) < self._priority(group)
            if other == queue and rules["withinClusterQueue"] == "LowerPriority" and lower:
                victims.append(each)
            borrows = self.used(other) > self._quota(other, "nominalQuota")
            if other != queue and within and borrows and (lower or rules["reclaimWithinCohort"] == "Any"):
                victims.append(each)
        for each in sorted(victims, key=lambda each: (self._priority(each), -_age(each)))[:1]:
            for pod in each:
                self._store.delete("pods", pod["metadata"]["namespace"], pod["metadata"]["name"])
        return bool(victims)

    def _groups(self) -> list[list[Manifest]]:
        found: dict[tuple[str, str], list[Manifest]] = {}
        for pod in self._store.all_of("pods"):
            labels = pod["metadata"].get("labels") or {}
            if _QUEUE in labels and pod["status"]["phase"] not in ("Succeeded", "Failed"):
                name = labels.get(_GROUP) or pod["metadata"]["name"]
                found.setdefault((pod["metadata"]["namespace"], name), []).append(pod)
        return list(found.values())

    def _queue(self, group: list[Manifest]) -> str:
        meta = group[0]["metadata"]
        return str(self._local[(meta["namespace"], meta["labels"][_QUEUE])])

    def _quota(self, queue: str, name: str, default: int = 0) -> int:
        (flavor,) = self._queues[queue]["resourceGroups"][0]["flavors"]
        (resource,) = [each for each in flavor["resources"] if each["name"] == _GPUS]
        return int(resource.get(name, default))

    def _priority(self, group: list[Manifest]) -> int:
        return int(self._classes[group[0]["metadata"]["labels"][_CLASS]])


def _gated(group: list[Manifest]) -> bool:
    return any(pod["spec"].get("schedulingGates") for pod in group)


def _whole(group: list[Manifest]) -> bool:
    wanted = int((group[0]["metadata"].get("annotations") or {}).get(_COUNT, 1))
    return len(group) >= wanted and not any("deletionTimestamp" in pod["metadata"] for pod in group)


def _gpus(group: list[Manifest]) -> int:
    def of(pod: Manifest) -> int:
        limits: dict[str, Any] = pod["spec"]["containers"][0]["resources"]["limits"]
        return int(limits[_GPUS])

    return sum(map(of, group))


def _age(group: list[Manifest]) -> int:
    return min(int(pod["metadata"]["resourceVersion"]) for pod in group)
