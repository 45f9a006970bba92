"""Volcano's scheduler, sessions without HTTP: queues, PodGroups, gangs. One unit of a resource is a pod.

After volcano-sh/volcano at ed72c7c8 (August 2026); each rule names its file there:

* a pod belongs to the PodGroup that `scheduling.k8s.io/group-name` names (pkg/scheduler/api/job_info.go, getJobID); one
  without gets a PodGroup, named after its controller, for one pod and its resources (pkg/controllers/podgroup);
* groups of a queue that is not there, and pods of a group that is not there, are not looked at (pkg/scheduler/cache,
  Snapshot); the webhook refuses a PodGroup of a queue that is not there or not open (pkg/webhooks/admission/podgroups);
* a Pending group is let into its queue at once if it says no `minResources`, else if the queue has room for all of
  these beside what it has allocated (pkg/scheduler/actions/enqueue, plugins/proportion, AddJobEnqueueableFn);
* only then pods are placed, if as many as the minimum are there: pods that leave or have failed are not (job_info.go,
  ValidTaskNum, actions/allocate), one by one while the queue has room (plugins/proportion, queueAllocatable);
* they are bound if with those that run, or have succeeded, there are as many as the minimum, else none of them is
  (job_info.go, ReadyTaskNum, actions/allocate: Commit or Discard);
* the phase is set when a session ends: Running or Completed as long as as many as the minimum have a node or had one,
  Pending again when they have not, unless it is Inqueue (pkg/scheduler/framework/session.go, getPodGroupPhase).
"""

from tests.cluster.fake_gang import FakeGangScheduler
from tests.cluster.fake_store import FakeStore, Manifest, Refused

GROUP_NAME = "scheduling.k8s.io/group-name"
SCHEDULER = "volcano"
_PENDING = ("", "Pending")


class FakeVolcano(FakeGangScheduler):
    """Beside the scheduler that all others have. `nodes`: how many pods each has room for."""

    def __init__(self, store: FakeStore, nodes: dict[str, int]) -> None:
        super().__init__(store, nodes)
        self.capability: dict[str, int] = {}
        """Pods that a queue may have; others may have as many as there is room for."""
        self.add_queue("default")

    def add_queue(self, name: str, state: str = "Open", capability: int | None = None) -> None:
        """A Queue, as its controller has said that it is."""
        body = {"metadata": {"name": name, "namespace": "", "uid": f"queue-{name}"}, "status": {"state": state}}
        self._store.objects["queues", "", name] = body
        if capability is not None:
            self.capability[name] = capability

    def admit(self, verb: str, plural: str, body: Manifest) -> Refused | None:
        """The schema's default, and the webhook: 400, as the API server says it for a webhook that gives no code."""
        if (verb, plural) != ("create", "podgroups"):
            return super().admit(verb, plural, body)
        name = body["spec"].setdefault("queue", "default")
        denied = 'admission webhook "validatepodgroup.volcano.sh" denied the request: '
        queue = self._store.objects.get(("queues", "", name))
        if queue is None:
            return Refused(400, "", f'{denied}unable to find queue: queue.scheduling.volcano.sh "{name}" not found')
        if (state := queue["status"]["state"]) != "Open":
            text = f"can only submit PodGroup to queue with state `Open`, queue `{name}` status is `{state}`."
            return Refused(400, "", denied + text)
        return None

    def turn(self) -> None:
        """The default scheduler's turn, then a session of Volcano's."""
        super().turn()
        self._group_others()
        groups = self._store.all_of("podgroups")
        for group in groups:
            self._enqueue(group)
        for group in groups:
            self._allocate(group)
        for group in groups:
            self._close(group)

    def pods_of(self, group: Manifest) -> list[Manifest]:
        """Its pods."""
        meta = group["metadata"]
        return [
            each
            for each in self._store.all_of("pods", meta["namespace"])
            if each["spec"].get("schedulerName") == SCHEDULER and _group_of(each) == meta["name"]
        ]

    def allocated(self, queue: str) -> int:
        """Pods of a queue that have a node and have not ended."""
        groups = [each for each in self._store.all_of("podgroups") if each["spec"]["queue"] == queue]
        return sum(
            _status_of(pod) in ("Bound", "Running", "Releasing") for each in groups for pod in self._placed(each)
        )

    def _placed(self, group: Manifest) -> list[Manifest]:
        return [pod for pod in self.pods_of(group) if pod["spec"].get("nodeName")]

    def _group_others(self) -> None:
        """The controller of PodGroups: pods of one controller share a group, and it is said to need one of them."""
        for pod in self._store.all_of("pods"):
            if pod["spec"].get("schedulerName") != SCHEDULER or _group_of(pod):
                continue
            meta = pod["metadata"]
            owners = [each for each in meta.get("ownerReferences") or [] if each.get("controller")]
            name = f"podgroup-{owners[0]['uid'] if owners else meta['uid']}"
            if ("podgroups", meta["namespace"], name) not in self._store.objects:
                own = [{"apiVersion": "v1", "kind": "Pod", "name": meta["name"], "uid": meta["uid"]}]
                body: Manifest = {"metadata": {"name": name, "ownerReferences": owners or own}}
                body["spec"] = {"minMember": 1, "minResources": {"pods": 1}}
                self._store.create("podgroups", meta["namespace"], body)
            note = {"metadata": {"annotations": {GROUP_NAME: name}}}
            self._store.patch("pods", meta["namespace"], meta["name"], note)

    def _phase(self, group: Manifest) -> str:
        return str((group.get("status") or {}).get("phase", ""))

    def _enqueue(self, group: Manifest) -> None:
        queue, asks = group["spec"]["queue"], group["spec"].get("minResources")
        if self._phase(group) not in _PENDING or ("queues", "", queue) not in self._store.objects:
            return
        if asks is not None:
            others = [each for each in self._store.all_of("podgroups") if each["spec"]["queue"] == queue]
            inqueue = sum(
                (each["spec"].get("minResources") or {}).get("pods", 0)
                for each in others
                if self._phase(each) == "Inqueue"
            )
            if asks["pods"] + self.allocated(queue) + inqueue > self._most(queue):
                return
        self._say(group, "Inqueue")

    def _most(self, queue: str) -> int:
        return min(self.capability.get(queue, 1 << 30), sum(self.nodes.values()))

    def _allocate(self, group: Manifest) -> None:
        queue, least = group["spec"]["queue"], group["spec"]["minMember"]
        if self._phase(group) in _PENDING or ("queues", "", queue) not in self._store.objects:
            return
        pods = self.pods_of(group)
        statuses = [_status_of(each) for each in pods]
        if sum(each in ("Pending", "Bound", "Running", "Succeeded") for each in statuses) < least:
            return
        ready = sum(each in ("Bound", "Running", "Succeeded") for each in statuses)
        state = self._store.objects["queues", "", queue]["status"]["state"]
        waiting = [pod for pod, each in zip(pods, statuses, strict=True) if each == "Pending"]
        placed = self._placement(waiting, self._most(queue) - self.allocated(queue)) if state == "Open" else []
        if ready + len(placed) >= least:
            for pod, node in placed:
                self._bind(pod, node)

    def _close(self, group: Manifest) -> None:
        statuses = [_status_of(each) for each in self.pods_of(group)]
        completed = sum(each in ("Succeeded", "Failed") for each in statuses)
        placed = [_status_of(each) for each in self._placed(group)]
        scheduled = completed + sum(each in ("Bound", "Running", "Releasing") for each in placed)
        found = self._store.get("podgroups", group["metadata"]["namespace"], group["metadata"]["name"])
        if scheduled >= group["spec"]["minMember"]:
            self._say(found, "Completed" if scheduled == completed else "Running")
        elif self._phase(found) != "Inqueue":
            self._say(found, "Pending")

    def _say(self, group: Manifest, phase: str) -> None:
        meta = group["metadata"]
        group["status"] = {"phase": phase}
        self._store.patch("podgroups", meta["namespace"], meta["name"], {"status": {"phase": phase}}, part="status")


def _group_of(pod: Manifest) -> str:
    return str((pod["metadata"].get("annotations") or {}).get(GROUP_NAME, ""))


def _status_of(pod: Manifest) -> str:
    """Status of a task (pkg/scheduler/api/helpers.go, getTaskStatus)."""
    phase = str(pod["status"]["phase"])
    if phase in ("Succeeded", "Failed"):
        return phase
    if "deletionTimestamp" in pod["metadata"]:
        return "Releasing"
    return "Bound" if phase == "Pending" and pod["spec"].get("nodeName") else phase
