"""Plan for a job's pods: the planner's answers, and the pods they speak of. Pure."""

from collections.abc import Sequence

import msgspec

from regrow.core.ids import Instant
from regrow_clusters.cluster.actions import DrainReplica, PlannedAction, ReleaseReplica, StartGang, StartReplica
from regrow_clusters.cluster.observed import JobStage
from regrow_clusters.cluster.planner import next_look, plan
from regrow_clusters.cluster.sizes import ElasticSpec
from regrow_clusters.operator.objects import ReplicaPlace
from regrow_clusters.operator.observed.observing import JobReading
from regrow_clusters.operator.observed.pod_seen import PodSeen, index_of
from regrow_clusters.operator.resource import TrainingJob


class PodsStart(msgspec.Struct, frozen=True):
    """Pods that are made in one go. `avoid`: nodes that they are kept away from."""

    replicas: tuple[ReplicaPlace, ...]
    avoid: tuple[str, ...]

    @property
    def begins(self) -> bool:
        """True if they begin the job."""
        return any(each.begins for each in self.replicas)


class PodPlan(msgspec.Struct, frozen=True):
    """Plan of the planner. `first`: of the pods of replica 0, each by itself."""

    job: tuple[PlannedAction, ...] = ()
    first: tuple[PlannedAction, ...] = ()

    @property
    def actions(self) -> list[PlannedAction]:
        """All, in their order."""
        return [*self.job, *self.first]


PodStep = PodsStart | DrainReplica | ReleaseReplica
"""One that is done. What leaves is named: a replica, or one pod."""


def job_plan(job: TrainingJob, reading: JobReading, now: Instant) -> PodPlan:
    """For a job as it is now; nothing where its gang starts anew, for then nothing is there any more."""
    if reading.anew:
        return PodPlan()
    first = () if reading.first is None else plan(_pods_alone(job, 1), reading.first, now)
    return PodPlan(tuple(plan(_sizes(job, reading), reading.seen, now)), tuple(first))


def next_turn(job: TrainingJob, reading: JobReading, now: Instant) -> Instant | None:
    """Time at which the plan may change by itself; None: only news can change it."""
    times = [next_look(_sizes(job, reading), reading.seen, now)]
    if reading.first is not None:
        times.append(next_look(_pods_alone(job, 1), reading.first, now))
    return min((at for at in times if at is not None), default=None)


def pod_steps(job: TrainingJob, planned: PodPlan, pods: Sequence[PodSeen]) -> list[PodStep]:
    """The same in pods, with the numbers that `next_status` counts as taken. `pods`: all there are."""
    steps: list[PodStep] = []
    serial = job.status.serial
    for action in planned.job:
        if isinstance(action, StartGang):
            steps.append(PodsStart(_gang(job, action, serial, pods), action.avoid))
            serial += len(action.places)
        elif isinstance(action, StartReplica):
            serial += 1
            steps.append(PodsStart((ReplicaPlace(action.place, serial, begins=False),), action.avoid))
        else:
            steps.append(action)
    for action in planned.first:
        if isinstance(action, StartReplica):
            serial += 1
            place = ReplicaPlace(0, serial, begins=False, index=action.place, part_of=_replica_at(job, 0, pods))
            steps.append(PodsStart((place,), action.avoid))
        elif isinstance(action, DrainReplica | ReleaseReplica):
            steps.append(action)
    return steps


def _gang(job: TrainingJob, action: StartGang, serial: int, pods: Sequence[PodSeen]) -> tuple[ReplicaPlace, ...]:
    """Whole replicas where all of one is missing, and single pods."""
    each = job.spec.pods_per_replica
    missing: dict[int, list[tuple[int, int]]] = {}
    for number, at in enumerate(action.places, serial + 1):
        missing.setdefault(at // each, []).append((at % each, number))
    found: list[ReplicaPlace] = []
    for place, parts in missing.items():
        if len(parts) == each:
            found.append(ReplicaPlace(place, parts[0][1], begins=True))
            continue
        of = _replica_at(job, place, pods)
        found.extend(ReplicaPlace(place, number, begins=True, index=index, part_of=of) for index, number in parts)
    return tuple(found)


def _replica_at(job: TrainingJob, place: int, pods: Sequence[PodSeen]) -> str:
    """The replica that a pod is made for; of several that of pod 0, or the one that has its first pod."""
    here = [pod for pod in pods if pod.place == place and pod.attempt == job.status.attempt]
    return min(here, key=lambda pod: (not pod.leader, index_of(job, pod), pod.name)).replica if here else ""


def _sizes(job: TrainingJob, reading: JobReading) -> ElasticSpec:
    single = reading.seen.stage is JobStage.NEW and job.spec.pods_per_replica > 1
    return _pods_alone(job, job.spec.replica_count) if single else job.spec.elastic()


def _pods_alone(job: TrainingJob, replicas: int) -> ElasticSpec:
    """The sizes of that many replicas' pods, each of them a place: as many as there are, and no others."""
    count = replicas * job.spec.pods_per_replica
    one = {"replicas": None, "replica_increment_step": 1, "replica_discrete_values": ()}
    return msgspec.structs.replace(job.spec.elastic(), replica_count=count, max_replica_count=count, **one)
