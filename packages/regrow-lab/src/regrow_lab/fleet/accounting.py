"""The account of one simulated job: rank-seconds by their use, work that counts, and money. Pure."""

from dataclasses import dataclass, field

from regrow.core.ids import Seconds
from regrow.observe.goodput import Spent
from regrow_lab.fleet.scenario import FleetScenario, PolicyTable

_HOUR: Seconds = 3600.0


@dataclass(frozen=True)
class JobOutcome:
    """Result of one job.

    Attributes:
        finished: all of its work is done.
        wall: time until its end, or until the simulation was given up.
        work: work done, in seconds of undisturbed training of the whole world.
        spent: rank-seconds by their use, spares included; adds up to `rank_seconds`.
        rank_seconds: of all places, spares included.
        goodput: the productive part of the world's rank-seconds, without spares.
        money: cost of the nodes that existed.
        incidents: number of faults by kind; planned changes of the world are `drain` and `grow`.
        mending: time from a fault to training again, summed over all incidents, without waits for nodes.
        lost_work: work that was done and lost again.
    """

    finished: bool
    wall: Seconds
    work: Seconds
    spent: dict[Spent, Seconds]
    rank_seconds: Seconds
    goodput: float
    money: float
    incidents: dict[str, int]
    mending: Seconds
    lost_work: Seconds


@dataclass
class FleetAccount:
    """Accumulates the time of one job.

    Attributes:
        scenario: the simulated scenario.
        policy: the simulated policy.
    """

    scenario: FleetScenario
    policy: PolicyTable
    wall: Seconds = 0.0
    work: Seconds = 0.0
    lost_work: Seconds = 0.0
    mending: Seconds = 0.0
    node_seconds: Seconds = 0.0
    spent: dict[Spent, Seconds] = field(default_factory=lambda: dict.fromkeys(Spent, 0.0))
    incidents: dict[str, int] = field(default_factory=dict)
    since_work: Seconds = 0.0
    """Work since the last durable checkpoint."""
    since_productive: Seconds = 0.0
    """Productive rank-seconds since the last durable checkpoint."""
    running: Seconds = 0.0
    """Seconds of training since the last incident."""

    def passes(self, seconds: Seconds, spent: Spent, members: int, healthy: int) -> None:
        """Add time in which all members do the same.

        Args:
            seconds: the duration.
            spent: the members' activity.
            members: number of nodes in the world.
            healthy: number of nodes that exist.
        """
        if seconds <= 0:
            return
        ranks, nodes = self.scenario.job.ranks_per_node, self.scenario.nodes
        self.wall += seconds
        self.node_seconds += seconds * healthy
        self.spent[spent] += seconds * members * ranks
        self.spent[Spent.CAPACITY] += seconds * (nodes - members) * ranks
        self.spent[Spent.IDLE] += seconds * self.policy.spares * ranks

    def trains(self, seconds: Seconds, members: int, healthy: int) -> None:
        """Add time of undisturbed training."""
        job = self.scenario.job
        overhead = seconds * job.overhead
        self.passes(overhead, Spent.IDLE, members, healthy)
        self.passes(seconds - overhead, Spent.PRODUCTIVE, members, healthy)
        work = seconds * members / self.scenario.nodes
        self.work += work
        self.since_work += work
        self.since_productive += (seconds - overhead) * members * job.ranks_per_node
        self.running += seconds

    def checkpointed(self) -> None:
        """Record a durable checkpoint: all work until now is safe."""
        self.since_work = self.since_productive = 0.0

    def give_up(self, seconds: Seconds, members: int) -> None:
        """Undo the newest work: `seconds` of undisturbed training, or less if there has been less."""
        lost = min(
            seconds * members / self.scenario.nodes, self.running * members / self.scenario.nodes, self.since_work
        )
        part = lost / self.since_work if self.since_work else 0.0
        self._undo(lost, part * self.since_productive)
        self.running = 0.0

    def back_to_checkpoint(self) -> None:
        """Undo all work since the last durable checkpoint."""
        self._undo(self.since_work, self.since_productive)
        self.since_work = self.since_productive = self.running = 0.0

    def _undo(self, work: Seconds, productive: Seconds) -> None:
        self.work -= work
        self.since_work -= work
        self.since_productive -= productive
        self.lost_work += work
        self.spent[Spent.PRODUCTIVE] -= productive
        self.spent[Spent.REDO] += productive

    def struck(self, kind: str) -> None:
        """Count one more incident."""
        self.incidents[kind] = self.incidents.get(kind, 0) + 1

    def outcome(self, *, finished: bool) -> JobOutcome:
        """Result of the job until now."""
        places = self.scenario.nodes * self.scenario.job.ranks_per_node * self.wall
        total = places + self.policy.spares * self.scenario.job.ranks_per_node * self.wall
        return JobOutcome(
            finished=finished,
            wall=self.wall,
            work=self.work,
            spent=dict(self.spent),
            rank_seconds=total,
            goodput=self.spent[Spent.PRODUCTIVE] / places if places else 1.0,
            money=self.node_seconds * self.scenario.price / _HOUR,
            incidents=dict(self.incidents),
            mending=self.mending,
            lost_work=self.lost_work,
        )
