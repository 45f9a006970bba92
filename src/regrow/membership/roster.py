"""The workers of a job as the coordinator knows them, and which of them holds which rank."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from regrow.core.ids import NO_STATE, Generation, Instant, NodeId, Rank, StepNo, WorkerId
from regrow.core.messages import Member, Role


class Stage(StrEnum):
    """How far a worker is. Only `MEMBER` and `FINISHED` workers use the groups of a generation."""

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


BUILDING = (Stage.ORDERED, Stage.STARTING, Stage.IDLE)
IN_GENERATION = frozenset({Stage.JOINING, Stage.MEMBER, Stage.FINISHED})
LIVING = frozenset(Stage) - {Stage.FENCED, Stage.GONE}


@dataclass
class WorkerRecord:
    """One worker. `rank` is None for a standby; `state_at` is the step of its protected state.

    `stage`, `since` and `seated` are written by the roster alone, which keeps its indexes by them.
    """

    worker: WorkerId
    node: NodeId
    role: Role
    rank: Rank | None
    local_rank: int
    stage: Stage = Stage.ORDERED
    since: Instant = 0.0
    """When it came to this stage, or to its rank at this stage."""
    seated: bool = False
    """Whether it holds `rank`; a replaced worker keeps the number for the record."""
    state_at: StepNo = NO_STATE
    endpoint: str = ""
    layout: str = ""
    holding: str = ""
    """Which shards it has; equal on replicas."""
    sharded: bool = False
    """Its script gives ranks different parts of the state."""
    built_for: Rank | None = None
    """The rank under which its script ran: in a sharded world it can take no other."""
    ready: bool = False
    """Halted with all that the update of `state_at` needs."""
    inside: int = 0
    """Halted in, or before, this restartable function after its last step; 0: it is past all of them."""
    verified: StepNo = NO_STATE
    """When it was halted: the step of its copy of a state upon which all replicas had agreed."""
    pid: int = 0
    has_session: bool = False
    script_ordered: bool = False
    """An `imports` standby that was told to run the script."""
    faulted_in: Generation | None = None
    """The generation in which it reported an error of its own: it reports one at most."""
    suspect: bool = False
    """It was seen to hang while it was asked to halt, which a thread that does not hang may answer for it."""
    committed: StepNo | None = None
    exit_code: int | None = None

    @property
    def living(self) -> bool:
        """Whether its process may still act for the job."""
        return self.stage in LIVING


@dataclass
class NodeRecord:
    """One node and its place in the order of nodes."""

    node: NodeId
    index: int
    host: str
    store: str
    vault: str = ""
    domain: str = ""
    data: str = ""
    """Where entries of its data cache are found; empty: nowhere."""
    away_since: Instant | None = None
    """When it was lost; None: it is here."""
    buddy: NodeId | None = None
    """The node that keeps copies of its ranks' state."""
    corruptions: int = 0
    """How often the state of a rank on it was found to be wrong."""
    failed_standbys: int = 0
    standbys: dict[WorkerId, WorkerRecord] = field(default_factory=dict)
    """Its living workers without a rank."""

    @property
    def away(self) -> bool:
        """Whether it was lost and has not come back."""
        return self.away_since is not None


_Index = OrderedDict[WorkerId, WorkerRecord]


class Roster:
    """Nodes, workers and places. Knows, but does not decide. Every question costs no more than its answer is long.

    Args:
        nproc: ranks of a node.
    """

    def __init__(self, nproc: int) -> None:
        self.nproc = nproc
        self.nodes: dict[NodeId, NodeRecord] = {}
        self.workers: dict[WorkerId, WorkerRecord] = {}
        self.places: dict[Rank, WorkerId] = {}
        """In the order of ranks."""
        self.sharded = False
        """Whether ranks hold different parts of the state."""
        self.short: set[NodeId] = set()
        """Nodes that may have fewer standbys than they should."""
        self._order: list[NodeRecord] = []
        self._numbered: dict[NodeId, int] = {}
        self._seated: dict[Stage, _Index] = {stage: OrderedDict() for stage in Stage}
        self._others: dict[Stage, _Index] = {stage: OrderedDict() for stage in Stage}

    # --- changes -----------------------------------------------------------------------------------------------

    def add_node(
        self, node: NodeId, host: str, store: str, *, vault: str = "", domain: str = "", data: str = ""
    ) -> None:
        """A node takes the next index in the order of nodes."""
        self.nodes[node] = NodeRecord(node, len(self.nodes), host, store, vault, domain, data)
        self._order.append(self.nodes[node])
        self.short.add(node)

    def nodes_here(self) -> list[NodeRecord]:
        """The nodes that are not lost, in their order."""
        return [node for node in self._order if not node.away]

    def nodes_away(self) -> list[NodeRecord]:
        """The lost nodes, in their order."""
        return [node for node in self._order if node.away]

    def add_worker(self, node: NodeId, role: Role, rank: Rank | None, local_rank: int, now: Instant) -> WorkerRecord:
        """A new worker with an id never used before; holds place `rank` at once when that is given."""
        number = self._numbered.get(node, 0)
        self._numbered[node] = number + 1
        worker = WorkerRecord(WorkerId(f"{node}.w{number}"), node, role, rank, local_rank, since=now)
        self.workers[worker.worker] = worker
        self._enter(worker)
        if rank is not None:
            self.seat(worker, rank, now)
        return worker

    def move(self, worker: WorkerRecord, stage: Stage, now: Instant) -> None:
        """Bring a worker to another stage."""
        self._leave(worker)
        worker.stage, worker.since = stage, now
        self._enter(worker)

    def seat(self, worker: WorkerRecord, rank: Rank, now: Instant) -> None:
        """Give a worker a place; who held it holds none any more."""
        former = self.workers.get(self.places[rank]) if rank in self.places else None
        if former is not None:
            self._leave(former)
            former.seated = False
            self._enter(former)
        self._leave(worker)
        worker.rank, worker.local_rank, worker.since, worker.seated = rank, self.home(rank)[1], now, True
        self._enter(worker)
        self.places[rank] = worker.worker

    def forget_dead(self, keep: int = 256) -> list[WorkerId]:
        """Drop the oldest dead workers without a place, so that a long job does not grow; returns who was dropped."""
        dead = self._others[Stage.GONE]
        dropped = []
        while len(dead) > keep:
            worker, _ = dead.popitem(last=False)
            del self.workers[worker]
            dropped.append(worker)
        return dropped

    def _leave(self, worker: WorkerRecord) -> None:
        del (self._seated if worker.seated else self._others)[worker.stage][worker.worker]
        if not worker.seated:
            node = self.nodes[worker.node]
            node.standbys.pop(worker.worker, None)
            self.short.add(worker.node)

    def _enter(self, worker: WorkerRecord) -> None:
        (self._seated if worker.seated else self._others)[worker.stage][worker.worker] = worker
        if not worker.seated and worker.living:
            self.nodes[worker.node].standbys[worker.worker] = worker

    # --- questions ---------------------------------------------------------------------------------------------

    def home(self, rank: Rank) -> tuple[NodeRecord, int]:
        """The node a rank lives on and its local rank there."""
        return self._order[rank // self.nproc], rank % self.nproc

    def seated(self, *stages: Stage) -> Iterator[WorkerRecord]:
        """The workers that hold a rank, dead ones included until they are replaced: all, by rank, or those at `stages`.

        A worker may be moved while one at `stages` is looked at.
        """
        if not stages:
            return (self.workers[worker] for worker in self.places.values())
        return iter([worker for stage in stages for worker in self._seated[stage].values()])

    def count(self, *stages: Stage) -> int:
        """How many of those that hold a rank are at these stages."""
        return sum(len(self._seated[stage]) for stage in stages)

    def all_at(self, *stages: Stage) -> bool:
        """Whether everyone who holds a rank is at one of these stages."""
        return self.count(*stages) == len(self.places) > 0

    def oldest(self, stage: Stage, *, seated: bool = True) -> WorkerRecord | None:
        """Who has been at this stage for longest."""
        return next(iter((self._seated if seated else self._others)[stage].values()), None)

    def newest(self, stage: Stage) -> WorkerRecord | None:
        """Who of those that hold a rank came to this stage last."""
        return next(reversed(self._seated[stage].values()), None)

    def living_nodes(self) -> list[NodeRecord]:
        """The nodes whose agents are there, in order."""
        return [node for node in self._order if not node.away]

    def present(self) -> bool:
        """Whether any worker's process may still exist."""
        return any(
            len(index[stage]) for index in (self._seated, self._others) for stage in Stage if stage != Stage.GONE
        )

    def standbys(self, node: NodeId | None = None) -> list[WorkerRecord]:
        """Living workers without a rank."""
        nodes = self.nodes.values() if node is None else (self.nodes[node],)
        return [standby for each in nodes for standby in each.standbys.values()]

    def member(self, worker: WorkerRecord, rank: Rank) -> Member:
        """A worker's line in a generation's table."""
        return Member(rank, worker.worker, worker.node, worker.local_rank, worker.endpoint, worker.holding)
