"""A scheduler with priorities and preemption, and nodes where pods are only said to run."""

from tests.cluster.fake_store import FakeStore, Manifest

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
        self.not_pulled: set[str] = set()
        """Images of which no container comes to start; somebody else says why."""
        self.ends: dict[str, int] = {}
        """Scripts that end by themselves, and with which code; all others go on."""
        self.inits: dict[str, int | str] = {}
        """Init containers that do not end with 0: the code with which one does, the reason why it waits, or 'runs'."""

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
            elif "deletionTimestamp" in meta:
                # First it says how the containers have ended, and then that the object may go.
                if pod["status"]["phase"] not in _ENDED and node:
                    self._end(pod, given_back_code(pod), "Completed")
                self.processes.pop(meta["uid"], None)
                self._store.delete("pods", *name, grace=0)
            elif pod["status"]["phase"] == "Running" and _script(pod) in self.ends:
                self.end(pod, self.ends[_script(pod)])
            elif node and pod["status"]["phase"] == "Pending" and self._initializes(pod):
                continue
            elif node and pod["status"]["phase"] == "Pending" and _trains(pod)["image"] in self.without_regrow:
                self._end(pod, 128, "StartError")
            elif node and pod["status"]["phase"] == "Pending" and _trains(pod)["image"] not in self.not_pulled:
                self.processes[meta["uid"]] = pod
                running = {"running": {"startedAt": self._store.stamp()}}
                self._say(pod, {each: running for each in containers_of(pod)})

    def end(self, pod: Manifest, code: int) -> None:
        """Its processes end by themselves; those of the other containers as they were told to, with 0."""
        self._end(pod, code, "Error" if code else "Completed")

    def end_container(self, pod: Manifest, container: str, code: int) -> None:
        """One container ends; the pod is over when all have."""
        states = {each["name"]: each["state"] for each in pod["status"]["containerStatuses"]}
        self._say(pod, {**states, container: self._terminated(code, "Error" if code else "Completed")})

    def _initializes(self, pod: Manifest) -> bool:
        """Init containers, one after another (Kubernetes: Init Containers, Sidecar Containers). True: the pod waits.

        One that fails ends the pod for good, as the pod never restarts; a policy of its own has it restarted. A sidecar
        (policy `Always`) is restarted whatever it did; the next one waits until it has started, by its startup probe.
        """
        said: list[Manifest] = []
        held = failed = False
        for each in pod["spec"].get("initContainers") or []:
            how, again = self.inits.get(each["name"], 0), each.get("restartPolicy", "")
            state: Manifest = {"terminated": {"exitCode": how, "reason": "Error" if how else "Completed"}}
            found = {"name": each["name"], "state": state}
            if held or isinstance(how, str):
                reason = "PodInitializing" if held else how
                found["state"] = {"running": {}} if reason == "runs" else {"waiting": {"reason": reason}}
                held = True
            elif how and again:
                found |= {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": state}
                held = again != "Always" or "startupProbe" in each
            elif again == "Always":
                found |= {"state": {"running": {}}, "started": True}
            elif how:
                held = failed = True
            said.append(found)
        status: Manifest = {"initContainerStatuses": said}
        if held:
            waiting = {"waiting": {"reason": "PodInitializing"}}
            status["containerStatuses"] = [{"name": name, "state": waiting} for name in sorted(containers_of(pod))]
            status["phase"] = "Failed" if failed else "Pending"
        if said and any(pod["status"].get(key) != value for key, value in status.items()):
            self._store.patch(
                "pods", pod["metadata"]["namespace"], pod["metadata"]["name"], {"status": status}, part="status"
            )
        return held

    def _end(self, pod: Manifest, code: int, reason: str) -> None:
        states = {each: self._terminated(0, "Completed") for each in containers_of(pod)}
        self._say(pod, states | {_trains(pod)["name"]: self._terminated(code, reason)})

    def _terminated(self, code: int, reason: str) -> Manifest:
        return {"terminated": {"exitCode": code, "reason": reason, "finishedAt": self._store.stamp()}}

    def _say(self, pod: Manifest, states: dict[str, Manifest]) -> None:
        """The status of a pod whose containers are so: sorted by their names, as the kubelet does it."""
        meta = pod["metadata"]
        codes = [each["terminated"]["exitCode"] for each in states.values() if "terminated" in each]
        phase = "Running" if len(codes) < len(states) else "Failed" if any(codes) else "Succeeded"
        if phase != "Running":
            self.processes.pop(meta["uid"], None)
        said = [{"name": name, "state": states[name]} for name in sorted(states)]
        # A merge patch of one's own status, which is the kubelet's alone.
        self._store.patch(
            "pods",
            meta["namespace"],
            meta["name"],
            {"status": {"phase": phase, "containerStatuses": said}},
            part="status",
        )


def _script(pod: Manifest) -> str:
    """The last word of the command."""
    return str((_trains(pod).get("command") or [""])[-1])


def _trains(pod: Manifest) -> Manifest:
    """The container that has a command, wherever it stands: others of these tests have none."""
    containers: list[Manifest] = pod["spec"]["containers"]
    return next((each for each in containers if each.get("command")), containers[0])


def containers_of(pod: Manifest) -> list[str]:
    """Their names, in the pod's order."""
    return [each["name"] for each in pod["spec"]["containers"]]


def given_back_code(pod: Manifest) -> int:
    """With which code regrow ends in it when it is given back."""
    given = {each["name"]: each.get("value", "") for each in _trains(pod).get("env") or []}
    return int(given.get("REGROW_GIVEN_BACK_CODE", "0"))


def kept_away(pod: Manifest) -> set[str]:
    """Nodes that its affinity forbids."""
    affinity = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {})
    fields = [field for term in required.get("nodeSelectorTerms", []) for field in term.get("matchFields", [])]
    return {value for field in fields if field["operator"] == "NotIn" for value in field["values"]}
