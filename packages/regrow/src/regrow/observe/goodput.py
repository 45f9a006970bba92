"""Accounting of a job's time: every rank-second has one of eleven uses, which add up to the total. Pure.

A rank-second is one second of one rank, whether or not a worker has that rank. Ranks that a fault has removed from the
world count until they are filled again: they wait for capacity.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import NamedTuple

from regrow.core.ids import Instant, NodeId, Rank, Seconds, StepNo, WorkerId
from regrow.core.messages.vocabulary import Role
from regrow.core.records import (
    GenerationFormed,
    IncidentClosed,
    IncidentOpened,
    Record,
    StepCommitted,
    WorkerSpawned,
    WorldChanged,
)
from regrow.observe.ledger import Ledger

_WANTED = ("shrink", "preempt", "start")
"""Kinds of changes after which the smaller world is the requested one."""


class Spent(StrEnum):
    """Use of rank-seconds."""

    PRODUCTIVE = "productive"
    """Computing a step that was committed and not rolled back later."""
    DATA_WAIT = "data wait"
    """Waiting for the batch of a step."""
    CHECKPOINT = "checkpoint stall"
    """Copying the state between two steps."""
    FIRST_STEP = "first step"
    """To the rank's first step: from the job's start, or with several nodes from the first order to start a worker."""
    DETECT = "detect"
    """From a fault until the coordinator detects it. This and the next four are the stages of `IncidentClosed`."""
    ABORT = "abort"
    REGROUP = "regroup"
    HYDRATE = "hydrate"
    REDO = "redo"
    """Lost work: a step that a fault interrupted or that was rolled back, and waiting while it runs again."""
    CAPACITY = "waiting for capacity"
    """The rank has no worker: nodes have not joined yet, or a fault has made the world smaller."""
    IDLE = "idle"
    """Any other time: between two steps, after the last step."""


STAGES = (Spent.DETECT, Spent.ABORT, Spent.REGROUP, Spent.HYDRATE, Spent.REDO)


@dataclass
class IncidentCost:
    """Cost of one incident to all ranks.

    Attributes:
        number: number of the incident.
        step: step in which it happened.
        kind: for example `exit`; costs are grouped by it.
        cause: the cause in words.
        nodes: nodes of the affected ranks; empty if unknown.
        planned: True for a change of the world, False for a fault.
        rung: the recovery method; empty: not recovered yet.
        steps_lost: committed steps that were rolled back.
        spent: rank-seconds by their use.
    """

    number: int
    step: StepNo
    kind: str
    cause: str
    nodes: list[NodeId]
    planned: bool = False
    rung: str = ""
    steps_lost: int = 0
    spent: dict[Spent, Seconds] = field(default_factory=lambda: defaultdict(float))

    @property
    def rank_seconds(self) -> Seconds:
        """Rank-seconds that the incident cost."""
        return sum(self.spent.values())


@dataclass(frozen=True)
class Account:
    """All rank-seconds of a job.

    Attributes:
        wall: time from the start of the job to its end, or to its newest record.
        total: rank-seconds of the world in its wanted size.
        spent: rank-seconds by their use; they add up to `total`.
        incidents: cost of each incident, in order of time.
    """

    wall: Seconds
    total: Seconds
    spent: Mapping[Spent, Seconds]
    incidents: Sequence[IncidentCost]

    @property
    def goodput(self) -> float:
        """The productive share of the total, from 0 to 1; 1 if no time has passed yet."""
        return self.spent[Spent.PRODUCTIVE] / self.total if self.total else 1.0

    @property
    def steps_lost(self) -> int:
        """Committed steps that were rolled back."""
        return sum(incident.steps_lost for incident in self.incidents)


class _Piece(NamedTuple):
    start: Instant
    end: Instant
    spent: Spent
    incident: int = 0
    """Number of the incident to which the time belongs; 0: none."""


class _Window(NamedTuple):
    """An incident with its stages and the time of its fault."""

    number: int
    planned: bool
    fault_at: Instant
    end: Instant
    stages: list[_Piece]


def account(records: Sequence[Record]) -> Account:
    """Account for all rank-seconds of a run.

    Args:
        records: all records of the coordinator and the agents, on one clock.
    """
    ledger = Ledger(records)
    if not records:
        return Account(0.0, 0.0, dict.fromkeys(Spent, 0.0), [])
    start = ledger.started.at if ledger.started is not None else min(record.at for record in records)
    end = ledger.ended.at if ledger.ended is not None else max(record.at for record in records)
    costs = _costs(records, ledger)
    sums = _Sums({cost.number: cost for cost in costs})
    times = _RankTimes(records, ledger, start, max(start, end))
    for rank, present in _presence(ledger, start, max(start, end)).items():
        sums.add(times.pieces(rank), present)
    sums.missing(_missing(records, ledger, start, max(start, end)))
    return Account(max(0.0, end - start), sum(sums.spent.values()), sums.spent, costs)


class _Sums:
    def __init__(self, costs: Mapping[int, IncidentCost]) -> None:
        self.spent = dict.fromkeys(Spent, 0.0)
        self._costs = costs

    def add(self, pieces: Iterable[_Piece], present: Sequence[tuple[Instant, Instant]]) -> None:
        """Add the pieces of one rank, within the times at which it was in the world."""
        for piece in pieces:
            for start, end in present:
                self._count(piece, min(piece.end, end) - max(piece.start, start))

    def _count(self, piece: _Piece, seconds: Seconds) -> None:
        if seconds <= 0:
            return
        self.spent[piece.spent] += seconds
        if piece.incident in self._costs:
            self._costs[piece.incident].spent[piece.spent] += seconds

    def missing(self, gaps: Iterable[tuple[Seconds, int]]) -> None:
        """Add unfilled ranks: pairs of rank-seconds and the incident that removed the ranks."""
        for seconds, incident in gaps:
            self._count(_Piece(0.0, seconds, Spent.CAPACITY, incident), seconds)


class _RankTimes:
    """Divides the time of each rank into pieces without gaps or overlaps."""

    def __init__(self, records: Sequence[Record], ledger: Ledger, start: Instant, end: Instant) -> None:
        self._start, self._end = start, end
        self._formed = {each.generation: each.at for each in ledger.generations}
        self._windows = _windows(ledger, end)
        self._ends = [window.end for window in self._windows]
        self._steps: dict[Rank, list[StepCommitted]] = {}
        self._given_up: dict[Rank, list[_Piece]] = {}
        self._adopted: set[tuple[StepNo, Rank]] = set()
        for (step, rank), history in ledger.history.items():
            computed = [commit for commit in history if not commit.adopted]
            for each in computed[:-1]:
                piece = _Piece(each.at - each.seconds, each.at, Spent.REDO, self._fault_after(each.at))
                self._given_up.setdefault(rank, []).append(piece)
            self._steps.setdefault(rank, []).extend(computed[-1:])
            if not computed:
                self._adopted.add((step, rank))
        orders = [each.at for each in records if isinstance(each, WorkerSpawned) and each.role == Role.RANK]
        waits = ledger.started is None or (ledger.started.nodes > 1 and not ledger.started.local)
        self._ordered = min(orders, default=start) if waits else start

    def pieces(self, rank: Rank) -> Iterator[_Piece]:
        """All pieces of a rank's time, in order."""
        commits = sorted(self._steps.get(rank, []), key=lambda commit: commit.at)
        given_up = sorted(self._given_up.get(rank, []), key=lambda piece: piece.end)
        usual = median(commit.seconds for commit in commits) if commits else 0.0
        at, last = self._start, StepNo(-1)
        for commit in commits:
            cut = max(usual, commit.seconds), self._cut_off((StepNo(commit.step - 1), rank))
            for piece in self._attempt(commit, at):
                yield from self._gap(at, piece.start, first=last < 0, given_up=given_up, cut=cut)
                yield piece
                at = piece.end
            last = commit.step
        cut = usual, self._cut_off((StepNo(last + 1), rank))
        yield from self._gap(at, self._end, first=last < 0, given_up=given_up, cut=cut)

    def _cut_off(self, run: tuple[StepNo, Rank]) -> Spent:
        """Use of an attempt that a fault interrupted: productive if the others did the step with its gradients."""
        return Spent.PRODUCTIVE if run in self._adopted else Spent.REDO

    def _attempt(self, commit: StepCommitted, after: Instant) -> Iterator[_Piece]:
        """The attempt of a step that counts, and this rank's waits before it."""
        end = min(commit.at, self._end)
        begun = max(commit.at - commit.seconds, self._formed.get(commit.generation, self._start))
        marks = (begun - commit.data_wait - commit.stall, begun - commit.data_wait, begun, end)
        start, *ends = [max(after, min(mark, end)) for mark in marks]
        for until, name in zip(ends, (Spent.CHECKPOINT, Spent.DATA_WAIT, Spent.PRODUCTIVE), strict=True):
            if until > start:
                yield _Piece(start, until, name)
            start = max(start, until)

    def _gap(
        self, start: Instant, end: Instant, *, first: bool, given_up: Sequence[_Piece], cut: tuple[Seconds, Spent]
    ) -> Iterator[_Piece]:
        """Pieces between two attempts that count: incidents, rolled-back attempts, and idle time.

        Args:
            start, end: bounds of the time between the attempts.
            first: True if the rank has committed nothing before it.
            given_up: the rolled-back attempts of this rank, in order.
            cut: the longest duration of an attempt that a fault may have interrupted here, and its use.
        """
        if end <= start:
            return
        found: list[_Piece] = []
        for window in self._windows[bisect_right(self._ends, start) :]:
            if window.fault_at > end:
                break
            found += window.stages
            if start < window.fault_at and not window.planned and not first:
                found.append(_Piece(max(start, window.fault_at - cut[0]), window.fault_at, cut[1], window.number))
        for piece in given_up[bisect_right(given_up, start, key=lambda piece: piece.end) :]:
            if piece.start >= end:
                break
            found.append(piece)
        at = start
        for piece in sorted(piece for piece in found if piece.end > piece.start and piece.start < end):
            if piece.start > at:
                yield from self._nothing(at, piece.start, first=first)
                at = piece.start
            until = min(piece.end, end)
            if until > at:
                yield _Piece(at, until, piece.spent, piece.incident)
                at = until
        yield from self._nothing(at, end, first=first)

    def _nothing(self, start: Instant, end: Instant, *, first: bool) -> Iterator[_Piece]:
        if not first:
            yield _Piece(start, end, Spent.IDLE)
            return
        ordered = min(max(self._ordered, start), end)
        yield _Piece(start, ordered, Spent.CAPACITY)
        yield _Piece(ordered, end, Spent.FIRST_STEP)

    def _fault_after(self, at: Instant) -> int:
        """Number of the incident for which a step committed at this time was rolled back."""
        faults = [window for window in self._windows if not window.planned]
        after = [window.number for window in faults if window.end > at]
        return after[0] if after else 0


def _windows(ledger: Ledger, end: Instant) -> list[_Window]:
    """All incidents in order of time; the stages of each have no gaps."""
    found = []
    for each in ledger.incidents:
        at = min(each.fault_at, each.opened_at)
        stages = []
        for name in STAGES:
            until = each.at if name is Spent.REDO else min(each.at, at + getattr(each, name.value))
            stages.append(_Piece(at, max(at, until), name, each.incident))
            at = max(at, until)
        found.append(_Window(each.incident, not each.faults, stages[0].start, each.at, stages))
    for opened in ledger.open_incidents.values():
        stages = [_Piece(opened.at, end, Spent.REGROUP, opened.incident)]
        found.append(_Window(opened.incident, False, opened.at, end, stages))
    return sorted(found, key=lambda window: window.fault_at)


def _presence(ledger: Ledger, start: Instant, end: Instant) -> dict[Rank, list[tuple[Instant, Instant]]]:
    """Times at which each rank was in the world. Before the first generation, all ranks of the job's start were."""
    present: dict[Rank, list[tuple[Instant, Instant]]] = defaultdict(list)
    for at, until, members in _worlds(ledger, start, end):
        for rank in members:
            spans = present[rank]
            if spans and spans[-1][1] == at:
                spans[-1] = (spans[-1][0], until)
            else:
                spans.append((at, until))
    return present


def _worlds(ledger: Ledger, start: Instant, end: Instant) -> Iterator[tuple[Instant, Instant, list[Rank]]]:
    formed = sorted(ledger.generations, key=lambda each: each.at)
    at, members = start, [Rank(rank) for rank in range(ledger.world)]
    for each in formed:
        if (until := min(max(each.at, at), end)) > at:
            yield at, until, members
        at, members = until, [Rank(int(rank)) for rank in each.workers] or members
    if end > at:
        yield at, end, members


def _missing(records: Sequence[Record], ledger: Ledger, start: Instant, end: Instant) -> Iterator[tuple[Seconds, int]]:
    """Pairs of rank-seconds of ranks that a fault removed from the world, and the incident."""
    changes = {each.generation: each.kind for each in records if isinstance(each, WorldChanged)}
    formed = sorted(ledger.generations, key=lambda each: each.at)
    wanted, culprit = ledger.world, 0
    for number, each in enumerate(formed):
        size, kind = len(each.workers) or wanted, changes.get(each.generation, "")
        if kind in _WANTED or size > wanted:
            wanted = size
        if size < wanted and kind:
            culprit = next((i.incident for i in ledger.incidents if i.generation == each.generation), culprit)
        at = min(max(each.at, start), end)
        until = min(max(formed[number + 1].at, at), end) if number + 1 < len(formed) else end
        if wanted > size and until > at:
            yield (wanted - size) * (until - at), culprit


def _costs(records: Sequence[Record], ledger: Ledger) -> list[IncidentCost]:
    homes: dict[WorkerId, NodeId] = {each.worker: each.node for each in records if isinstance(each, WorkerSpawned)}
    formed = sorted(ledger.generations, key=lambda each: each.at)
    costs = []
    everything: list[IncidentClosed | IncidentOpened] = [*ledger.incidents, *ledger.open_incidents.values()]
    for each in sorted(everything, key=_opened_at):
        nodes = _nodes_of(each.ranks, _opened_at(each), formed, homes)
        cost = IncidentCost(each.incident, each.step, each.kind, each.cause.partition("\n")[0], nodes)
        if isinstance(each, IncidentClosed):
            cost.planned, cost.rung, cost.steps_lost = not each.faults, each.rung, each.steps_lost
        costs.append(cost)
    return costs


def _opened_at(incident: IncidentClosed | IncidentOpened) -> Instant:
    return incident.opened_at if isinstance(incident, IncidentClosed) else incident.at


def _nodes_of(
    ranks: Iterable[Rank], at: Instant, formed: Sequence[GenerationFormed], homes: Mapping[WorkerId, NodeId]
) -> list[NodeId]:
    """Nodes on which the ranks were when an incident opened, each once."""
    before = [each.workers for each in formed if each.at <= at]
    members = before[-1] if before else {}
    found = [homes[members[str(rank)]] for rank in ranks if members.get(str(rank)) in homes]
    return sorted(set(found))
