"""The workers of a job as the coordinator knows them, and which of them holds which rank."""

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
    """A place for a worker: its rank, the node, and which of the node's slots."""

    node: NodeId
    rank: Rank
    local_rank: int


BUILDING = (Stage.ORDERED, Stage.STARTING, Stage.IDLE)
IN_GENERATION = (Stage.JOINING, Stage.MEMBER, Stage.FINISHED)
LIVING = frozenset(Stage) - {Stage.FENCED, Stage.GONE}


@dataclass
class WorkerRecord:
    """One worker. `rank` is None for a standby; `state_at` is the step of its protected state.

    `stage`, `since` and `placed` are written by the roster alone, which keeps its indexes by them.
    """

    worker: WorkerId
    node: NodeId
    role: Role
    rank: Rank | None
    local_rank: int
    stage: Stage = Stage.ORDERED
    since: Instant = 0.0
    """Time when it came to this stage, or to its rank at this stage."""
    placed: bool = False
    """True if it holds `rank`; a replaced worker keeps the number for the record."""
    candidate_for: Rank | None = None
    """The rank it will have when the world has grown; it builds meanwhile, and belongs to no generation."""
    leaver: bool = False
    """It was released while the job goes on: its end is no fault."""
    state_at: StepNo = NO_STATE
    endpoint: str = ""
    layout: str = ""
    holding: str = ""
    """Name of its shards; equal on replicas."""
    sharded: bool = False
    """Its script gives ranks different parts of the state."""
    built_for: Rank | None = None  # under which its script ran: in a sharded world it can take no other
    built_slot: int = 0  # the slot on its node for which its script ran
    built_world: int = 0  # the world in which its script ran
    early: dict[str, str] = field(default_factory=dict)
    """Reads by its script of its place before its loop, by `core.early_reads.Place`, and their lines."""
    parts: dict[str, int] = field(default_factory=dict)
    """Digests of what it has built, until all are compared."""
    entered: Generation | None = None  # the first generation in which it had a rank
    ready: bool = False
    """Halted with all that the update of `state_at` needs."""
    restart_index: int = 0
    """Halted in, or before, this restartable function after its last step; 0: it is past all of them."""
    whole_body: bool = False
    """Its script's bodies cannot be parted from their updates."""
    torn_at: StepNo | None = None  # it was halted in the middle of this step's update, which it could not end
    verified: StepNo = NO_STATE
    """Step of its copy, when it was halted, of a state upon which all replicas had agreed."""
    pid: int = 0
    has_session: bool = False
    script_ordered: bool = False
    """An `imports` standby that was told to run the script."""
    faulted_in: Generation | None = None
    """The generation in which it reported an error of its own: it reports one at most."""
    microbatches: int = 0
    """Into how many its script divides a step; 0: into none."""
    fixed: str = ""
    """Why the world can have no other size, as its script says; empty: it can."""
    between: bool = False
    """Its script has restartable functions that may run between its steps."""
    unprovable: str = ""  # why nothing of its script can be compared in a shadow
    committed: StepNo | None = None
    goes_on: bool = False
    """It has finished its steps, and what its script does behind them is to be mended."""
    training: str = ""  # the name of the training that it is for, where the script has several
    ended: FinishedTraining | None = None  # that training, once it has finished it and another follows
    exit_code: int | None = None

    @property
    def living(self) -> bool:
        """True if its process may still act for the job."""
        return self.stage in LIVING

    @property
    def spare(self) -> bool:
        """True if it is a standby: living, and of no other use."""
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
    """Number of ranks that it can hold."""
    away_since: Instant | None = None
    """Time when it was lost; None: it is here."""
    leave_by: Instant | None = None
    """It is to be given back by then; None: it is not."""
    leave_reason: str = ""
    table: int = 0
    """The number of the last table of a generation that stood which its agent has; 0: it has none."""
    stopped: bool = False
    """Its agent was told to end since nobody was left on it, or has ended as announced."""
    unpaid: bool = False
    """Its announced stay is too short for the world to grow onto it; lost ranks may still be filled there."""
    buddy: NodeId | None = None
    """The node that keeps copies of its ranks' state."""
    corruptions: int = 0
    """Number of times that the state of a rank on it was found to be wrong."""
    quarantined: str = ""
    """Why no new worker is placed on it while there is room elsewhere; empty: it is like any other."""
    verdicts: list[str] = field(default_factory=list)
    """Findings of its last examination, for people."""
    early: bool = False
    """The script asks for its place before its loop, so standbys here wait before the script."""
    failed_standbys: int = 0
    failed_candidates: int = 0
    """Candidates in a row that have died on it before they were built."""
    standbys: dict[WorkerId, WorkerRecord] = field(default_factory=dict)
    """Its living workers without a rank that are no candidates."""
    others: dict[WorkerId, WorkerRecord] = field(default_factory=dict)
    """Its candidates and leavers whose processes may still exist."""
    placed: dict[WorkerId, WorkerRecord] = field(default_factory=dict)
    """Its workers that hold a rank, dead ones too."""

    @property
    def away(self) -> bool:
        """True if it was lost and has not come back."""
        return self.away_since is not None

    @property
    def usable(self) -> bool:
        """True if workers may be started on it."""
        return self.away_since is None and self.leave_by is None

    def free(self) -> list[int]:
        """Its slots that nobody has, the lowest first."""
        if len(self.placed) >= self.slots:
            return []  # When many nodes are lost at once, each of the others is asked for each of their ranks.
        taken = {worker.local_rank for index in (self.placed, self.others) for worker in index.values()}
        return [slot for slot in range(self.slots) if slot not in taken]


_Index = OrderedDict[WorkerId, WorkerRecord]


class Roster:
    """Nodes, workers and places. Knows, but does not decide. Every question costs no more than its answer is long."""

    def __init__(self) -> None:
        self.world = 0
        """Ranks of the world that is, or is being built."""
        self.nodes: dict[NodeId, NodeRecord] = {}
        self.workers: dict[WorkerId, WorkerRecord] = {}
        self.places: dict[Rank, WorkerId] = {}
        """In the order of ranks."""
        self.candidates: dict[Rank, WorkerRecord] = {}
        """By the rank each of them will have."""
        self.sharded = False
        """True if ranks hold different parts of the state."""
        self.grouped = False
        """True if the script has made groups of its own, in which ranks may have different parts."""
        self.first_build: Seconds | None = None
        """Time until all the first workers were ready for their first step; None: they are not yet."""
        self._opened: Instant | None = None
        self.early = ""
        """Why standbys of some nodes wait before the script, whatever warmth was asked for; empty: they do not."""
        self.imports: list[str] = []
        """The installed modules that the script imports, in order, which may be imported ahead of it."""
        self.learnt = False
        self.unfit = 0
        self.environment: list[str] = []
        """The environment variables that the script changes."""
        self.short: dict[NodeId, None] = {}
        """Nodes that may have fewer standbys than they should. No set: its order is another one in each process."""
        self.away: set[WorkerId] = set()
        """Halted ones whose state is known to stand, while their script is still on its way to where it waits."""
        self.unproven: dict[WorkerId, Instant] = {}
        """Newcomers that have not yet answered whether they are alive, and until when they have time; oldest first."""
        self._order: list[NodeRecord] = []
        self.named: dict[NodeId, int] = {}
        """Number of workers of each node that have had names, which are not given again."""
        self._placed: dict[Stage, _Index] = {stage: OrderedDict() for stage in Stage}
        self._others: dict[Stage, _Index] = {stage: OrderedDict() for stage in Stage}

    # --- changes -----------------------------------------------------------------------------------------------

    def add_node(self, joined: facts.NodeJoined) -> NodeRecord:
        """A node takes the next index in the order of nodes."""
        node = NodeRecord(
            joined.node, len(self.nodes), joined.host, joined.store, joined.copy_endpoint, joined.domain, joined.slots
        )
        self.nodes[joined.node] = node
        self._order.append(node)
        self.short[joined.node] = None
        return node

    def add_worker(self, slot: RankSlot, role: Role, now: Instant, *, candidate: bool = False) -> WorkerRecord:
        """A new worker with an id never used before. A standby holds no rank yet, nor does a candidate."""
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
        """All are ready for a step."""
        if self.first_build is None and self._opened is not None:
            self.first_build = now - self._opened

    def adopt(self, worker: WorkerRecord) -> None:
        """A worker that another coordinator has started, or one of its that is gone."""
        self.workers[worker.worker] = worker
        self._enter(worker)

    def move(self, worker: WorkerRecord, stage: Stage, now: Instant) -> None:
        """Bring a worker to another stage."""
        self._leave(worker)
        self.away.discard(worker.worker)
        self.unproven.pop(worker.worker, None)
        worker.stage, worker.since = stage, now
        self._enter(worker)

    def place(self, worker: WorkerRecord, rank: Rank, local_rank: int, now: Instant) -> None:
        """Give a worker a place; who held it holds none any more."""
        former = self.workers.get(self.places[rank]) if rank in self.places else None
        if former is not None:
            self._unseat(former)
        self._leave(worker)
        worker.rank, worker.local_rank, worker.since, worker.placed = rank, local_rank, now, True
        worker.candidate_for = None
        self._enter(worker)
        self.places[rank] = worker.worker

    def nominate(self, worker: WorkerRecord, rank: Rank | None, local_rank: int) -> None:
        """Make a worker without a place the candidate for a rank to come, or a standby again."""
        self._leave(worker)
        worker.candidate_for, worker.local_rank = rank, local_rank
        self._enter(worker)

    def dismiss(self, worker: WorkerRecord) -> None:
        """The worker is to end while the job goes on."""
        self._leave(worker)
        worker.leaver = True
        self._enter(worker)

    def renumber(self, order: Sequence[WorkerRecord], now: Instant) -> None:
        """These hold the ranks from 0 on, and nobody else holds any. Each keeps its slot."""
        for worker in list(self.placed()):
            self._unseat(worker)
        self.places = {}
        for rank, worker in enumerate(order):
            self.place(worker, Rank(rank), worker.local_rank, now)
        self.world = len(order)

    def forget_dead(self, keep: int = 256) -> list[WorkerId]:
        """Drop the oldest dead workers without a place, so that a long job does not grow; returns who was dropped."""
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

    # --- questions ---------------------------------------------------------------------------------------------

    def home(self, rank: Rank) -> tuple[NodeRecord, int]:
        """The node of whoever holds a rank, or held it last, and its slot there."""
        holder = self.workers[self.places[rank]]
        return self.nodes[holder.node], holder.local_rank

    def placed(self, *stages: Stage) -> Iterator[WorkerRecord]:
        """The workers that hold a rank, dead ones included until they are replaced: all, by rank, or those at `stages`.

        A worker may be moved while one at `stages` is looked at.
        """
        if not stages:
            return (self.workers[worker] for worker in self.places.values())
        return iter([worker for stage in stages for worker in self._placed[stage].values()])

    def count(self, *stages: Stage) -> int:
        """Number of workers with a rank at these stages."""
        total = 0
        for stage in stages:  # a generator takes twice the time, and this is asked for each fact
            total += len(self._placed[stage])
        return total

    def all_at(self, *stages: Stage) -> bool:
        """True if every worker with a rank is at one of these stages."""
        return self.count(*stages) == len(self.places) > 0

    def oldest(self, stage: Stage, *, placed: bool = True) -> WorkerRecord | None:
        """Worker that has been at this stage for longest."""
        index = (self._placed if placed else self._others)[stage]
        return next(iter(index.values())) if index else None

    def newest(self, stage: Stage) -> WorkerRecord | None:
        """Worker with a rank that came to this stage last."""
        return next(reversed(self._placed[stage].values()), None)

    def living_nodes(self) -> list[NodeRecord]:
        """The nodes whose agents are there, in order."""
        return [node for node in self._order if not node.away]

    def member_nodes(self) -> list[NodeRecord]:
        """The nodes on which there are ranks, in order."""
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
        """A worker's line in a generation's table."""
        return Member(rank, worker.worker, worker.node, worker.local_rank, worker.endpoint, worker.holding)
