"""The present state of a running job, from the coordinator's facts. Pure; its size does not grow with the job's length.

`feed` is cheap for any world size: it only keeps the newest commits, which `fold` adds up.
"""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from regrow.core import records
from regrow.core.ids import Generation, Instant, JobId, NodeId, Rank, Seconds, StepNo, WorkerId
from regrow.core.messages import facts
from regrow.core.messages.vocabulary import Role
from regrow.core.records import (
    CheckpointSaved,
    GenerationFormed,
    IncidentClosed,
    IncidentOpened,
    JobEnded,
    JobStarted,
    NodeJudged,
    Record,
    WorkerBuilt,
    WorkerGone,
    WorkerSpawned,
    WorldChanged,
)
from regrow.core.verdicts import Severity

MOST_METRICS = 20
"""Most names of logged numbers that are kept; further ones are left out."""
MOST_INCIDENTS = 200
MOST_POINTS = 600
MOST_SUSPECTS = 1024
STAGES = ("detect", "abort", "regroup", "hydrate", "redo")
STATES = ("starting", "training", "mending", "lost", "done")
"""The states that a rank may have."""
TIMED = ("productive", "data_wait", "checkpoint")
_PENDING: Seconds = 60.0
"""Most time of one rank that is carried from one `fold` to the next."""
_ON_PURPOSE = ("shrink", "preempt", "start")


class SuspectNode(msgspec.Struct, frozen=True):
    """A node with a problem that the job has found. `quarantined`: it gets no new workers, as it has failed twice."""

    node: NodeId
    reason: str
    quarantined: bool = False


class JobFigures(msgspec.Struct, frozen=True):
    """Progress of a job since its coordinator started. `goodput`: an estimate from 0 to 1; None: too early to say."""

    step: int
    incidents: int
    goodput: float | None = None
    nodes: list[SuspectNode] = []
    """Nodes that failed an examination."""


@dataclass(slots=True)
class RankSeen:
    """A rank of the world. `state`: one of `STATES`."""

    worker: WorkerId
    node: NodeId
    state: str = "starting"
    step: StepNo | None = None
    seconds: Seconds | None = None
    folded: facts.WorkerCommitted | None = None


@dataclass(slots=True, frozen=True)
class Point:
    """The world at one moment."""

    at: Instant
    step: int
    world: int
    speed: float | None
    """Steps per second."""
    loss: float | None


@dataclass
class Present:
    """The present state. Update it with `feed`, and call `fold` before reading it."""

    job: JobId | None = None
    started: Instant | None = None
    ended: JobEnded | None = None
    generation: Generation | None = None
    wanted: int = 0
    ranks: dict[Rank, RankSeen] = field(default_factory=dict)
    opened: IncidentOpened | None = None
    incidents: deque[IncidentClosed] = field(default_factory=lambda: deque(maxlen=MOST_INCIDENTS))
    """The newest closed incidents."""
    kinds: Counter[str] = field(default_factory=Counter)
    """Number of opened incidents of each kind."""
    faults: int = 0
    """Incidents without planned changes, but with those that a fault struck."""
    stage_seconds: dict[str, Seconds] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    suspects: dict[tuple[str, NodeId, str], Instant] = field(default_factory=dict)
    """Times of verdicts on devices from the training itself, by source, node and device."""
    steps_lost: int = 0
    checkpoint_at: Instant | None = None
    spent: dict[str, Seconds] = field(default_factory=lambda: dict.fromkeys((*TIMED, "other"), 0.0))
    """Rank-seconds, estimated from the newest commits; they add up to the world's size over time."""
    points: deque[Point] = field(default_factory=lambda: deque(maxlen=MOST_POINTS))
    last_commit: Instant | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """Means over the ranks of the numbers that they logged for their newest steps."""
    summed: dict[str, float] = field(default_factory=dict)
    """The means in `metrics` times the world size, for example tokens or samples per step."""

    def __post_init__(self) -> None:
        """Initialize the private state."""
        self._homes: dict[WorkerId, NodeId] = {}
        self._warm: set[WorkerId] = set()
        self._spares: set[WorkerId] = set()
        self._newest: dict[WorkerId, facts.WorkerCommitted] = {}
        self._changes: dict[Generation, str] = {}
        self._folded_at: Instant | None = None
        self._before_steps: Seconds | None = None
        """Rank-seconds before the first step; None: no step has been committed yet."""
        self._pending = dict.fromkeys(TIMED, 0.0)
        self._every: Seconds = 1.0

    # --- input ---------------------------------------------------------------------------------------------------

    def feed(self, item: Record | facts.NodeProgress) -> None:
        """Add a fact or record of the coordinator."""
        match item:
            case facts.NodeProgress():
                self._newest.update((each.worker, each) for each in item.commits)
            case WorkerSpawned():
                self._spawned(item)
            case WorkerBuilt():
                self._warm.add(item.worker)
            case WorkerGone():
                self._gone(item)
            case GenerationFormed():
                self._formed(item)
            case IncidentOpened():
                self._opened(item)
            case IncidentClosed():
                self._closed(item)
            case WorldChanged():
                self._changes = {item.generation: item.kind}
            case NodeJudged(occasion=records.IN_TRAINING):
                self._judged(item)
            case CheckpointSaved():
                self.checkpoint_at = item.at
            case JobStarted():
                self.job, self.started, self.wanted, self._folded_at = item.job, item.at, item.world, item.at
            case JobEnded():
                self._ended(item)
            case _:
                pass

    def _spawned(self, record: WorkerSpawned) -> None:
        self._homes[record.worker] = record.node
        if record.role == Role.RANK:
            self.ranks[record.rank] = RankSeen(record.worker, record.node)
        elif record.role != Role.PROVER:
            self._spares.add(record.worker)

    def _gone(self, record: WorkerGone) -> None:
        for known in (self._warm, self._spares):
            known.discard(record.worker)
        if not any(seen.worker == record.worker for seen in self.ranks.values()):
            self._homes.pop(record.worker, None)
            self._newest.pop(record.worker, None)

    def _formed(self, record: GenerationFormed) -> None:
        self.fold(record.at)
        self.generation = record.generation
        members = {Rank(int(rank)): worker for rank, worker in record.workers.items()}
        before = {seen.worker: seen for seen in self.ranks.values()}
        self.ranks = {}
        for rank, worker in members.items():
            seen = before.pop(worker, None) or RankSeen(worker, self._homes.get(worker, NodeId("")))
            seen.state = "training"
            self.ranks[rank] = seen
        living = set(members.values()) | self._spares
        self._spares -= set(members.values())
        self._homes = {worker: node for worker, node in self._homes.items() if worker in living}
        self._newest = {worker: commit for worker, commit in self._newest.items() if worker in living}
        if self._changes.pop(record.generation, "") in _ON_PURPOSE or len(members) > self.wanted:
            self.wanted = len(members)

    def _opened(self, record: IncidentOpened) -> None:
        self.fold(record.at)
        self.opened = record
        self.kinds[record.kind] += 1
        self.faults += record.kind not in records.PLANNED
        for rank, seen in self.ranks.items():
            seen.state = "lost" if rank in record.ranks else "mending"

    def _judged(self, record: NodeJudged) -> None:
        key = (record.source, record.node, record.device)
        if record.severity == Severity.OK:
            self.suspects.pop(key, None)
        elif len(self.suspects) < MOST_SUSPECTS:
            self.suspects[key] = record.at

    def _closed(self, record: IncidentClosed) -> None:
        self.faults += self.opened is not None and self.opened.kind in records.PLANNED and record.faults > 0
        self.opened = None
        self.incidents.append(record)
        self.steps_lost += record.steps_lost
        for stage in STAGES:
            self.stage_seconds[stage] += getattr(record, stage)
        for seen in self.ranks.values():
            seen.state = "training"

    def _ended(self, record: JobEnded) -> None:
        self.fold(record.at)
        self.ended = record
        for seen in self.ranks.values():
            seen.state = "done" if record.code == 0 else "lost"

    # --- adding up -----------------------------------------------------------------------------------------------

    def fold(self, now: Instant) -> None:
        """Add up the data since the last call. Call it at most about once a second."""
        since, self._folded_at = self._folded_at, now
        if since is None or self.ended is not None:
            return
        fresh = [self._fold_rank(seen) for seen in self.ranks.values()]
        logged = [commit for commit in fresh if commit is not None]
        if logged:
            self._take_metrics(logged)
            if self._before_steps is None:
                passed = sum(self.spent.values()) + len(self.ranks) * max(0.0, now - since)
                self._before_steps = max(0.0, passed - sum(self._pending.values()))
            self.last_commit = now  # commits have the times of other machines' clocks
        self._share_out(len(self.ranks) * max(0.0, now - since))

    def _fold_rank(self, seen: RankSeen) -> facts.WorkerCommitted | None:
        """Add a rank's newest commit to the sums; returns it if it is new, else None."""
        commit, before = self._newest.get(seen.worker), seen.folded
        if commit is None or commit is before or commit.adopted:
            return None
        steps, room = 1, _PENDING
        if before is not None:
            steps, room = commit.step - before.step, max(0.0, commit.at - before.at)
        seen.step, seen.seconds, seen.folded = commit.step, commit.seconds, commit
        for name, value in zip(TIMED, (commit.seconds, commit.data_wait, commit.stall), strict=True):
            took = min(room, max(0, steps) * value)
            room -= took
            self._pending[name] += took
        return commit

    def _take_metrics(self, commits: list[facts.WorkerCommitted]) -> None:
        sums: dict[str, float] = {}
        counts: Counter[str] = Counter()
        for commit in commits:
            for name, value in commit.metrics.items():
                if not name.startswith("_") and (name in counts or len(counts) < MOST_METRICS):
                    sums[name] = sums.get(name, 0.0) + value
                    counts[name] += 1
        if counts:
            self.metrics = {name: sums[name] / counts[name] for name in counts}
            self.summed = {name: mean * len(self.ranks) for name, mean in self.metrics.items()}

    def _share_out(self, total: Seconds) -> None:
        """Divide `total` rank-seconds that have passed into the times of commits, as far as they fit, and the rest."""
        left = total
        for name in TIMED:
            took = min(left, self._pending[name])
            self._pending[name] = min(self._pending[name] - took, _PENDING * max(1, len(self.ranks)))
            self.spent[name] += took
            left -= took
        self.spent["other"] += left

    def mark(self, now: Instant) -> None:
        """Add a point to the curves; if there are too many, drop every second one and halve the rate from then on."""
        if self.ended is not None or self.started is None:
            return
        if self.points and now - self.points[-1].at < self._every:
            return
        if len(self.points) == MOST_POINTS:
            self.points = deque(list(self.points)[::2], maxlen=MOST_POINTS)
            self._every *= 2
        self.points.append(Point(now, self.step, len(self.ranks), self.speed(now), self.metrics.get("loss")))

    # --- reading -------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Number of steps that the world has committed: one more than the newest of any rank."""
        return 1 + max((seen.step for seen in self.ranks.values() if seen.step is not None), default=-1)

    @property
    def standbys(self) -> int:
        """Number of warm workers without a rank."""
        return len(self._spares & self._warm)

    @property
    def goodput(self) -> float | None:
        """Estimated productive share of all rank-seconds since the first step; None before its commit."""
        if self._before_steps is None:
            return None
        total = sum(self.spent.values()) - self._before_steps
        return min(1.0, self.spent["productive"] / total) if total > 0 else 1.0

    def step_seconds(self) -> list[Seconds]:
        """Durations of the newest step of each rank, in ascending order."""
        return sorted(seen.seconds for seen in self.ranks.values() if seen.seconds is not None)

    def speed(self, now: Instant, *, over: int = 10) -> float | None:
        """Steps per second over the last `over` points."""
        past = self.points[-min(over, len(self.points))] if self.points else None
        if past is None or now <= past.at:
            return None
        return max(0.0, (self.step - past.step) / (now - past.at))

    def nodes(self) -> Mapping[NodeId, int]:
        """Number of ranks on each node."""
        return Counter(seen.node for seen in self.ranks.values())
