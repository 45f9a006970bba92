"""Who hangs, and who is only slow. Pure: judges what all agents see together, and ends nobody.

A job waits for many things for long, and rightly: an evaluation, a save, a compilation, a slow disk. So nobody is to
blame while all ranks stand at the same place, nobody outside the step for those who wait inside it, and nobody who
waits for another. What is left is a rank that stands still, uses no processor, and for which the others wait.

| what is seen of the rank for which others wait | may stand still for |
| --- | --- |
| in a step, blocked (or its process is stopped, anywhere) | the bound: 90 s, ten of the longest recent steps |
| it reads its batch | 4 bounds |
| in a step, and computes, or waits for a disk | 10 bounds |
| between two steps, in a restartable function; all ranks at the same place | 20 bounds |

`--hang-timeout` is the bound by order, and holds for all that happens in a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from regrow.core.ids import Rank, Seconds, StepNo, WorkerId
from regrow.core.messages.sights import WorkerSight
from regrow.core.phase import Phase

STEPS = 10.0
"""The bound in steps."""
READING, COMPUTING, BETWEEN = 4.0, 10.0, 20.0
"""What is waited for longer than for a rank that is blocked in a step, in bounds."""
MOST_PATIENCE = 8.0
"""How far the bound is raised after ranks were replaced in vain, at most."""
_OUTSIDE = (Phase.OUTSIDE, Phase.REGION)


@dataclass(frozen=True)
class Bounds:
    """How long a worker may stand still, by what is seen of it. `ordered`: by the user, and not by evidence."""

    base: Seconds
    ordered: bool = False

    @classmethod
    def of(cls, ordered: Seconds | None, floor: Seconds, longest: Seconds, patience: float = 1.0) -> "Bounds":
        """By the user's order, else by the longest step and by how far ranks were replaced in vain (`patience`)."""
        if ordered is not None:
            return cls(ordered, ordered=True)
        return cls(max(floor, STEPS * longest) * patience)

    def for_(self, sight: WorkerSight) -> Seconds:
        """How long this worker may stand still."""
        if sight.stopped:
            return self.base
        if sight.phase in _OUTSIDE:
            return self.base * BETWEEN
        if self.ordered:
            return self.base
        if sight.busy:
            return self.base * COMPUTING
        return self.base * READING if sight.phase is Phase.DATA else self.base

    @property
    def most(self) -> Seconds:
        """Longer than any worker may stand still."""
        return self.base * BETWEEN


@dataclass(frozen=True)
class Look:
    """What is known of who holds a rank. `sight`: None while nothing says that it stands still."""

    rank: Rank
    worker: WorkerId
    sight: WorkerSight | None
    finished: bool = False
    """It has run its last step, and waits for the others."""


@dataclass(frozen=True)
class HangVerdict:
    """`hung`: to be replaced. `holding_up`: for whom the others wait, if that is known. `why`: in words.

    `left_at`: the step in which all others wait, where one may have left its loop before it.
    """

    hung: tuple[Look, ...] = ()
    holding_up: tuple[Look, ...] = ()
    why: str = ""
    left_at: StepNo | None = None


def judge(looks: Sequence[Look], bounds: Bounds) -> HangVerdict:
    """Who hangs, of all that hold a rank."""
    present = [look for look in looks if not look.finished]
    stopped = [look for look in present if look.sight is not None and look.sight.stopped]
    if stopped:
        late = tuple(look for look in stopped if _overdue(look, bounds))
        if len(stopped) == len(looks):
            return HangVerdict(_given_up(present, bounds), tuple(stopped), "the processes of all ranks are stopped")
        hung = late if _others_wait(looks, stopped, bounds) else ()
        return HangVerdict(hung, tuple(stopped), "its process is stopped")
    least = min((look.sight.progress for look in present if look.sight is not None), default=(0, 0, 0))
    holding_up = tuple(look for look in present if not _waits(look.sight, least))
    if not holding_up:
        verdict = _all_wait(present, bounds)
        late = tuple(look for look in present if look.sight is not None and look.sight.seconds >= bounds.base)
        alone = len(present) < len(looks) and len(late) == len(present) > 0
        return replace(verdict, left_at=StepNo(least[1])) if alone else verdict
    if any(look.sight is None for look in holding_up):
        return HangVerdict(holding_up=holding_up, why="it goes on")
    late = tuple(look for look in holding_up if _overdue(look, bounds))
    if len(late) < len(holding_up):
        return HangVerdict(holding_up=holding_up, why=_excuse(holding_up))
    if len(holding_up) == len(looks):
        why = "all ranks stand at the same place"
        return HangVerdict(late if bounds.ordered else _given_up(present, bounds), holding_up, why)
    return HangVerdict(late if _others_wait(present, holding_up, bounds) else (), holding_up, "the others wait for it")


def _others_wait(looks: Sequence[Look], holding_up: Sequence[Look], bounds: Bounds) -> bool:
    """Whether all others have stood still for the bound too.

    Where all were slow together, the last one to be done is not to blame as soon as the first one waits for it.
    """
    others = [look for look in looks if look not in holding_up]
    return all(look.sight is not None and look.sight.seconds >= bounds.base for look in others)


def overdue(sight: WorkerSight | None, waited: Seconds, bounds: Bounds) -> bool:
    """Whether a worker that has not answered an order for so long will not: the others wait for it for sure."""
    if sight is None:
        return waited >= bounds.most
    return min(sight.seconds, waited) >= bounds.base and sight.seconds >= bounds.for_(sight)


def _overdue(look: Look, bounds: Bounds) -> bool:
    return look.sight is not None and look.sight.seconds >= bounds.for_(look.sight)


def _waits(sight: WorkerSight | None, least: tuple[int, int, int]) -> bool:
    """Whether it waits for others: in a collective; where that cannot be seen, if it is further than somebody."""
    if sight is None:
        return False
    if sight.phase is Phase.WAITING:
        return True
    return sight.progress > least if sight.waits is None else sight.waits


def _all_wait(present: Sequence[Look], bounds: Bounds) -> HangVerdict:
    """Every rank waits in a collective. One that waits in another than all the rest has made that alone."""
    names = [look.sight.awaits for look in present if look.sight is not None]
    odd = tuple(look for look in present if look.sight is not None and names.count(look.sight.awaits) == 1)
    if len(present) > 2 and len(odd) == 1 and len(set(names)) == 2:
        bound = bounds.base * (1.0 if bounds.ordered else READING)
        late = all(look.sight is not None and look.sight.seconds >= bound for look in present)
        return HangVerdict(odd if late else (), odd, "it waits in a collective that no other rank has called")
    return HangVerdict(_given_up(present, bounds), tuple(present), "all ranks wait for one another in collectives")


def _given_up(present: Sequence[Look], bounds: Bounds) -> tuple[Look, ...]:
    """All of them, once none has done anything for longer than anything is waited for."""
    done = all(look.sight is not None and look.sight.seconds >= bounds.most and not look.sight.busy for look in present)
    return tuple(present) if done else ()


def _excuse(holding_up: Sequence[Look]) -> str:
    sights = [look.sight for look in holding_up if look.sight is not None]
    if any(sight.phase in _OUTSIDE for sight in sights):
        return "it is between two steps"
    if any(sight.phase is Phase.DATA for sight in sights):
        return "it reads its batch"
    return "it computes" if any(sight.busy for sight in sights) else "it stands still"


def told(look: Look) -> str:
    """One rank in words."""
    sight = look.sight
    if sight is None:
        return f"rank {look.rank}"
    state = "stopped (state T)" if sight.stopped else "computing" if sight.busy else "not using the processor"
    inside = f" in {sight.awaits}" if sight.awaits else f" in {sight.blocked}" if sight.blocked else ""
    return (
        f"rank {look.rank}: no progress for {sight.seconds:.1f} s in {sight.phase.name.lower()} of step {sight.step}, "
        f"after {sight.calls} collectives, {state}{inside}"
    )
