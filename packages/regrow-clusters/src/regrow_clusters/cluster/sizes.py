"""Allowed numbers of replicas of a job, and checks of its specification. Fields have HyperPod's names if it has one.

Pure.
"""

import msgspec

from regrow.core.ids import Seconds

MOST_REPLICAS = 4096


class ElasticSpec(msgspec.Struct, frozen=True, rename="camel"):
    """Specification of a job's size. A replica, the unit that is added and removed, is one whole copy of the model."""

    replica_count: int
    """Size of the gang: the replicas that start together. The job never shrinks below it by its own choice."""
    max_replica_count: int
    replicas: int | None = None
    """Number wanted now; None: as many as are allowed."""
    replica_increment_step: int = 1
    """The allowed sizes are `replica_count` and whole steps above it."""
    replica_discrete_values: tuple[int, ...] = ()
    """The only allowed sizes, instead of steps."""
    max_pending_replicas: int = 1
    """Most replicas that wait for capacity, beyond the gang: a waiting replica is the request to grow."""
    graceful_shutdown_timeout_in_seconds: Seconds = 60.0
    scaling_timeout_in_seconds: Seconds = 300.0
    """A replica that does not run within this time of getting its machines is given up; they are avoided."""
    scale_up_snooze_time_in_seconds: Seconds = 30.0
    """Time after any change of the replicas during which the job does not grow."""


class SizeProblem(msgspec.Struct, frozen=True):
    """Problem in a specification: the field, the error, and its cure."""

    field: str
    message: str


def problems(spec: ElasticSpec) -> list[SizeProblem]:
    """Everything that is wrong with the sizes; no replica is started for a specification with a problem."""
    found: list[SizeProblem] = []
    low, high = spec.replica_count, spec.max_replica_count

    def wrong(field: str, message: str) -> None:
        found.append(SizeProblem(field, message))

    if low < 1:
        wrong("replicaCount", f"is {low}: a job has at least one replica; give 1 or more")
    if high < low:
        wrong("maxReplicaCount", f"is {high}, below replicaCount ({low}): give {low} or more")
    if high > MOST_REPLICAS:
        wrong("maxReplicaCount", f"is {high}: at most {MOST_REPLICAS} are supported")
    if spec.replicas is not None and not low <= spec.replicas <= high:
        wrong("replicas", f"is {spec.replicas}: give a number from replicaCount ({low}) to maxReplicaCount ({high})")
    if spec.replica_increment_step < 1:
        wrong("replicaIncrementStep", f"is {spec.replica_increment_step}: give 1 or more")
    if spec.replica_discrete_values:
        found.extend(SizeProblem("replicaDiscreteValues", text) for text in _discrete_problems(spec))
    if spec.max_pending_replicas < 1:
        wrong("maxPendingReplicas", f"is {spec.max_pending_replicas}: give 1 or more; to forbid growth, set replicas")
    for name in ("graceful_shutdown_timeout", "scaling_timeout", "scale_up_snooze_time"):
        seconds = getattr(spec, f"{name}_in_seconds")
        if seconds < 0:
            first, *rest = name.split("_")
            wrong(f"{first}{''.join(map(str.title, rest))}InSeconds", f"is {seconds:g}: a time is not negative")
    return found


def _discrete_problems(spec: ElasticSpec) -> list[str]:
    wrong = []
    values, low, high = spec.replica_discrete_values, spec.replica_count, spec.max_replica_count
    if spec.replica_increment_step != 1:
        wrong.append("and replicaIncrementStep are both given: leave one of them out")
    if list(values) != sorted(set(values)):
        wrong.append(f"is {list(values)}: give rising numbers")
    if low not in values:
        wrong.append(f"does not have replicaCount ({low}), with which the job starts: add it")
    outside = [value for value in values if not low <= value <= high]
    if outside:
        wrong.append(f"has {outside}, not between replicaCount ({low}) and maxReplicaCount ({high})")
    return wrong


def allowed_sizes(spec: ElasticSpec) -> list[int]:
    """All sizes that the job may have, in rising order; the first is the gang's."""
    if spec.replica_discrete_values:
        return list(spec.replica_discrete_values)
    return list(range(spec.replica_count, spec.max_replica_count + 1, spec.replica_increment_step))


def wanted_size(spec: ElasticSpec) -> int:
    """The largest allowed size that is not above the requested one."""
    asked = spec.max_replica_count if spec.replicas is None else spec.replicas
    return max((size for size in allowed_sizes(spec) if size <= asked), default=spec.replica_count)


def next_size(spec: ElasticSpec, present: int) -> int:
    """The next allowed size above the present number of replicas, limited to the wanted size."""
    wanted = wanted_size(spec)
    return min((size for size in allowed_sizes(spec) if present < size <= wanted), default=wanted)
