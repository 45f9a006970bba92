"""Kueue's handling of pods: groups as workloads, finalizers, roles, replacements. Each kind of quota is a class on top.

After kubernetes-sigs/kueue, pkg/controller/jobs/pod (pod_controller.go, pod_webhook.go) and keps/976-plain-pods:

* each managed pod has a gate and the finalizer `kueue.x-k8s.io/managed`;
* a group is a workload as soon as it has as many pods as it says, and counts that number as long as it is not finished,
  less those that have succeeded;
* a pod that has failed, or was deleted before it had a node, keeps its finalizer until enough others have its role;
* one that has succeeded has its place for good: a pod that comes for it is one too many, and is deleted, newest first;
* pods of another role than the workload has are never let in;
* a group is finished when all have succeeded, or when one says `retriable-in-group: "false"` and none can run;
* a single pod is a workload of its own, named after its uid too, which ends with it.
"""

import json
from abc import ABC, abstractmethod
from collections import Counter

from tests.cluster.fake_store import FakeStore, Manifest

GATE = "kueue.x-k8s.io/admission"
QUEUE = "kueue.x-k8s.io/queue-name"
CLASS = "kueue.x-k8s.io/priority-class"
FINALIZER = "kueue.x-k8s.io/managed"
_GROUP, _COUNT = "kueue.x-k8s.io/pod-group-name", "kueue.x-k8s.io/pod-group-total-count"
_ROLE, _RETRIABLE = "kueue.x-k8s.io/role-hash", "kueue.x-k8s.io/retriable-in-group"
_ENDED = ("Succeeded", "Failed")
_SHAPE = ("nodeSelector", "affinity", "tolerations", "runtimeClassName", "priorityClassName", "overhead")


class Workload:
    """One, as long as it has pods. `born`: the version at which it was made."""

    def __init__(self, pods: list[Manifest], born: int) -> None:
        meta = pods[0]["metadata"]
        self.namespace, self.queue = meta["namespace"], meta["labels"][QUEUE]
        self.priority_class = meta["labels"].get(CLASS, "")
        self.born = born
        self.roles = Counter(map(role_of, pods))
        self.first = pods[0]
        self.reclaimed = 0
        self.admitted = self.finished = self.evicted = False

    @property
    def count(self) -> int:
        """Pods for which it holds quota, or asks."""
        return sum(self.roles.values()) - self.reclaimed


class GroupedKueue(ABC):
    """All but the quota."""

    def __init__(self, store: FakeStore) -> None:
        self.store = store
        self.workloads: dict[tuple[str, str], Workload] = {}

    @abstractmethod
    def fits(self, workload: Workload) -> bool:
        """True if there is quota for it."""

    @abstractmethod
    def priority(self, workload: Workload) -> int:
        """Of its class."""

    @abstractmethod
    def victims(self, workload: Workload) -> list[Workload]:
        """Of those that are let in, whom it may push out."""

    def admit_pod(self, body: Manifest) -> None:
        """The webhook: a new pod of a queue waits at the gate, and is kept."""
        labels = body["metadata"].get("labels") or {}
        if QUEUE in labels:
            body["spec"]["schedulingGates"] = [{"name": GATE}]
            labels["kueue.x-k8s.io/managed"] = "true"
            body["metadata"]["finalizers"] = [*(body["metadata"].get("finalizers") or []), FINALIZER]

    def held(self) -> list[Workload]:
        """Those that have quota."""
        return [each for each in self.workloads.values() if each.admitted and not each.finished]

    def turn(self) -> None:
        """Look at all pods, let in who fits, the most important first, and make room for one that does not."""
        groups = self._groups()
        for key in [each for each in self.workloads if each not in groups]:
            del self.workloads[key]
        for key, pods in groups.items():
            self._keep(key, pods)
        waiting = [(key, each) for key, each in self.workloads.items() if not each.admitted and not each.finished]
        for key, workload in sorted(waiting, key=lambda pair: (-self.priority(pair[1]), pair[1].born)):
            if self.fits(workload):
                workload.admitted, workload.evicted = True, False
                self._let_in(key)
            elif self._make_room(workload):
                return  # what becomes free is for this one

    def _make_room(self, workload: Workload) -> bool:
        """Evict a victim for it; True if one is on its way out."""
        victims = self.victims(workload)
        if any(each.evicted for each in self.held()):
            return True
        for victim in victims[:1]:
            self.evict(victim)
        return bool(victims)

    def evict(self, workload: Workload) -> None:
        """Its pods are asked to end; it has its quota until none runs."""
        workload.evicted = True
        for key, each in self.workloads.items():
            if each is workload:
                for pod in self._groups().get(key, []):
                    if "deletionTimestamp" not in pod["metadata"] and pod["status"]["phase"] not in _ENDED:
                        self.store.delete("pods", pod["metadata"]["namespace"], pod["metadata"]["name"])

    def _groups(self) -> dict[tuple[str, str], list[Manifest]]:
        found: dict[tuple[str, str], list[Manifest]] = {}
        for pod in self.store.all_of("pods"):
            labels = pod["metadata"].get("labels") or {}
            if QUEUE in labels:
                name = labels.get(_GROUP) or f"pod/{pod['metadata']['uid']}"
                found.setdefault((pod["metadata"]["namespace"], name), []).append(pod)
        return found

    def _keep(self, key: tuple[str, str], pods: list[Manifest]) -> None:
        workload = self.workloads.get(key)
        if key[1].startswith("pod/"):
            (pod,) = pods
            if "deletionTimestamp" in pod["metadata"] or pod["status"]["phase"] in _ENDED:
                self._finalize(pod)
                if workload is not None:
                    workload.finished = True
            elif workload is None:
                self.workloads[key] = Workload(pods, self.store.version)
            return
        active = [pod for pod in pods if _is_active(pod)]
        if workload is None:
            self._compose(key, pods, active)
        elif workload.finished or self._is_finished(pods, active):
            workload.finished = True
            for pod in pods:
                self._finalize(pod)
        else:
            self._replace(key, workload, pods, active)

    def _compose(self, key: tuple[str, str], pods: list[Manifest], active: list[Manifest]) -> None:
        for pod in pods:
            if pod not in active:
                self._finalize(pod)
        total = int(pods[0]["metadata"]["annotations"][_COUNT])
        assert len({pod["metadata"]["labels"][QUEUE] for pod in active}) <= 1, "pods of a group have other queues"
        if len(active) >= total:
            self._drop_excess(active, total)
            self.workloads[key] = Workload(sorted(active, key=_kept_first)[:total], self.store.version)

    def _is_finished(self, pods: list[Manifest], active: list[Manifest]) -> bool:
        total = int(pods[0]["metadata"]["annotations"][_COUNT])
        succeeded = sum(pod["status"]["phase"] == "Succeeded" for pod in pods)
        final = any(pod["metadata"]["annotations"].get(_RETRIABLE) == "false" for pod in pods)
        return succeeded == total or (final and all(pod["status"]["phase"] in _ENDED for pod in active))

    def _replace(self, key: tuple[str, str], workload: Workload, pods: list[Manifest], active: list[Manifest]) -> None:
        for role, count in workload.roles.items():
            here = [pod for pod in active if role_of(pod) == role]
            gone = [pod for pod in pods if pod not in active and role_of(pod) == role]
            self._drop_excess(here, count)
            for pod in sorted(gone, key=lambda each: int(each["metadata"]["resourceVersion"])):
                if len(gone) + len(here) <= count:
                    break
                gone.remove(pod)
                self._finalize(pod)
        workload.reclaimed = sum(pod["status"]["phase"] == "Succeeded" for pod in active)
        if workload.evicted and not any(pod["status"]["phase"] == "Running" for pod in pods):
            workload.admitted = workload.evicted = False  # it is queued again
        elif workload.admitted:
            self._let_in(key)

    def _drop_excess(self, here: list[Manifest], count: int) -> None:
        for pod in sorted(here, key=_kept_first)[count:]:
            self._finalize(pod)
            if "deletionTimestamp" not in pod["metadata"] and self._found(pod):
                self.store.delete("pods", pod["metadata"]["namespace"], pod["metadata"]["name"])

    def _let_in(self, key: tuple[str, str]) -> None:
        """Pods of its roles, as many as it has."""
        workload = self.workloads[key]
        for pod in self._groups().get(key, []):
            if pod["spec"].get("schedulingGates") and role_of(pod) in workload.roles and not workload.evicted:
                pod["spec"]["schedulingGates"] = []
                self.store.replace("pods", pod["metadata"]["namespace"], pod["metadata"]["name"], pod)

    def _finalize(self, pod: Manifest) -> None:
        found = self._found(pod)
        if found is None or FINALIZER not in (found["metadata"].get("finalizers") or []):
            return
        meta = found["metadata"]
        meta["finalizers"] = [each for each in meta["finalizers"] if each != FINALIZER]
        self.store.replace("pods", meta["namespace"], meta["name"], found)

    def _found(self, pod: Manifest) -> Manifest | None:
        found = self.store.objects.get(("pods", pod["metadata"]["namespace"], pod["metadata"]["name"]))
        same = found is not None and found["metadata"]["uid"] == pod["metadata"]["uid"]
        return self.store.get("pods", pod["metadata"]["namespace"], pod["metadata"]["name"]) if same else None


def role_of(pod: Manifest) -> str:
    """Role that the pod brings along, else one from its needs."""
    given = (pod["metadata"].get("annotations") or {}).get(_ROLE)
    if given:
        return str(given)
    resources = [each.get("resources") for each in pod["spec"]["containers"]]
    return json.dumps([resources, {key: pod["spec"].get(key) for key in _SHAPE}], sort_keys=True)


def _is_active(pod: Manifest) -> bool:
    """It runs, may run, or has succeeded."""
    if "deletionTimestamp" in pod["metadata"] and not pod["spec"].get("nodeName"):
        return False
    return bool(pod["status"]["phase"] != "Failed")


def _kept_first(pod: Manifest) -> tuple[bool, bool, str, str]:
    meta = pod["metadata"]
    kept = FINALIZER in (meta.get("finalizers") or [])
    return not kept, bool(pod["spec"].get("schedulingGates")), meta["creationTimestamp"], meta["name"]


class FakeKueue(GroupedKueue):
    """`quota`: pods of each LocalQueue. `classes`: values of WorkloadPriorityClasses."""

    def __init__(self, store: FakeStore, quota: dict[str, int], classes: dict[str, int]) -> None:
        super().__init__(store)
        self.quota = quota
        self._classes = classes

    def used(self, queue: str) -> int:
        """Pods for which quota is held."""
        return sum(each.count for each in self.held() if each.queue == queue)

    def fits(self, workload: Workload) -> bool:
        """As `GroupedKueue.fits`."""
        return workload.count <= self.quota.get(workload.queue, 0) - self.used(workload.queue)

    def victims(self, workload: Workload) -> list[Workload]:
        """Lower ones of the same queue, the lowest first."""
        lower = [each for each in self.held() if self.priority(each) < self.priority(workload)]
        return sorted((each for each in lower if each.queue == workload.queue), key=self.priority)

    def priority(self, workload: Workload) -> int:
        """As `GroupedKueue.priority`."""
        return self._classes.get(workload.priority_class, 0)
