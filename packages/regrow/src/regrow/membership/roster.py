"""The workers of a job as the coordinator knows them, and the ranks that they hold."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from regrow.core.ids import NO_STATE, Generation, Instant, NodeId, Rank, Seconds, StepNo, WorkerId
from regrow.core.messages import facts
from regrow.core.messages.trainings import FinishedTraining
from regrow.core.messages.vocabulary import Member, Role


class Stage(StrEnum):
    """Stage of a worker. Only `MEMBER` and `FINISHED` workers use the groups of a generation."""

    ORDERED = "ordered"
    STARTING = "starting"
    IDLE = "idle"
    READY = "ready"
    JOINING = "joining"
    MEMBER = "member"
    FINISHED = "finished"
    HALTING = "halting"
    HALTED = "halted"
    RELEASED = "released"
    FENCED = "fenced"
    GONE = "gone"


@dataclass(frozen=True)
class RankSlot:
    """Place of a worker: its rank, the node, and the slot on the node."""

    node: NodeId
    rank: Rank
    local_rank: int


BUILDING = (Stage.ORDERED, Stage.STARTING, Stage.IDLE)
IN_GENERATION = (Stage.JOINING, Stage.MEMBER, Stage.FINISHED)
LIVING = frozenset(Stage) - {Stage.FENCED, Stage.GONE}


@dataclass
class WorkerRecord:
    """One worker. `rank` is None for a standby; `state_at` is the step of its protected state.

    Only the roster writes `stage`, `since` and `placed`, because its indexes depend on them.
    """

    worker: WorkerId
    node: NodeId
    role: Role
    rank: Rank | None
    local_rank: int
    stage: Stage = Stage.ORDERED
    since: Instant = 0.0
    """Time at which the worker reached this stage, or got its rank at this stage."""
    placed: bool = False
    """True if the worker holds `rank`; a replaced worker keeps the number for the records."""
    candidate_for: Rank | None = None
    """The rank that the worker will have in a larger world; it builds meanwhile and belongs to no generation."""
    leaver: bool = False
    """True if the worker was released while the job goes on, so that its end is no fault."""
    state_at: StepNo = NO_STATE
    endpoint: str = ""
    layout: str = ""
    holding: str = ""
    """Name of the worker's part of the state; equal on replicas."""
    sharded: bool = False
    """True if the worker's script gives ranks different parts of the state."""
    built_for: Rank | None = None  # the rank for which its script ran; in a sharded world it can take no other
    built_slot: int = 0  # the slot on its node for which its script ran
    built_world: int = 0  # the world in which its script ran
    early: dict[str, str] = field(default_factory=dict)
    """The script's reads of the worker's place before the loop, by `core.early_reads.Place`, with their lines."""
    parts: dict[str, int] = field(default_factory=dict)
    """Digests of the state that the worker built, until all are compared."""
    entered: Generation | None = None  # the first generation in which it had a rank
    ready: bool = False
    """True if the worker is halted with everything that the update of `state_at` needs."""
    restart_index: int = 0
    """Number of the restartable function, after the last step, that the halted worker has not finished; 0: none."""
    whole_body: bool = False
    """True if the bodies of the worker's script cannot be separated from their updates."""
    torn_at: StepNo | None = None  # the step whose update was cut off when it was halted
    verified: StepNo = NO_STATE
    """Step of the copy that the worker had, when it halted, of a state on which all replicas agreed."""
    pid: int = 0
    has_session: bool = False
    script_ordered: bool = False
    """True for an `imports` standby that was ordered to run the script."""
    faulted_in: Generation | None = None
    """Newest generation in which the worker reported an error of its own; it reports at most one in each."""
    microbatches: int = 0
    """Number of micro-batches of a step; 0: the worker's script does not divide steps."""
    fixed: str = ""
    """Reason, from the worker's script, why the world can have no other size; empty: it can."""
    between: bool = False
    """True if the worker's script has restartable functions that may run between its steps."""
    unprovable: str = ""  # reason why its script cannot be compared in a shadow
    committed: StepNo | None = None
    goes_on: bool = False
    """True if the worker has finished its steps and faults in its script's code after them are repaired."""
    training: str = ""  # the name of the training that it is for, where the script has several
    ended: FinishedTraining | None = None  # that training, once it has finished it and another follows
    exit_code: int | None = None

    @property
    def living(self) -> bool:
        """True if the worker's process may still act for the job."""
        return self.stage in LIVING

    @property
    def spare(self) -> bool:
        """True if the worker is a standby: living and without any other role."""
        used = self.placed or self.leaver or self.candidate_for is not None or self.role is Role.PROVER
        return self.living and not used


@dataclass
class NodeRecord:
    """One node and its place in the order of nodes."""

    node: NodeId
    index: int
    host: str
    store: str
    copy_endpoint: str = ""
    domain: str = ""
    slots: int = 1
    """Number of ranks that the node can hold."""
    away_since: Instant | None = None
    """Time at which the node was lost; None: it is connected."""
    leave_by: Instant | None = None
    """Time by which the node is to be given back; None: it stays."""
    leave_reason: str = ""
    table: int = 0
    """Number of the newest table of a formed generation that the node's agent has; 0: it has none."""
    stopped: bool = False
    """True if the agent was ordered to end because it had no workers left, or has ended as announced."""
    unpaid: bool = False
    """True if the node's announced stay is too short to grow onto it; lost ranks may still be filled there."""
    buddy: NodeId | None = None
    """The node that keeps copies of the state of this node's ranks."""
    corruptions: int = 0
    """Number of times that the state of a rank on this node was found to be wrong."""
    quarantined: str = ""
    """Reason why no new worker is placed on the node while others have room; empty: it is not in quarantine."""
    verdicts: list[str] = field(default_factory=list)
    """Findings of the node's last examination, for people."""
    early: bool = False
    """True if the script asks for its place before its loop, so that standbys here wait before the script."""
    failed_standbys: int = 0
    failed_candidates: int = 0
    """Number of candidates in a row that have died on the node before they were built."""
    standbys: dict[WorkerId, WorkerRecord] = field(default_factory=dict)
    """The node's living workers that have no rank and are no candidates."""
    others: dict[WorkerId, WorkerRecord] = field(default_factory=dict)
    """The node's candidates and leavers whose processes may still exist."""
    placed: dict[WorkerId, WorkerRecord] = field(default_factory=dict)
    """The node's workers that hold a rank, including dead ones."""

    @property
    def away(self) -> bool:
        """True if the node was lost and has not come back."""
        return self.away_since is not None

    @property
    def usable(self) -> bool:
        """True if workers may be started on the node."""
        return self.away_since is None and self.leave_by is None

    def free(self) -> list[int]:
        """The node's free slots, the lowest first."""
        if len(self.placed) >= self.slots:
            return []  # A shortcut: if many nodes are lost at once, every other node is asked for each of their ranks.
        taken = {worker.local_rank for index in (self.placed, self.others) for worker in index.values()}
        return [slot for slot in range(self.slots) if slot not in taken]


_Index = OrderedDict[WorkerId, WorkerRecord]


class Roster:
    """Nodes, workers and their ranks; makes no decisions. The cost of a query is proportional to its answer."""

    def __init__(self) -> None:
        self.world = 0
        """Number of ranks of the present world, or of the one that is being built."""
        self.nodes: dict[NodeId, NodeRecord] = {}
        self.workers: dict[WorkerId, WorkerRecord] = {}
        self.places: dict[Rank, WorkerId] = {}
        """The worker that holds each rank, in the order of ranks."""
        self.candidates: dict[Rank, WorkerRecord] = {}
        """The candidates, by the rank that each of them will have."""
        self.sharded = False
        """True if ranks hold different parts of the state."""
        self.grouped = False
        """True if the script made groups of its own, in which ranks may have different parts."""
        self.first_build: Seconds | None = None
        """Time until all first workers were ready for their first step; None: they are not ready yet."""
        self._opened: Instant | None = None
        self.early = ""
        """Reason why standbys of some nodes wait before the script whatever `--warmth` says; empty: none do so."""
        self.imports: list[str] = []
        """The installed modules that the script imports, in order; standbys may import them before the script runs."""
        self.learnt = False
        self.unfit = 0
        self.environment: list[str] = []
        """The environment variables that the script changes."""
        self.short: dict[NodeId, None] = {}
        """Nodes that may have too few standbys. Not a set, because a set's order differs between processes."""
        self.away: set[WorkerId] = set()
        """Halted workers whose state is known but whose scripts have not reached their waiting point yet."""
        self.unproven: dict[WorkerId, Instant] = {}
        """Newcomers that have yet to prove that they are alive, with their deadlines; the oldest first."""
        self._order: list[NodeRecord] = []
        self.named: dict[NodeId, int] = {}
        """Number of worker names used on each node; names are never used again."""
        self._placed: dict[Stage, _Index] = {stage: OrderedDict() for stage in Stage}
        self._others: dict[Stage, _Index] = {stage: OrderedDict() for stage in Stage}

    # --- changes -----------------------------------------------------------------------------------------------

    def add_node(self, joined: facts.NodeJoined) -> NodeRecord:
        """Add a node at the end of the order of nodes."""
        node = NodeRecord(
            joined.node, len(self.nodes), joined.host, joined.store, joined.copy_endpoint, joined.domain, joined.slots
        )
        self.nodes[joined.node] = node
        self._order.append(node)
        self.short[joined.node] = None
        return node

    def add_worker(self, slot: RankSlot, role: Role, now: Instant, *, candidate: bool = False) -> WorkerRecord:
        """Add a worker with an id never used before. A standby or candidate holds no rank yet."""
        self._opened = now if self._opened is None else self._opened
        number = self.named.get(slot.node, 0)
        self.named[slot.node] = number + 1
        worker = WorkerRecord(WorkerId(f"{slot.node}.w{number}"), slot.node, role, None, slot.local_rank, since=now)
        worker.built_for, worker.built_slot = slot.rank, slot.local_rank
        self.workers[worker.worker] = worker
        self._enter(worker)
        if candidate:
            self.nominate(worker, slot.rank, slot.local_rank)
        elif role.placed:
            self.place(worker, slot.rank, slot.local_rank, now)
        return worker

    def built(self, now: Instant) -> None:
        """Note the time of the first build. Called when all workers are ready for a step."""
        if self.first_build is None and self._opened is not None:
            self.first_build = now - self._opened

    def adopt(self, worker: WorkerRecord) -> None:
        """Add a worker, living or dead, that a former coordinator started."""
        self.workers[worker.worker] = worker
        self._enter(worker)

    def move(self, worker: WorkerRecord, stage: Stage, now: Instant) -> None:
        """Move a worker to another stage."""
        self._leave(worker)
        self.away.discard(worker.worker)
        self.unproven.pop(worker.worker, None)
        worker.stage, worker.since = stage, now
        self._enter(worker)

    def place(self, worker: WorkerRecord, rank: Rank, local_rank: int, now: Instant) -> None:
        """Give a worker a rank; the worker that held it before loses it."""
        former = self.workers.get(self.places[rank]) if rank in self.places else None
        if former is not None:
            self._unseat(former)
        self._leave(worker)
        worker.rank, worker.local_rank, worker.since, worker.placed = rank, local_rank, now, True
        worker.candidate_for = None
        self._enter(worker)
        self.places[rank] = worker.worker

    def nominate(self, worker: WorkerRecord, rank: Rank | None, local_rank: int) -> None:
        """Make a worker without a place the candidate for a future rank, or a standby again."""
        self._leave(worker)
        worker.candidate_for, worker.local_rank = rank, local_rank
        self._enter(worker)

    def dismiss(self, worker: WorkerRecord) -> None:
        """Mark a worker as one that is to end while the job goes on."""
        self._leave(worker)
        worker.leaver = True
        self._enter(worker)

    def renumber(self, order: Sequence[WorkerRecord], now: Instant) -> None:
        """Give these workers the ranks from 0 on; all others lose theirs. Each worker keeps its slot."""
        for worker in list(self.placed()):
            self._unseat(worker)
        self.places = {}
        for rank, worker in enumerate(order):
            self.place(worker, Rank(rank), worker.local_rank, now)
        self.world = len(order)

    def forget_dead(self, keep: int = 256) -> list[WorkerId]:
        """Drop the oldest dead workers without a place, to bound memory in long jobs; returns their names."""
        dead = self._others[Stage.GONE]
        dropped = []
        while len(dead) > keep:
            worker, _ = dead.popitem(last=False)
            del self.workers[worker]
            dropped.append(worker)
        return dropped

    def _unseat(self, worker: WorkerRecord) -> None:
        self._leave(worker)
        worker.placed = False
        self._enter(worker)

    def _leave(self, worker: WorkerRecord) -> None:
        del (self._placed if worker.placed else self._others)[worker.stage][worker.worker]
        node = self.nodes[worker.node]
        if worker.placed:
            del node.placed[worker.worker]
            return
        node.standbys.pop(worker.worker, None)
        node.others.pop(worker.worker, None)
        if worker.candidate_for is not None and self.candidates.get(worker.candidate_for) is worker:
            del self.candidates[worker.candidate_for]
        self.short[worker.node] = None

    def _enter(self, worker: WorkerRecord) -> None:
        (self._placed if worker.placed else self._others)[worker.stage][worker.worker] = worker
        node = self.nodes[worker.node]
        if worker.placed:
            node.placed[worker.worker] = worker
        elif worker.spare:
            node.standbys[worker.worker] = worker
        elif worker.stage is not Stage.GONE and (worker.leaver or worker.candidate_for is not None):
            node.others[worker.worker] = worker
            if worker.candidate_for is not None and worker.living:
                self.candidates[worker.candidate_for] = worker

    # --- queries -----------------------------------------------------------------------------------------------

    def home(self, rank: Rank) -> tuple[NodeRecord, int]:
        """The node and slot of the worker that holds a rank, or held it last."""
        holder = self.workers[self.places[rank]]
        return self.nodes[holder.node], holder.local_rank

    def placed(self, *stages: Stage) -> Iterator[WorkerRecord]:
        """The workers that hold a rank, dead ones included until they are replaced: all, by rank, or those at `stages`.

        Workers may be moved during an iteration over `stages`.
        """
        if not stages:
            return (self.workers[worker] for worker in self.places.values())
        return iter([worker for stage in stages for worker in self._placed[stage].values()])

    def count(self, *stages: Stage) -> int:
        """Number of workers with a rank at these stages."""
        total = 0
        for stage in stages:  # A generator takes twice the time, and this runs for each fact.
            total += len(self._placed[stage])
        return total

    def all_at(self, *stages: Stage) -> bool:
        """True if every worker with a rank is at one of these stages."""
        return self.count(*stages) == len(self.places) > 0

    def oldest(self, stage: Stage, *, placed: bool = True) -> WorkerRecord | None:
        """The worker that has been at this stage for longest."""
        index = (self._placed if placed else self._others)[stage]
        return next(iter(index.values())) if index else None

    def newest(self, stage: Stage) -> WorkerRecord | None:
        """The worker with a rank that reached this stage last."""
        return next(reversed(self._placed[stage].values()), None)

    def living_nodes(self) -> list[NodeRecord]:
        """The nodes whose agents are connected, in order."""
        return [node for node in self._order if not node.away]

    def member_nodes(self) -> list[NodeRecord]:
        """The connected nodes that have ranks, in order."""
        return [node for node in self._order if node.placed and not node.away]

    def usable_nodes(self) -> list[NodeRecord]:
        """The nodes on which workers may be started, in order."""
        return [node for node in self._order if node.usable]

    def present(self) -> bool:
        """True if any worker's process may still exist."""
        return any(self._placed[stage] or self._others[stage] for stage in Stage if stage != Stage.GONE)

    def standbys(self, node: NodeId | None = None) -> list[WorkerRecord]:
        """Living workers without a rank."""
        nodes = self.nodes.values() if node is None else (self.nodes[node],)
        return [standby for each in nodes for standby in each.standbys.values()]

    def member(self, worker: WorkerRecord, rank: Rank) -> Member:
        """A worker's line in the table of a generation."""
        return Member(rank, worker.worker, worker.node, worker.local_rank, worker.endpoint, worker.holding)
