"""Ranks that are slower than the others, step by step. Pure: a slow rank is reported, and no worker is ended.

In a synchronous job all steps take the same time, so a rank is judged by its own part of a step: the wait for its
batch, and the time of its body before the update while no collective is under way. A rank is an outlier in a step if
its own time exceeds the others' median by a quarter, by five times their spread (median of absolute deviations, scaled
to a standard deviation), and by 5 ms. It becomes a straggler after a number of such steps in a row, and stops being one
after as many without. If more than a quarter of the ranks exceed the limit, none is an outlier: the work is unequal, or
the machine that all of them share is slow.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median, median_low

from regrow.core.ids import Generation, Instant, NodeId, Rank, Seconds, WorkerId
from regrow.core.messages import facts
from regrow.core.verdicts import Action, HealthVerdict, Severity
from regrow.membership.job import Job
from regrow.membership.recovery.quarantine import Quarantine
from regrow.membership.roster import Stage, WorkerRecord
from regrow.membership.states import Training

SLOWER = 0.25
"""Least excess of a straggler, as a part of the others' median."""
SPREADS = 5.0
_SIGMA = 1.4826
"""Factor from the median of absolute deviations to the standard deviation of a normal distribution."""
LEAST_S: Seconds = 0.005
MOST_SHARE = 4
"""At most one rank in this number is an outlier."""
FIRST_STEPS = 3
"""Number of the first steps of a membership, which are not judged."""
GRACE: Seconds = 30.0
"""Time for the ranks to leave the node of a straggler that is replaced."""
SOURCE = "straggler"


def outliers(times: Mapping[Rank, Seconds]) -> tuple[set[Rank], Seconds]:
    """Ranks whose own time of a step far exceeds the others' median, and that median; no ranks if there is only one."""
    if len(times) < 2:
        return set(), 0.0
    limit = median_low(times.values()) * (1 + SLOWER)
    rest = [seconds for seconds in times.values() if seconds < limit]
    beyond = {rank: seconds for rank, seconds in times.items() if seconds >= limit}
    if not rest or len(beyond) > max(1, len(times) // MOST_SHARE):
        return set(), 0.0
    usual = median(rest)
    spread = _SIGMA * median(abs(seconds - usual) for seconds in rest)
    least = usual + max(SLOWER * usual, SPREADS * spread, LEAST_S)
    return {rank for rank, seconds in beyond.items() if seconds >= least}, usual


@dataclass(frozen=True)
class StragglerFound:
    """Report that a rank is a straggler from now on. Times are means over the steps in which it was an outlier."""

    rank: Rank
    own: Seconds
    usual: Seconds
    """Median of the other ranks."""
    steps: int


@dataclass(frozen=True)
class StragglerOver:
    """Report that a rank is no longer a straggler."""

    rank: Rank


@dataclass
class _Streak:
    steps: int = 0
    own: Seconds = 0.0
    usual: Seconds = 0.0


@dataclass
class SlowRanks:
    """Compares ranks that do the same work, and remembers for how long each was slow.

    `steps`: number of steps in a row after which a rank becomes a straggler, and stops being one.
    """

    steps: int
    _times: dict[Rank, Seconds] = field(default_factory=dict)
    _seen: int = 0
    _slow: dict[Rank, _Streak] = field(default_factory=dict)
    _named: dict[Rank, int] = field(default_factory=dict)
    """The stragglers, each with the number of the last steps in a row in which it was no outlier."""

    def begin(self) -> None:
        """Drop the times of the earlier membership, but keep the stragglers."""
        self._times.clear()
        self._slow.clear()
        self._seen = 0

    def forget(self, rank: Rank) -> None:
        """Forget a rank, because another worker has it now."""
        self._named.pop(rank, None)
        self._slow.pop(rank, None)

    def apply(self, rank: Rank, own: Seconds, ranks: int) -> "list[StragglerFound | StragglerOver]":
        """Note a rank's time of a step; compares all `ranks` once each has reported a step since the last time."""
        self._times[rank] = own
        if len(self._times) < ranks:
            return []
        times, self._times = self._times, {}
        self._seen += 1
        return list(self._compared(times)) if self._seen > FIRST_STEPS else []

    def _compared(self, times: Mapping[Rank, Seconds]) -> "Iterator[StragglerFound | StragglerOver]":
        slow, usual = outliers(times)
        for rank in sorted(times):
            if rank not in slow:
                self._slow.pop(rank, None)
                if rank in self._named:
                    self._named[rank] += 1
                    if self._named[rank] >= self.steps:
                        del self._named[rank]
                        yield StragglerOver(rank)
                continue
            if rank in self._named:
                self._named[rank] = 0
                continue
            streak = self._slow.setdefault(rank, _Streak())
            streak.steps, streak.own, streak.usual = streak.steps + 1, streak.own + times[rank], streak.usual + usual
            if streak.steps >= self.steps:
                del self._slow[rank]
                self._named[rank] = 0
                yield StragglerFound(rank, streak.own / streak.steps, streak.usual / streak.steps, streak.steps)


class Stragglers:
    """Reports stragglers, and replaces their nodes if `--replace-stragglers` is given.

    Args:
        job: the job of the ranks.
        quarantine: takes the verdicts.
        give_back: drains a node at a step boundary, if that is possible.
    """

    def __init__(
        self, job: Job, quarantine: Quarantine, give_back: Callable[[facts.DrainRequested, Instant], None]
    ) -> None:
        self._job, self._quarantine, self._give_back = job, quarantine, give_back
        self._roster, self._spec, self._orders = job.roster, job.spec, job.orders
        self._places: dict[int, SlowRanks] = {}
        """The compared ranks, by place in the replica: ranks at the same place do the same work."""
        self._generation = Generation(0)
        self._reported: dict[Rank, tuple[WorkerId, NodeId, str]] = {}
        """The stragglers, each with the worker, node and device of its verdict."""

    def committed(self, event: facts.WorkerCommitted, now: Instant) -> None:
        """Compare a worker's committed step with the others', and report new and former stragglers."""
        worker = self._roster.workers.get(event.worker)
        if not self._counts(worker, event) or worker is None or worker.rank is None:
            return
        if event.generation != self._generation:
            self._begin(event.generation, now)
        unit = self._spec.unit
        place = self._places.setdefault(worker.rank % unit, SlowRanks(self._spec.straggler_steps))
        own = event.own / max(1, len(event.parts))  # Replicas may have unequal numbers of micro-batches.
        for found in place.apply(worker.rank, own, self._job.world // unit):
            if isinstance(found, StragglerFound):
                self._found(found, now)
            else:
                self._over(found.rank, "it is as fast as the others again", now)

    def _counts(self, worker: WorkerRecord | None, event: facts.WorkerCommitted) -> bool:
        if not self._spec.straggler_steps or event.own <= 0 or event.adopted or worker is None:
            return False
        trains = isinstance(self._job.state, Training) and event.generation == self._job.generation
        return trains and worker.placed and worker.stage is Stage.MEMBER and event.rank in (None, worker.rank)

    def _begin(self, generation: Generation, now: Instant) -> None:
        self._generation = generation
        for place in self._places.values():
            place.begin()
        for rank, (name, _, _) in list(self._reported.items()):
            if self._roster.places.get(rank) != name:
                self._places[rank % self._spec.unit].forget(rank)
                self._over(rank, "another worker has its rank", now)

    def _found(self, found: StragglerFound, now: Instant) -> None:
        worker = self._roster.workers[self._roster.places[found.rank]]
        device = f"slot{worker.local_rank}"
        evidence = (
            f"rank {found.rank} has taken {found.own * 1e3:.0f} ms of its own for what takes the others "
            f"{found.usual * 1e3:.0f} ms, {found.steps} times in a row"
        )
        self._reported[found.rank] = (worker.worker, worker.node, device)
        self._quarantine.observed(
            HealthVerdict(worker.node, device, Severity.SUSPECT, Action.NONE, SOURCE, evidence), now
        )
        if self._spec.replace_stragglers:
            self._replace(worker, now)

    def _over(self, rank: Rank, why: str, now: Instant) -> None:
        known = self._reported.pop(rank, None)
        if known is not None:
            text = f"rank {rank}: {why}"
            self._quarantine.observed(HealthVerdict(known[1], known[2], Severity.OK, Action.NONE, SOURCE, text), now)

    def _replace(self, worker: WorkerRecord, now: Instant) -> None:
        """Drain the worker's node at a boundary, so that no step is lost, unless that would shrink the world."""
        node = self._roster.nodes[worker.node]
        others = [each for each in self._roster.usable_nodes() if each is not node and not each.quarantined]
        room = sum(len(each.free()) for each in others)
        if room < len(node.placed):
            text = f"rank {worker.rank} is a straggler and stays on {worker.node}: no other node has room for its ranks"
            self._orders.note(f"{text} (--spares keeps a node for that)", now)
            return
        reason = f"rank {worker.rank} is a straggler (--replace-stragglers)"
        self._give_back(facts.DrainRequested(worker.node, GRACE, reason), now)
