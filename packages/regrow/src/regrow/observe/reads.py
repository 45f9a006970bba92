"""The reads of each step by each rank, from the records of one job or of several consecutive ones. Pure.

A step may be committed more than once: lost state is rolled back, and a resumed job starts from a checkpoint. The last
commit counts. Each generation starts with the state before some step, so it determines that step and all later ones, up
to the start of a later generation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from regrow.core.ids import Generation, Instant, NodeId, Rank, Seconds, StepNo, WorkerId
from regrow.core.messages.data import OrderSpec
from regrow.core.records import (
    NODE_LOST,
    GenerationFormed,
    JobEnded,
    OrderStated,
    Record,
    StepCommitted,
    WorkerGone,
    WorkerSpawned,
)

_FIRST = StepNo(0)
_UNWRITTEN_S: Seconds = 5.0
"""Time by which a worker must have ended before its agent was lost, so that the agent has written all its lines."""


@dataclass(frozen=True)
class RunRecords:
    """The records of one job.

    `torn`: nodes whose file ends in the middle of a line. `live`: the job may still write. `since`: the first step that
    all files still contain; older lines were dropped.
    """

    name: str
    records: Sequence[Record]
    torn: frozenset[NodeId] = frozenset()
    live: bool = False
    since: StepNo = _FIRST


class RunGeneration(NamedTuple):
    """A generation of one of the runs. Later generations compare greater."""

    run: int
    generation: Generation


class Pass(NamedTuple):
    """The steps that one generation determines: from `first` up to, but not including, `end` (None: no end)."""

    place: RunGeneration
    first: StepNo
    end: StepNo | None
    workers: Mapping[Rank, WorkerId]
    """Workers by rank; empty if no record names them."""


class Missing(NamedTuple):
    """A rank without a line for a step. `excuse`: a reason other than a missed read; empty if there is none."""

    rank: Rank
    worker: WorkerId
    excuse: str


@dataclass
class StepReads:
    """All lines about one step.

    `counted`: by rank, the line that counts. `earlier`: all other lines, oldest first, each with its generation.
    """

    step: StepNo
    place: RunGeneration
    counted: dict[Rank, StepCommitted] = field(default_factory=dict)
    earlier: list[tuple[RunGeneration, StepCommitted]] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)


class History:
    """The steps of a chain of runs.

    Attributes:
        steps: from the first recorded step to the last one that counts, without gaps.
        first: the step at which the first run started.
        unfinished: number of later steps that lack a line of some rank, because the last run was ended or still runs.
    """

    def __init__(self, runs: Sequence[RunRecords]) -> None:
        self._runs = runs
        self._accounts = [_Account(run) for run in runs]
        self._passes = self._decide()
        self.first = min((each.first for each in self._passes), default=StepNo(0))
        self.unfinished = 0
        self.steps = self._collect()
        self._trim()

    def name(self, place: RunGeneration) -> str:
        """Name of the run of a generation."""
        return self._runs[place.run].name

    def order_of(self, place: RunGeneration, commit: StepCommitted) -> OrderSpec | None:
        """The order of the worker that wrote the line `commit`; None if no record states it."""
        return self._accounts[place.run].order_of(commit.worker)

    @property
    def reported(self) -> bool:
        """True if the records of every run name its generations."""
        return all(account.formed for account in self._accounts)

    def _decide(self) -> list[Pass]:
        """The generations that determine steps, oldest first."""
        found: list[Pass] = []
        end: StepNo | None = None
        for run in reversed(range(len(self._accounts))):
            account = self._accounts[run]
            for generation, start in sorted(account.starts().items(), reverse=True):
                if end is None or start < end:
                    found.append(Pass(RunGeneration(run, generation), start, end, account.members(generation)))
                    end = start
        return found[::-1]

    def _collect(self) -> list[StepReads]:
        lines: dict[StepNo, list[tuple[RunGeneration, StepCommitted]]] = {}
        for run, account in enumerate(self._accounts):
            for commit in account.commits:
                lines.setdefault(commit.step, []).append((RunGeneration(run, commit.generation), commit))
        steps: list[StepReads] = []
        for each in self._passes:
            last = max((step for step, found in lines.items() if any(at >= each.place for at, _ in found)), default=-1)
            end = last + 1 if each.end is None else each.end
            steps.extend(self._step(StepNo(step), each, lines.get(StepNo(step), [])) for step in range(each.first, end))
        return steps

    def _step(self, step: StepNo, decided: Pass, lines: list[tuple[RunGeneration, StepCommitted]]) -> StepReads:
        reads = StepReads(step, decided.place)
        # The newest line of a rank counts; within a generation, one that it computed itself comes before adopted ones.
        for place, commit in sorted(lines, key=lambda line: (line[0], not line[1].adopted, line[1].at)):
            if place < decided.place:
                reads.earlier.append((place, commit))
                continue
            former = reads.counted.get(commit.rank)
            if former is not None:
                reads.earlier.append((RunGeneration(place.run, former.generation), former))
            reads.counted[commit.rank] = commit
        account = self._accounts[decided.place.run]
        for rank in sorted(decided.workers.keys() - reads.counted.keys()):
            worker = decided.workers[rank]
            reads.missing.append(Missing(rank, worker, account.excuse(worker, step, decided.place.generation)))
        return reads

    def _trim(self) -> None:
        """Remove the last steps if not all ranks had done them, and excuse such steps of earlier runs."""
        latest = len(self._runs) - 1
        for run, account in enumerate(self._accounts):
            own = [reads for reads in self.steps if reads.place.run == run]
            whole = max((at for at, reads in enumerate(own) if reads.counted and not reads.missing), default=-1)
            for reads in own[whole + 1 :]:
                if account.code != 0 or (not reads.counted and run < latest):
                    reads.missing = [each._replace(excuse=each.excuse or account.end) for each in reads.missing]
        if self._accounts and self._accounts[-1].code != 0:
            while self.steps and self.steps[-1].missing and self.steps[-1].place.run == latest:
                self.steps.pop()
                self.unfinished += 1


class _Account:
    """The records of one run, by subject."""

    def __init__(self, run: RunRecords) -> None:
        self._name, self._live = run.name, run.live
        self.commits: list[StepCommitted] = []
        self.formed: dict[Generation, GenerationFormed] = {}
        self.code: int | None = None
        self._orders: dict[WorkerId, OrderSpec] = {}
        self._torn = run.torn
        self._since = run.since
        self._homes: dict[WorkerId, tuple[NodeId, Instant]] = {}
        self._gone: dict[WorkerId, Instant] = {}
        self._losses: dict[NodeId, list[Instant]] = {}
        self._newest: dict[WorkerId, tuple[Generation, StepNo]] = {}
        for record in run.records:
            self._take(record)

    def _take(self, record: Record) -> None:
        match record:
            case StepCommitted():
                self.commits.append(record)
                place = (record.generation, record.step)
                self._newest[record.worker] = max(place, self._newest.get(record.worker, place))
            case GenerationFormed():
                self.formed[record.generation] = record
            case OrderStated():
                self._orders[record.worker] = record.order
            case WorkerSpawned():
                self._homes[record.worker] = (record.node, record.at)
            case WorkerGone():
                self._gone[record.worker] = record.at
                if record.reason == NODE_LOST and record.worker in self._homes:
                    self._losses.setdefault(self._homes[record.worker][0], []).append(record.at)
            case JobEnded():
                self.code = record.code
            case _:
                pass

    @property
    def end(self) -> str:
        """Reason why the last steps may be missing, for people."""
        how = "goes on" if self._live else "had ended before" if self.code == 0 else "ended in it or before"
        return f"job {self._name} {how}"

    def starts(self) -> dict[Generation, StepNo]:
        """Step at which each generation started; that of its first commit if the generation's own record is missing."""
        found = {generation: formed.step for generation, formed in self.formed.items()}
        for commit in self.commits:
            if not commit.adopted and commit.generation not in self.formed:
                found[commit.generation] = min(commit.step, found.get(commit.generation, commit.step))
        return found

    def members(self, generation: Generation) -> dict[Rank, WorkerId]:
        formed = self.formed.get(generation)
        return {} if formed is None else {Rank(int(rank)): worker for rank, worker in formed.workers.items()}

    def order_of(self, worker: WorkerId) -> OrderSpec | None:
        """A worker's order; if its own line was lost, the order of the others if they all have the same."""
        if worker in self._orders:
            return self._orders[worker]
        others = list(self._orders.values())
        return others[0] if others and all(order == others[0] for order in others) else None

    def excuse(self, worker: WorkerId, step: StepNo, generation: Generation) -> str:
        """Reason why the line of a worker that took part in this step may be missing; empty: there is no reason."""
        if step < self._since:
            return f"lines older than step {self._since} were dropped, as more of them are not kept"
        if self._newest.get(worker, (generation, StepNo(-1))) > (generation, step):
            return ""  # an agent writes lines in order, and a later line exists
        home = self._homes.get(worker)
        if home is None:
            return ""
        node, born = home
        if node in self._torn:
            return f"the file of {node} ends in the middle of a line, or has zeros in the place of some"
        ended = self._gone.get(worker)
        for lost in self._losses.get(node, []):
            if born < lost and (ended is None or lost - ended < _UNWRITTEN_S):
                return f"{node} was lost, and with it the newest lines of its agent"
        return ""
