"""Incidents with their causes and costs, and the budget of faults."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from regrow.core.ids import Generation, Instant, Rank, Seconds, StepNo, WorkerId
from regrow.core.messages import facts
from regrow.core.messages.state_ways import StateWay, merged
from regrow.core.process.stage_times import CONNECT, FIRST_STEP, HYDRATE
from regrow.core.records import IncidentClosed, IncidentOpened, Record

CLOCK_SLACK = 60.0
"""Longest plausible time from a fault to its detection; a time of a fault before that comes from a wrong clock."""
CORRUPTION = "corruption"
"""Kind of an incident that counts as explained although the failed rank may be unknown."""
RUNGS = ("retry", "standby", "fork", "node", "grow", "shrink", "all", "restart")


@dataclass
class Budget:
    """Number of faults that a sliding window may hold."""

    most: int
    window: Seconds
    times: deque[Instant] = field(default_factory=deque)
    """Times of the faults in the window."""

    def spend(self, now: Instant) -> bool:
        """Count one fault; False if the window then holds more than `most`."""
        while self.times and now - self.times[0] >= self.window:
            self.times.popleft()
        self.times.append(now)
        return len(self.times) <= self.most


_OF_BODIES = ("exception", "collective")


@dataclass
class Incident:
    """One open fault, from its detection to the next committed step; faults in between are merged into it.

    A planned change of the world is an incident too, and becomes a fault if one strikes meanwhile.
    """

    number: int
    step: StepNo
    kind: str
    cause: str
    opened_at: Instant
    fault_at: Instant
    ranks: list[Rank]
    unexplained: bool
    """True if only a symptom of the newest fault is known; the next reported cause is taken as its cause."""
    faults: int = 1
    rung: str = "retry"
    halted_at: Instant | None = None
    ordered_at: Instant | None = None
    resumed_at: Instant | None = None
    form_s: Seconds = 0.0
    hydrated_bytes: int = 0
    ways: list[StateWay] = field(default_factory=list)
    steps_lost: int = 0
    waiting_for: set[Rank] = field(default_factory=set)
    planned: bool = False
    """True if nothing has failed: the world is being changed on purpose."""
    before: int = 0
    after: int = 0
    replacements: dict[WorkerId, dict[str, Seconds]] = field(default_factory=dict)
    """For each worker that joined during the incident: the durations of its stages."""
    not_kept: dict[str, list[Rank]] = field(default_factory=dict)
    """Variables with a different value on each rank; for each of them, the ranks that have lost their value."""
    stood: dict[WorkerId, Instant] = field(default_factory=dict)
    """Time, on the node's clock, at which each newcomer reached the step that it has not committed yet."""

    def climb(self, rung: str) -> None:
        """Note the highest rung of the ladder that was needed."""
        if RUNGS.index(rung) > RUNGS.index(self.rung):
            self.rung = rung

    def closed(self, generation: Generation, now: Instant) -> IncidentClosed:
        """Record of the closed incident; `now`: time at which the last rank committed again."""
        halted = self.opened_at if self.halted_at is None else self.halted_at
        ordered = halted if self.ordered_at is None else self.ordered_at
        resumed = ordered if self.resumed_at is None else self.resumed_at
        done = {worker: stages for worker, stages in self.replacements.items() if FIRST_STEP in stages}
        slowest = max(done, key=lambda worker: sum(done[worker].values()), default=None)
        return IncidentClosed(
            at=now,
            incident=self.number,
            generation=generation,
            step=self.step,
            kind=self.kind,
            ranks=self.ranks,
            cause=self.cause,
            rung=self.rung,
            faults=self.faults,
            detect=max(0.0, self.opened_at - self.fault_at),
            abort=max(0.0, halted - self.opened_at),
            regroup=max(0.0, ordered - halted + self.form_s),
            hydrate=max(0.0, resumed - ordered - self.form_s),
            redo=max(0.0, now - resumed),
            total=now - min(self.fault_at, self.opened_at),
            steps_lost=self.steps_lost,
            hydrated_bytes=self.hydrated_bytes,
            opened_at=self.opened_at,
            fault_at=self.fault_at,
            before=self.before,
            after=self.after,
            ways=self.ways,
            slowest=slowest,
            stages={} if slowest is None else done[slowest],
            not_kept=self.not_kept,
        )


class Incidents:
    """Opens, merges and closes incidents; at most one is open."""

    def __init__(self) -> None:
        self.open: Incident | None = None
        self.count = self.changes = 0
        """Number of all, faults and planned changes, and of the planned changes among them."""
        self.pauses: dict[str, Seconds] = {}
        """Duration of the last planned change, by its kind."""

    def found_intact(self, ranks: set[Rank], generation: Generation, now: Instant) -> list[Record]:
        """End an open incident when `ranks` have committed. Called by a new coordinator that finds an intact world."""
        if self.open is None:
            return []
        self.halted(now)
        self.open.ordered_at = now if self.open.ordered_at is None else self.open.ordered_at
        self.open.resumed_at, self.open.waiting_for, self.open.unexplained = now, ranks, False
        return [] if ranks else self._close(generation, now)

    def explains(self, ranks: list[Rank]) -> bool:
        """True if a fault of these ranks explains a symptom that was counted already, so that nothing is counted."""
        return self.open is not None and self.open.unexplained and bool(ranks)

    def fault(
        self,
        kind: str,
        ranks: list[Rank],
        cause: str,
        *,
        generation: Generation,
        step: StepNo,
        now: Instant,
        fault_at: Instant,
    ) -> list[Record]:
        """Enter one fault, or, without `ranks`, a symptom of one; returns the records to write."""
        incident = self.open
        if incident is None:
            self.count += 1
            fault_at = fault_at if 0 <= now - fault_at < CLOCK_SLACK else now
            self.open = Incident(
                self.count, step, kind, cause, now, fault_at, list(ranks), unexplained=not ranks and kind != CORRUPTION
            )
            return [_opened(self.open, generation, now)]
        if incident.planned:
            incident.planned, incident.faults, incident.rung = False, 0, "retry"
            self.changes -= 1
            incident.kind, incident.cause = kind, cause
        if self.explains(ranks):
            if not incident.ranks:
                incident.kind, incident.cause = kind, cause
            incident.unexplained = False
        else:
            incident.faults += 1
            incident.unexplained = not ranks and kind != CORRUPTION
        incident.ranks.extend(rank for rank in ranks if rank not in incident.ranks)
        return []

    def cause_elsewhere(self) -> str:
        """Cause of the open incident, unless it was an error in a body; empty also if no incident is open."""
        return self.open.cause if self.open is not None and self.open.kind not in _OF_BODIES else ""

    def also(self, ranks: list[Rank]) -> None:
        """Add ranks that the newest fault has struck too."""
        if self.open is not None:
            self.open.ranks.extend(rank for rank in ranks if rank not in self.open.ranks)

    def change(
        self, kind: str, rung: str, cause: str, *, generation: Generation, step: StepNo, now: Instant
    ) -> list[Record]:
        """Open an incident for a planned change of the world, once the first worker has stopped for it."""
        if self.open is not None:
            return []
        self.count, self.changes = self.count + 1, self.changes + 1
        self.open = Incident(
            self.count, step, kind, cause, now, now, [], unexplained=False, faults=0, rung=rung, planned=True
        )
        return [_opened(self.open, generation, now)]

    def resized(self, before: int, after: int) -> None:
        """Note the world's size before and after the change."""
        if self.open is not None:
            self.open.before = self.open.before or before
            self.open.after = after

    def climb(self, rung: str) -> None:
        """Note that this rung of the ladder was needed."""
        if self.open is not None:
            self.open.climb(rung)

    def halted(self, now: Instant) -> None:
        """Note the time at which every survivor had left its groups."""
        if self.open is not None and self.open.halted_at is None:
            self.open.halted_at = now

    def ordered(self, ranks: set[Rank], step: StepNo, steps_lost: int, now: Instant) -> None:
        """Note that a membership of `ranks` was ordered, at a step `steps_lost` before the newest committed one."""
        if self.open is not None:
            self.halted(now)
            # Until now this was the newest reported step; workers with fast steps were ahead of it.
            self.open.step = step
            self.open.ordered_at, self.open.resumed_at = now, None
            self.open.steps_lost += steps_lost
            self.open.form_s = 0.0
            self.open.waiting_for = ranks
            self.open.unexplained = False

    def built(self, fact: facts.WorkerReady) -> None:
        """Note the stages of a worker with a rank that is ready for its first step."""
        if self.open is not None:
            self.open.replacements[fact.worker] = dict(fact.stages)

    def resumed(self, fact: facts.WorkerResumed, *, fresh: bool) -> None:
        """Note how a worker joined the new membership; `fresh`: it was in none before."""
        if self.open is not None:
            self.open.form_s = max(self.open.form_s, fact.form_s)
            self.open.hydrated_bytes += fact.hydrated_bytes
            self.open.ways = merged([*self.open.ways, *fact.ways])
            if fresh or fact.worker in self.open.replacements:
                took = {CONNECT: fact.form_s, HYDRATE: fact.hydrate_s}
                stages = self.open.replacements.setdefault(fact.worker, {})
                stages.update({stage: seconds for stage, seconds in took.items() if seconds})
                self.open.stood[fact.worker] = fact.at

    def not_kept(self, rank: Rank, names: Iterable[str]) -> None:
        """Note variables in which a rank now has another rank's values, or those from the start of its script."""
        if self.open is not None and self.open.kind != "grow":  # Ranks added by "grow" had no values before.
            for name in names:
                self.open.not_kept[name] = sorted({*self.open.not_kept.get(name, ()), rank})

    def committed(self, fact: facts.WorkerCommitted) -> None:
        """Note how long a newcomer needed for the first step that it committed."""
        if self.open is not None and (since := self.open.stood.pop(fact.worker, 0.0)):
            self.open.replacements[fact.worker][FIRST_STEP] = max(0.0, fact.at - since)

    def formed(self, generation: Generation, now: Instant) -> list[Record]:
        """Note that every worker has joined the new membership; closes the incident if no commit is awaited."""
        if self.open is None:
            return []
        self.open.resumed_at = now
        return self._close(generation, now) if not self.open.waiting_for else []

    def served(self, rank: Rank, generation: Generation, now: Instant) -> list[Record]:
        """Note that a rank has committed after the incident; the last one closes it, once every worker has joined."""
        if self.open is None:
            return []
        self.open.waiting_for.discard(rank)
        resumed = self.open.resumed_at is not None
        return self._close(generation, now) if resumed and not self.open.waiting_for else []

    def _close(self, generation: Generation, now: Instant) -> list[Record]:
        incident, self.open = self.open, None
        if incident is None:
            return []
        closed = incident.closed(generation, now)
        if incident.planned:
            self.pauses[incident.kind] = closed.total
        return [closed]


def _opened(incident: Incident, generation: Generation, now: Instant) -> IncidentOpened:
    return IncidentOpened(
        at=now,
        incident=incident.number,
        generation=generation,
        step=incident.step,
        kind=incident.kind,
        ranks=list(incident.ranks),
        cause=incident.cause,
    )
