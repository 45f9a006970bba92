"""Plan for a job's pods: calls the planner, and translates its actions into steps on pods. Pure."""

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
    """Pods that are created together. `avoid`: nodes that their affinity excludes."""

    replicas: tuple[ReplicaPlace, ...]
    avoid: tuple[str, ...]

    @property
    def begins(self) -> bool:
        """True if they begin the job."""
        return any(each.begins for each in self.replicas)


class PodPlan(msgspec.Struct, frozen=True):
    """The planner's actions. `first`: those on the single pods of replica 0."""

    job: tuple[PlannedAction, ...] = ()
    first: tuple[PlannedAction, ...] = ()

    @property
    def actions(self) -> list[PlannedAction]:
        """All actions, in their order."""
        return [*self.job, *self.first]


PodStep = PodsStart | DrainReplica | ReleaseReplica
"""One step. A drain or a release names a replica, or one pod."""


def job_plan(job: TrainingJob, reading: JobReading, now: Instant) -> PodPlan:
    """Plan for a job as it is now; empty if its gang is restarted, because it then has no pods."""
    if reading.anew:
        return PodPlan()
    first = () if reading.first is None else plan(_pods_alone(job, 1), reading.first, now)
    return PodPlan(tuple(plan(_sizes(job, reading), reading.seen, now)), tuple(first))


def next_turn(job: TrainingJob, reading: JobReading, now: Instant) -> Instant | None:
    """Time at which the plan may change by itself; None: only new observations can change it."""
    times = [next_look(_sizes(job, reading), reading.seen, now)]
    if reading.first is not None:
        times.append(next_look(_pods_alone(job, 1), reading.first, now))
    return min((at for at in times if at is not None), default=None)


def pod_steps(job: TrainingJob, planned: PodPlan, pods: Sequence[PodSeen]) -> list[PodStep]:
    """The plan as steps on pods, with the serials that `next_status` counts as used. `pods`: all existing ones."""
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
    """Whole replicas where all pods of one are missing, and else single pods."""
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
    """Name of the replica at a place; of several, that of pod 0, or the one that has its first pod."""
    here = [pod for pod in pods if pod.place == place and pod.attempt == job.status.attempt]
    return min(here, key=lambda pod: (not pod.leader, index_of(job, pod), pod.name)).replica if here else ""


def _sizes(job: TrainingJob, reading: JobReading) -> ElasticSpec:
    single = reading.seen.stage is JobStage.NEW and job.spec.pods_per_replica > 1
    return _pods_alone(job, job.spec.replica_count) if single else job.spec.elastic()


def _pods_alone(job: TrainingJob, replicas: int) -> ElasticSpec:
    """Specification in which each pod of these replicas is one place: exactly their number, without growth."""
    count = replicas * job.spec.pods_per_replica
    one = {"replicas": None, "replica_increment_step": 1, "replica_discrete_values": ()}
    return msgspec.structs.replace(job.spec.elastic(), replica_count=count, max_replica_count=count, **one)
