"""Distinguish hanging workers from slow ones. Pure: judges the observations of all agents together, and ends none.

A job may rightly wait long: for an evaluation, a save, a compilation, a slow disk. Therefore no rank is to blame while
all ranks are at the same place, nor is a rank outside the step for which others wait inside it, nor one that waits for
another. This leaves a rank that makes no progress, uses no processor, and for which the others wait.

If all wait, some of them for their devices, a collective there does not end and the rank to blame is unknown: the
groups are formed anew, and no worker is ended (`HangVerdict.anew`).

| observation of the rank for which others wait | longest standstill |
| --- | --- |
| in a step, blocked (or its process is stopped, anywhere) | the bound: 90 s, ten of the longest recent steps |
| it reads its batch | 4 bounds |
| in a step, and computes, or waits for a disk | 10 bounds |
| between two steps, in a restartable function; all ranks at the same place | 20 bounds |

`--hang-timeout` sets the bound, which then holds for everything in a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from regrow.core.ids import Rank, Seconds, StepNo, WorkerId
from regrow.core.messages.observations import DEVICE, WorkerObservation
from regrow.core.phase import IN_BODY, Phase

STEPS = 10.0
"""The bound, as a multiple of the longest recent step."""
READING, COMPUTING, BETWEEN = 4.0, 10.0, 20.0
"""Longest standstill in bounds: reading a batch, computing, between two steps."""
ASKED_S: Seconds = 60.0
"""Time of standing still within which a worker queries its device and publishes the answer, if it can."""
MOST_PATIENCE = 8.0
"""Largest factor on the bound, reached after ranks were replaced in vain."""
_OUTSIDE = (Phase.OUTSIDE, Phase.REGION)


@dataclass(frozen=True)
class Bounds:
    """Longest standstill of a worker, by its observation. `ordered`: set by the user, not derived from evidence."""

    base: Seconds
    ordered: bool = False

    @classmethod
    def of(cls, ordered: Seconds | None, floor: Seconds, longest: Seconds, patience: float = 1.0) -> "Bounds":
        """Bounds by the user's setting; else by the longest step, times `patience` if ranks were replaced in vain."""
        if ordered is not None:
            return cls(ordered, ordered=True)
        return cls(max(floor, STEPS * longest) * patience)

    def allowed(self, seen: WorkerObservation) -> Seconds:
        """Longest standstill allowed to this worker."""
        if seen.stopped:
            return self.base
        if seen.phase in _OUTSIDE:
            return self.base * BETWEEN
        if self.ordered:
            return self.base
        if seen.busy:
            return self.base * COMPUTING
        return self.base * READING if seen.phase is Phase.DATA else self.base

    @property
    def most(self) -> Seconds:
        """Longest standstill allowed to any worker."""
        return self.base * BETWEEN


@dataclass(frozen=True)
class RankObservation:
    """A rank and the last observation of its worker. `seen`: None if nothing shows that it stands still."""

    rank: Rank
    worker: WorkerId
    seen: WorkerObservation | None
    finished: bool = False
    """True if the rank has run its last step and waits for the others."""


@dataclass(frozen=True)
class HangVerdict:
    """Judgement. `hung`: ranks to replace. `holding_up`: the ranks for which the others wait, if known. `why`: a text.

    `left_at`: the step in which all others wait, if a rank may have left its loop before it.
    """

    hung: tuple[RankObservation, ...] = ()
    holding_up: tuple[RankObservation, ...] = ()
    why: str = ""
    left_at: StepNo | None = None
    anew: bool = False
    """True if all ranks wait, some of them for their devices, for longer than allowed."""


def judge(looks: Sequence[RankObservation], bounds: Bounds) -> HangVerdict:
    """Judge which of the workers that hold a rank hang, from the observations of all of them."""
    present = [look for look in looks if not look.finished]
    stopped = [look for look in present if look.seen is not None and look.seen.stopped]
    if stopped:
        late = tuple(look for look in stopped if _overdue(look, bounds))
        if len(stopped) == len(looks):
            return HangVerdict(_given_up(present, bounds), tuple(stopped), "the processes of all ranks are stopped")
        hung = late if _others_wait(looks, stopped, bounds) else ()
        return HangVerdict(hung, tuple(stopped), "its process is stopped")
    at_devices = [look for look in present if _at_device(look.seen, bounds)]
    if at_devices and all(look in at_devices or _waits_for_sure(look.seen) for look in present):
        anew = all(_overdue(look, bounds) for look in present)
        return HangVerdict(holding_up=tuple(present), why="all wait for their devices", anew=anew)
    least = min((look.seen.progress for look in present if look.seen is not None), default=(0, 0, 0))
    holding_up = tuple(look for look in present if not _waits(look.seen, least))
    if not holding_up:
        verdict = _all_wait(present, bounds)
        late = tuple(look for look in present if look.seen is not None and look.seen.seconds >= bounds.base)
        alone = len(present) < len(looks) and len(late) == len(present) > 0
        return replace(verdict, left_at=StepNo(least[1])) if alone else verdict
    if any(look.seen is None for look in holding_up):
        return HangVerdict(holding_up=holding_up, why="it goes on")
    late = tuple(look for look in holding_up if _overdue(look, bounds))
    if len(late) < len(holding_up):
        return HangVerdict(holding_up=holding_up, why=_excuse(holding_up))
    if len(holding_up) == len(looks):
        why = "all ranks are at the same place"
        if all(_silent(look.seen) for look in holding_up):
            return HangVerdict(holding_up=holding_up, why=why, anew=True)
        return HangVerdict(late if bounds.ordered else _given_up(present, bounds), holding_up, why)
    return HangVerdict(late if _others_wait(present, holding_up, bounds) else (), holding_up, "the others wait for it")


def _others_wait(looks: Sequence[RankObservation], holding_up: Sequence[RankObservation], bounds: Bounds) -> bool:
    """True if all others have stood still for the bound too.

    If all are slow together, the last rank is not to blame as soon as the first one begins to wait for it.
    """
    others = [look for look in looks if look not in holding_up]
    return all(look.seen is not None and look.seen.seconds >= bounds.base for look in others)


def overdue(seen: WorkerObservation | None, waited: Seconds, bounds: Bounds) -> bool:
    """True if a worker has not answered an order for too long; the others certainly wait for it."""
    if seen is None:
        return waited >= bounds.most
    return min(seen.seconds, waited) >= bounds.base and seen.seconds >= bounds.allowed(seen)


def _at_device(seen: WorkerObservation | None, bounds: Bounds) -> bool:
    """True if the worker's progress page shows a wait for its device; workers that stand still for long query it.

    A wait in the driver looks like work of the processor, which may take any time. Only a bound set by the user may
    expire before that query; then such a worker counts as waiting for its device.
    """
    if seen is None:
        return False
    unknown = bounds.ordered and seen.waits is None and seen.busy and seen.phase in IN_BODY
    return seen.awaits == DEVICE or unknown


def _silent(seen: WorkerObservation | None) -> bool:
    """True if a worker computes nothing, and has not queried its device because some thread holds the GIL."""
    if seen is None or seen.busy or seen.phase not in IN_BODY:
        return False
    return seen.waits is None and seen.seconds >= ASKED_S


def _waits_for_sure(seen: WorkerObservation | None) -> bool:
    return seen is not None and not seen.stopped and (seen.waits is True or seen.phase is Phase.WAITING)


def behind(counts: Mapping[Rank, Mapping[str, int]]) -> list[Rank]:
    """Ranks that have called fewer collectives than others in each of their uneven groups; none if all ranks did.

    Args:
        counts: by rank, its number of calls in each group.
    """
    most: dict[str, int] = {}
    least: dict[str, int] = {}
    for calls in counts.values():
        for group, number in calls.items():
            most[group] = max(most.get(group, number), number)
            least[group] = min(least.get(group, number), number)
    uneven = [group for group in most if most[group] > least[group]]
    found = []
    for rank, calls in counts.items():
        mine = [group for group in uneven if group in calls]
        if mine and all(calls[group] < most[group] for group in mine):
            found.append(rank)
    return found if len(found) < len(counts) else []


def _overdue(look: RankObservation, bounds: Bounds) -> bool:
    return look.seen is not None and look.seen.seconds >= bounds.allowed(look.seen)


def _waits(seen: WorkerObservation | None, least: tuple[int, int, int]) -> bool:
    """True if a worker waits for others in a collective or, if that cannot be seen, is further than the slowest."""
    if seen is None:
        return False
    if seen.phase is Phase.WAITING:
        return True
    return seen.progress > least if seen.waits is None else seen.waits


def _all_wait(present: Sequence[RankObservation], bounds: Bounds) -> HangVerdict:
    """Judge ranks that all wait in collectives. A rank whose collective no other rank has called is to blame."""
    names = [look.seen.awaits for look in present if look.seen is not None]
    odd = tuple(look for look in present if look.seen is not None and names.count(look.seen.awaits) == 1)
    if len(present) > 2 and len(odd) == 1 and len(set(names)) == 2:
        bound = bounds.base * (1.0 if bounds.ordered else READING)
        late = all(look.seen is not None and look.seen.seconds >= bound for look in present)
        return HangVerdict(odd if late else (), odd, "it waits in a collective that no other rank has called")
    return HangVerdict(_given_up(present, bounds), tuple(present), "all ranks wait for one another in collectives")


def _given_up(present: Sequence[RankObservation], bounds: Bounds) -> tuple[RankObservation, ...]:
    """All ranks, once none has made progress for longer than the longest bound; none before that."""
    done = all(look.seen is not None and look.seen.seconds >= bounds.most and not look.seen.busy for look in present)
    return tuple(present) if done else ()


def _excuse(holding_up: Sequence[RankObservation]) -> str:
    observations = [look.seen for look in holding_up if look.seen is not None]
    if any(seen.phase in _OUTSIDE for seen in observations):
        return "it is between two steps"
    if any(seen.phase is Phase.DATA for seen in observations):
        return "it reads its batch"
    return "it computes" if any(seen.busy for seen in observations) else "it stands still"


def describe(look: RankObservation) -> str:
    """Describe one rank for people."""
    seen = look.seen
    if seen is None:
        return f"rank {look.rank}"
    state = "stopped (state T)" if seen.stopped else "computing" if seen.busy else "not using the processor"
    inside = f" in {seen.awaits}" if seen.awaits else f" in {seen.blocked}" if seen.blocked else ""
    return (
        f"rank {look.rank}: no progress for {seen.seconds:.1f} s in {seen.phase.name.lower()} of step {seen.step}, "
        f"after {seen.calls} collectives, {state}{inside}"
    )
