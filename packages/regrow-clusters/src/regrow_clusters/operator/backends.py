"""What makes a gang start whole: one interface, for the scheduler alone and for Kueue. Pure."""

from typing import Any, Final, Protocol

from regrow_clusters.operator.resource import TrainingJob

_QUEUE: Final = "kueue.x-k8s.io/queue-name"
_GROUP: Final = "kueue.x-k8s.io/pod-group-name"
_COUNT: Final = "kueue.x-k8s.io/pod-group-total-count"
_CLASS: Final = "kueue.x-k8s.io/priority-class"
_TOPOLOGY: Final = "kueue.x-k8s.io/podset-{}-topology"


class GangBackend(Protocol):
    """What is added to pods for those who admit them."""

    def dress(self, job: TrainingJob, pods: list[dict[str, Any]], *, group: str, total: int, gang: bool) -> None:
        """Add to pods of one group of `total`, which are admitted together or not at all."""
        ...


class BareBackend:
    """Nothing is added: the scheduler takes each pod as it comes; the planner gives up a gang that stays in parts."""

    def dress(self, job: TrainingJob, pods: list[dict[str, Any]], *, group: str, total: int, gang: bool) -> None:
        """Add nothing."""


class KueueBackend:
    """Each group is a workload of Kueue's: it is admitted, preempted and counted as one."""

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
                labels[_GROUP] = group
                annotations[_COUNT] = str(total)
            for how, key in (("required", kueue.required_topology), ("preferred", kueue.preferred_topology)):
                if key:
                    annotations[_TOPOLOGY.format(how)] = key


def backend_of(job: TrainingJob) -> GangBackend:
    """The one that the job asks for."""
    return KueueBackend() if job.spec.backend == "kueue" else BareBackend()
