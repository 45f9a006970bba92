"""Admission of a gang as a whole: one interface, for the scheduler, for Kueue and for Volcano. Pure."""

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
"""The role of all of the gang's pods: Kueue's own hash counts the nodes that a replacement is kept away from."""
GIVEN_BACK_CODE: Final = "REGROW_GIVEN_BACK_CODE"


class GangBackend(Protocol):
    """Additions to pods for those who admit them."""

    def dress(self, job: TrainingJob, pods: list[dict[str, Any]], *, group: str, total: int, gang: bool) -> None:
        """Add to pods of one group of `total`, which are admitted together or not at all."""
        ...

    def groups(self, job: TrainingJob) -> list[tuple[ApiKind, Manifest]]:
        """PodGroups that are made before this attempt's pods, and end with it."""
        ...


class BareBackend:
    """Nothing is added: the scheduler takes each pod as it comes; the planner gives up a gang that stays in parts."""

    def dress(self, job: TrainingJob, pods: list[dict[str, Any]], *, group: str, total: int, gang: bool) -> None:
        """Add nothing."""

    def groups(self, job: TrainingJob) -> list[tuple[ApiKind, Manifest]]:
        """None."""
        return []


class KueueBackend:
    """Each group is a workload of Kueue's: it is admitted, preempted and counted as one.

    Kueue keeps every pod of a group until another one of its role has its place, or none runs and the group is said not
    to be tried again. The second is said of all groups: a gang that is over is followed by another group.
    """

    def dress(self, job: TrainingJob, pods: list[dict[str, Any]], *, group: str, total: int, gang: bool) -> None:
        """Add queue, class, group and topology."""
        kueue = job.spec.kueue
        if kueue is None:
            return  # `spec_problems` has said so
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
                    # For Kueue who ends with 0 has done its part of the group, and is not replaced in it.
                    first = pod["spec"]["containers"][0]
                    code = {"name": GIVEN_BACK_CODE, "value": str(RUN_AGAIN)}
                    first["env"] = [*(first.get("env") or []), code]
            for how, key in (("required", kueue.required_topology), ("preferred", kueue.preferred_topology)):
                if key:
                    annotations[_TOPOLOGY.format(how)] = key

    def groups(self, job: TrainingJob) -> list[tuple[ApiKind, Manifest]]:
        """None: Kueue makes its workloads itself."""
        return []


class VolcanoBackend:
    """Volcano schedules the pods; the gang is one PodGroup, and all pods beyond it are another, which needs one pod.

    In the gang's own group they would count for its minimum, and pod 0 could be taken in the place of one of them. A
    pod without a group gets one from Volcano, whose `minResources` hold quota also when no such pod is left.
    """

    def dress(self, job: TrainingJob, pods: list[dict[str, Any]], *, group: str, total: int, gang: bool) -> None:
        """Name group and scheduler; a template names another scheduler where Volcano is called otherwise."""
        for pod in pods:
            pod["metadata"]["annotations"][VOLCANO_GROUP] = pod_group_name(job, gang=gang)
            pod["spec"].setdefault("schedulerName", "volcano")

    def groups(self, job: TrainingJob) -> list[tuple[ApiKind, Manifest]]:
        """The gang's, and that of all others where the job may grow."""
        return [(ApiKind.POD_GROUPS, each) for each in volcano_groups(job)]


class SchedulerBackend:
    """Kubernetes' own scheduler places a gang whole; each pod beyond it is in no group, as without a backend."""

    def dress(self, job: TrainingJob, pods: list[dict[str, Any]], *, group: str, total: int, gang: bool) -> None:
        """Name the group. A server that drops the field has no PodGroups either, so no pod is made there."""
        for pod in pods if gang else ():
            pod["spec"]["schedulingGroup"] = {"podGroupName": pod_group_name(job, gang=True)}

    def groups(self, job: TrainingJob) -> list[tuple[ApiKind, Manifest]]:
        """The gang's."""
        return [(ApiKind.GANGS, scheduler_group(job))]


_BACKENDS: Final[dict[str, GangBackend]] = {
    "kueue": KueueBackend(),
    "volcano": VolcanoBackend(),
    "gang": SchedulerBackend(),
}


def backend_of(job: TrainingJob) -> GangBackend:
    """The one that the job asks for."""
    return _BACKENDS.get(job.spec.backend) or BareBackend()  # terms may be another operator's
