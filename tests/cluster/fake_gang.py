"""Kubernetes' own scheduler with gangs: PodGroups of scheduling.k8s.io/v1beta1, beside pods that are in none.

After kubernetes/kubernetes (1.37) and kubernetes.io/docs/concepts/workloads/podgroup-api/lifecycle:

* a pod whose `schedulingGroup` names a PodGroup waits until that is there, and until as many pods of it are there as it
  needs; pods that have ended are not (pkg/scheduler/framework/plugins/gangscheduling, PreEnqueue;
  pkg/scheduler/backend/cache/podgroupstate.go);
* then all that wait are tried in one cycle, by priority, and are bound if with those that have a node already, leaving
  ones too, there are as many as it needs, else none is (PlacementFeasible: `scheduled` and `remaining`);
* pods of a group all have one `schedulerName` (lifecycle, Limitations), and `schedulingGroup` cannot be changed;
* a finalizer keeps a PodGroup until its pods have ended (lifecycle, Deletion protection);
* a PodGroup of a PriorityClass that is not there is refused (workload-api/disruption-and-priority).
"""

from tests.cluster.fake_nodes import FakeScheduler
from tests.cluster.fake_store import Manifest, Refused

GANGS = "podgroups.scheduling.k8s.io"
FINALIZER = "scheduling.k8s.io/podgroup-protection"
_ENDED = ("Succeeded", "Failed")


class FakeGangScheduler(FakeScheduler):
    """`nodes`: how many pods each has room for."""

    def admit(self, verb: str, plural: str, body: Manifest) -> Refused | None:
        """Refuse what the API server refuses; None: nothing."""
        name = body["spec"].get("priorityClassName") if (verb, plural) == ("create", GANGS) else None
        if name and ("priorityclasses", "", name) not in self._store.objects:
            text = f'podgroups.scheduling.k8s.io "{body["metadata"]["name"]}" is forbidden'
            return Refused(403, "Forbidden", f"{text}: no PriorityClass with name {name} was found")
        return None

    def turn(self) -> None:
        """Pods that are in no group, then one cycle of each group; then the controller that protects groups."""
        super().turn()
        for group in self._store.all_of(GANGS):
            self._cycle(group)
        for group in self._store.all_of(GANGS):
            self._protect(group)

    def members(self, group: Manifest) -> list[Manifest]:
        """Its pods that have not ended."""
        meta = group["metadata"]
        return [
            each
            for each in self._store.all_of("pods", meta["namespace"])
            if (each["spec"].get("schedulingGroup") or {}).get("podGroupName") == meta["name"]
            if each["status"]["phase"] not in _ENDED
        ]

    def _waits(self, pod: Manifest) -> bool:
        spec = pod["spec"]
        ours = spec.get("schedulerName") in (None, "default-scheduler")
        return ours and not spec.get("schedulingGroup") and super()._waits(pod)

    def _cycle(self, group: Manifest) -> None:
        least, pods = group["spec"]["schedulingPolicy"]["gang"]["minCount"], self.members(group)
        if len(pods) < least or len({pod["spec"].get("schedulerName") for pod in pods}) > 1:
            return
        waiting = [pod for pod in pods if FakeScheduler._waits(self, pod)]
        placed = self._placement(waiting, 1 << 30)
        if placed and sum(bool(pod["spec"].get("nodeName")) for pod in pods) + len(placed) >= least:
            for pod, node in placed:
                self._bind(pod, node)

    def _placement(self, waiting: list[Manifest], most: int) -> list[tuple[Manifest, str]]:
        """Nodes for as many of these pods as there is room for, the most important first; none is bound yet."""
        room = {node: count - self._used(node) for node, count in self.nodes.items()}
        placed = list[tuple[Manifest, str]]()
        for pod in sorted(waiting, key=lambda each: (-self._priority(each), int(each["metadata"]["resourceVersion"]))):
            node = next((each for each in sorted(room) if room[each] > 0 and self._fits(pod, each)), None)
            if node is not None and len(placed) < most:
                room[node] -= 1
                placed.append((pod, node))
        return placed

    def _used(self, node: str) -> int:
        here = [each for each in self._store.all_of("pods") if each["spec"].get("nodeName") == node]
        return sum(each["status"]["phase"] not in _ENDED for each in here)

    def _protect(self, group: Manifest) -> None:
        meta = group["metadata"]
        kept = FINALIZER in (meta.get("finalizers") or [])
        if kept != bool(self.members(group)):
            finalizers = None if kept else [FINALIZER]
            self._store.patch(GANGS, meta["namespace"], meta["name"], {"metadata": {"finalizers": finalizers}})
