"""A scheduler with priorities and preemption, nodes where pods are only said to run, and a Kueue of the same kind."""

from typing import Any

from tests.cluster.fake_store import FakeStore, Manifest

GATE = "kueue.x-k8s.io/admission"
_QUEUE = "kueue.x-k8s.io/queue-name"
_GROUP = "kueue.x-k8s.io/pod-group-name"
_COUNT = "kueue.x-k8s.io/pod-group-total-count"
_CLASS = "kueue.x-k8s.io/priority-class"
_ENDED = ("Succeeded", "Failed")


class FakeScheduler:
    """Binds pods to nodes, the most important first; evicts less important ones where that makes room.

    `nodes`: how many pods each has room for. `unfit`: nodes that take none.
    """

    def __init__(self, store: FakeStore, nodes: dict[str, int]) -> None:
        self._store = store
        self.nodes = nodes
        self.unfit: set[str] = set()

    def turn(self) -> None:
        """Look at all pods that wait."""
        waiting = [each for each in self._store.all_of("pods") if self._waits(each)]
        for pod in sorted(waiting, key=lambda each: (-self._priority(each), int(each["metadata"]["resourceVersion"]))):
            node = next((name for name in sorted(self.nodes) if self._fits(pod, name)), None)
            if node is not None:
                self._bind(pod, node)
            elif self._preempts(pod):
                self._make_room(pod)

    def _waits(self, pod: Manifest) -> bool:
        spec, meta = pod["spec"], pod["metadata"]
        return not (spec.get("nodeName") or spec.get("schedulingGates") or meta.get("deletionTimestamp"))

    def _fits(self, pod: Manifest, node: str) -> bool:
        if node in self.unfit or node in kept_away(pod):
            return False
        here = [each for each in self._store.all_of("pods") if each["spec"].get("nodeName") == node]
        return sum(each["status"]["phase"] not in _ENDED for each in here) < self.nodes[node]

    def _bind(self, pod: Manifest, node: str) -> None:
        meta = pod["metadata"]
        scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": self._store.stamp()}
        pod["spec"]["nodeName"] = node
        labels = self._store.objects.get(("nodes", "", node), {"metadata": {}})["metadata"].get("labels") or {}
        zone = {key: value for key, value in labels.items() if key.startswith("topology.kubernetes.io/")}
        meta["labels"] = {**(meta.get("labels") or {}), **zone}  # as Kubernetes does from 1.35 on (KEP-4742)
        self._store.replace("pods", meta["namespace"], meta["name"], pod)
        patch = {"status": {"conditions": [scheduled]}}
        self._store.patch("pods", meta["namespace"], meta["name"], patch, part="status")

    def _make_room(self, pod: Manifest) -> None:
        lower = [
            each
            for each in self._store.all_of("pods")
            if each["spec"].get("nodeName") and self._priority(each) < self._priority(pod)
            if each["status"]["phase"] not in _ENDED
        ]
        if any(each["metadata"].get("deletionTimestamp") for each in lower):
            return  # somebody leaves already
        for victim in sorted(lower, key=lambda each: (self._priority(each), each["metadata"]["name"]))[:1]:
            self._store.delete("pods", victim["metadata"]["namespace"], victim["metadata"]["name"])

    def _class(self, pod: Manifest) -> Manifest:
        found = self._store.objects.get(("priorityclasses", "", pod["spec"].get("priorityClassName", "")))
        return found or {"value": 0}

    def _priority(self, pod: Manifest) -> int:
        return int(self._class(pod)["value"])

    def _preempts(self, pod: Manifest) -> bool:
        return bool(self._class(pod).get("preemptionPolicy", "PreemptLowerPriority") != "Never")


class SaidToRun:
    """Kubelets without processes. A node that is cut off runs on what it has until the lease of its agents is over."""

    def __init__(self, store: FakeStore, *, lease: float) -> None:
        self._store = store
        self._lease = lease
        self.cut: dict[str, float] = {}
        self.processes: dict[str, Manifest] = {}
        """Pods of which something runs, by uid; also of those that the API server has forgotten."""
        self.without_regrow: set[str] = set()
        """Images in which the command is not: a container of such a one cannot start."""

    def turn(self) -> None:
        """Start what was bound, end what was deleted, evict from nodes that nobody reaches."""
        now = self._store.wall()
        for uid, pod in list(self.processes.items()):
            since = self.cut.get(pod["spec"]["nodeName"])
            here = any(each["metadata"]["uid"] == uid for each in self._store.objects.values())
            if (since is None and not here) or (since is not None and now >= since + self._lease):
                del self.processes[uid]
        for pod in self._store.all_of("pods"):
            meta, node = pod["metadata"], pod["spec"].get("nodeName", "")
            name = (meta["namespace"], meta["name"])
            if node in self.cut:
                if now - self.cut[node] >= 30 and "deletionTimestamp" not in meta:
                    self._store.delete("pods", *name)
            elif "deletionTimestamp" in meta and pod["status"]["phase"] not in _ENDED:
                self.processes.pop(meta["uid"], None)
                self._store.delete("pods", *name, grace=0)
            elif (
                node
                and pod["status"]["phase"] == "Pending"
                and pod["spec"]["containers"][0]["image"] in self.without_regrow
            ):
                self._end(pod, 128, "StartError")
            elif node and pod["status"]["phase"] == "Pending":
                self.processes[meta["uid"]] = pod
                running = {"state": {"running": {"startedAt": self._store.stamp()}}}
                status = {"phase": "Running", "containerStatuses": [running]}
                self._store.patch("pods", *name, {"status": status}, part="status")

    def end(self, pod: Manifest, code: int) -> None:
        """Its process ends by itself."""
        self._end(pod, code, "Error" if code else "Completed")

    def _end(self, pod: Manifest, code: int, reason: str) -> None:
        meta = pod["metadata"]
        self.processes.pop(meta["uid"], None)
        ended = {"exitCode": code, "reason": reason, "finishedAt": self._store.stamp()}
        status: dict[str, Any] = {
            "phase": "Failed" if code else "Succeeded",
            "containerStatuses": [{"state": {"terminated": ended}}],
        }
        self._store.patch("pods", meta["namespace"], meta["name"], {"status": status}, part="status")


class FakeKueue:
    """Holds pods of a queue at a gate until their whole group fits; takes quota back from lower classes.

    `quota`: pods of each LocalQueue. `classes`: values of WorkloadPriorityClasses.
    """

    def __init__(self, store: FakeStore, quota: dict[str, int], classes: dict[str, int]) -> None:
        self._store = store
        self.quota = quota
        self._classes = classes

    def admit_pod(self, body: Manifest) -> None:
        """The webhook: a new pod of a queue waits at the gate."""
        labels = body["metadata"].get("labels") or {}
        if _QUEUE in labels:
            body["spec"]["schedulingGates"] = [{"name": GATE}]
            labels["kueue.x-k8s.io/managed"] = "true"

    def turn(self) -> None:
        """Admit what fits, the most important first; make room for one that does not."""
        groups = self._groups()
        waiting = [each for each in groups if each and self._gated(each[0]) and self._whole(each)]
        for group in sorted(waiting, key=lambda each: (-self._priority(each), self._age(each))):
            queue = group[0]["metadata"]["labels"][_QUEUE]
            held = [each for each in groups if self._holds(each, queue)]
            free = self.quota.get(queue, 0) - sum(len(each) for each in held)
            if len(group) <= free:
                for pod in group:
                    pod["spec"]["schedulingGates"] = []
                    self._store.replace("pods", pod["metadata"]["namespace"], pod["metadata"]["name"], pod)
                groups = self._groups()
                continue
            self._preempt(held, self._priority(group))

    def _preempt(self, held: list[list[Manifest]], priority: int) -> None:
        lower = sorted((each for each in held if self._priority(each) < priority), key=self._priority)
        leaving = any("deletionTimestamp" in pod["metadata"] for each in lower for pod in each)
        for pod in lower[0] if lower and not leaving else []:
            self._store.delete("pods", pod["metadata"]["namespace"], pod["metadata"]["name"])

    def _groups(self) -> list[list[Manifest]]:
        found: dict[tuple[str, str], list[Manifest]] = {}
        for pod in self._store.all_of("pods"):
            labels = pod["metadata"].get("labels") or {}
            if _QUEUE in labels and pod["status"]["phase"] not in _ENDED:
                name = labels.get(_GROUP) or pod["metadata"]["name"]
                found.setdefault((pod["metadata"]["namespace"], name), []).append(pod)
        return list(found.values())

    def _whole(self, group: list[Manifest]) -> bool:
        return len(group) >= int((group[0]["metadata"].get("annotations") or {}).get(_COUNT, 1))

    def _gated(self, pod: Manifest) -> bool:
        return bool(pod["spec"].get("schedulingGates")) and "deletionTimestamp" not in pod["metadata"]

    def _holds(self, group: list[Manifest], queue: str) -> bool:
        return group[0]["metadata"]["labels"][_QUEUE] == queue and not group[0]["spec"].get("schedulingGates")

    def _priority(self, group: list[Manifest]) -> int:
        return self._classes.get(group[0]["metadata"]["labels"].get(_CLASS, ""), 0)

    def _age(self, group: list[Manifest]) -> int:
        return min(int(pod["metadata"]["resourceVersion"]) for pod in group)


def kept_away(pod: Manifest) -> set[str]:
    """Nodes that its affinity forbids."""
    affinity = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {})
    fields = [field for term in required.get("nodeSelectorTerms", []) for field in term.get("matchFields", [])]
    return {value for field in fields if field["operator"] == "NotIn" for value in field["values"]}
