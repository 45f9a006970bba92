"""Admission of a gang as a whole: one interface for Kubernetes' own scheduler, Kueue and Volcano. Pure."""

from typing import Any, Final, Protocol

from regrow.core.exit_codes import RUN_AGAIN
from regrow_clusters.operator.api import ApiKind, Manifest
from regrow_clusters.operator.objects import pod_group_name, scheduler_group, volcano_groups
from regrow_clusters.operator.resource import TrainingJob

_QUEUE: Final = "kueue.x-k8s.io/queue-name"
GROUP_LABEL: Final = "kueue.x-k8s.io/pod-group-name"
_COUNT: Final = "kueue.x-k8s.io/pod-group-total-count"
_CLASS: Final = "kueue.x-k8s.io/priority-class"
_TOPOLOGY: Final = "kueue.x-k8s.io/podset-{}-topology"
KUEUE_GATE: Final = "kueue.x-k8s.io/admission"
KUEUE_FINALIZER: Final = "kueue.x-k8s.io/managed"
ROLE: Final = "kueue.x-k8s.io/role-hash"
VOLCANO_GROUP: Final = "scheduling.k8s.io/group-name"
_RETRIABLE: Final = "kueue.x-k8s.io/retriable-in-group"
GANG_ROLE: Final = "gang"
"""Role of all pods of the gang. Kueue's own hash would differ for a replacement, as it includes avoided nodes."""
GIVEN_BACK_CODE: Final = "REGROW_GIVEN_BACK_CODE"


class GangBackend(Protocol):
    """Additions to a job's pods that an admission system needs."""

    def dress(self, job: TrainingJob, pods: list[dict[str, Any]], *, group: str, total: int, gang: bool) -> None:
        """Extend the pods of one group of `total` pods, which are admitted together or not at all."""
        ...

    def groups(self, job: TrainingJob) -> list[tuple[ApiKind, Manifest]]:
        """PodGroups that are created before this attempt's pods, and end with the attempt."""
        ...


class BareBackend:
    """No additions: the scheduler places each pod by itself; the planner gives up a gang that stays incomplete."""

    def dress(self, job: TrainingJob, pods: list[dict[str, Any]], *, group: str, total: int, gang: bool) -> None:
        """Add nothing."""

    def groups(self, job: TrainingJob) -> list[tuple[ApiKind, Manifest]]:
        """None."""
        return []


class KueueBackend:
    """Each group is a workload of Kueue: it is admitted, preempted and counted as one.

    Kueue keeps every pod of a group until another pod of its role has replaced it, or until no pod runs and the group
    is marked as not retriable. All groups are marked so, because a gang that is over is followed by a new group.
    """

    def dress(self, job: TrainingJob, pods: list[dict[str, Any]], *, group: str, total: int, gang: bool) -> None:
        """Add queue, class, group and topology."""
        kueue = job.spec.kueue
        if kueue is None:
            return  # `spec_problems` has reported that
        priority = kueue.priority_class if gang else kueue.elastic_priority_class
        for pod in pods:
            labels, annotations = pod["metadata"]["labels"], pod["metadata"]["annotations"]
            labels[_QUEUE] = kueue.queue_name
            if priority:
                labels[_CLASS] = priority
            if total > 1:
                labels[GROUP_LABEL] = group
                annotations[_COUNT] = str(total)
                annotations[_RETRIABLE] = "false"
                if gang:
                    annotations[ROLE] = GANG_ROLE
                    # Kueue counts a pod that ends with 0 as finished, and does not let it be replaced in the group.
                    first = pod["spec"]["containers"][0]
                    code = {"name": GIVEN_BACK_CODE, "value": str(RUN_AGAIN)}
                    first["env"] = [*(first.get("env") or []), code]
            for how, key in (("required", kueue.required_topology), ("preferred", kueue.preferred_topology)):
                if key:
                    annotations[_TOPOLOGY.format(how)] = key

    def groups(self, job: TrainingJob) -> list[tuple[ApiKind, Manifest]]:
        """None: Kueue creates its workloads itself."""
        return []


class VolcanoBackend:
    """Volcano schedules the pods; the gang is one PodGroup, and all other pods are a second one with a minimum of 1.

    In the gang's group the other pods would count for its minimum, and pod 0 could be preempted instead of one of them.
    A pod without a group gets one from Volcano, whose `minResources` hold quota even when no such pod is left.
    """

    def dress(self, job: TrainingJob, pods: list[dict[str, Any]], *, group: str, total: int, gang: bool) -> None:
        """Set group and scheduler; the job's template names the scheduler if Volcano's is not `volcano`."""
        for pod in pods:
            pod["metadata"]["annotations"][VOLCANO_GROUP] = pod_group_name(job, gang=gang)
            pod["spec"].setdefault("schedulerName", "volcano")

    def groups(self, job: TrainingJob) -> list[tuple[ApiKind, Manifest]]:
        """The gang's group, and that of all other pods if the job may grow."""
        return [(ApiKind.POD_GROUPS, each) for each in volcano_groups(job)]


class SchedulerBackend:
    """Kubernetes' own scheduler places the gang as a whole; pods beyond it are in no group, as in `BareBackend`."""

    def dress(self, job: TrainingJob, pods: list[dict[str, Any]], *, group: str, total: int, gang: bool) -> None:
        """Set the group. A server that drops the field has no PodGroups either, so no pod is created there."""
        for pod in pods if gang else ():
            pod["spec"]["schedulingGroup"] = {"podGroupName": pod_group_name(job, gang=True)}

    def groups(self, job: TrainingJob) -> list[tuple[ApiKind, Manifest]]:
        """The gang's group."""
        return [(ApiKind.GANGS, scheduler_group(job))]


_BACKENDS: Final[dict[str, GangBackend]] = {
    "kueue": KueueBackend(),
    "volcano": VolcanoBackend(),
    "gang": SchedulerBackend(),
}


def backend_of(job: TrainingJob) -> GangBackend:
    """Backend that the job's specification names."""
    return _BACKENDS.get(job.spec.backend) or BareBackend()  # another operator may have written the terms
