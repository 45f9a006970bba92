"""Settings on which every process of a job must agree."""

import msgspec

from regrow.core.ids import JobId, Seconds
from regrow.core.messages.lineage import NOBODY, Lineage
from regrow.core.messages.log_rules import LogRule
from regrow.core.messages.vocabulary import Warmth

HANG_FLOOR: Seconds = 90.0


class JobSpec(msgspec.Struct, frozen=True):
    """Settings on which every process of a job must agree, fixed when the job starts."""

    job: JobId
    nproc: int
    nodes: int
    standbys: int
    warmth: Warmth
    max_faults: int
    window: Seconds
    max_restarts: int | None
    durable: bool
    tag: str = ""  # tag by which `regrow jobs --tag` selects this job
    warmth_asked: bool = False
    """True if the user has chosen `warmth`; otherwise standbys use no memory of devices that ranks use."""
    halt_deadline: Seconds = 20.0
    """Time after which a worker that has not answered a halt is examined; `membership.recovery.hangs` may fence it."""
    hang_timeout: Seconds | None = None
    """Longest standstill of a worker in a step, if the user has set one; None: hangs are judged by evidence."""
    hang_floor: Seconds = HANG_FLOOR
    """Shortest standstill that may count as a hang, where `hang_timeout` is not set."""
    form_deadline: Seconds = 720.0
    """Longest time to form a generation, including a newcomer's state. Failed groups are reported sooner."""
    build_deadline: Seconds = 1800.0
    verdict_grace: Seconds = 1.0
    buddy_every: int = 0
    """Number of steps between two copies of every rank's state in shared memory, sent to its buddy node; 0: none."""
    digest_every: int = 0
    """Number of steps between two comparisons of all of the replicas' state; 0: never."""
    audit: bool = True
    """True if workers now and then compare samples of the replicas' state; `digest_every` compares all of it."""
    proof: bool = False
    """True if standbys prove that they compute the same as ranks, by running a step in the shadow of each."""
    proof_forks: bool = False
    """True if a newcomer is forked for the proof when no standby can give it."""
    health: bool = False
    """True if agents examine their nodes when these join and after each incident."""
    elects: bool = True
    """True if another node's launcher takes over as coordinator when the coordinator's node is lost."""
    witness: bool = False
    """True if a folder on a shared disk has a vote in the election of the coordinator."""
    health_checks: list[str] = []
    """Executables by which the user examines nodes too."""
    straggler_steps: int = 20
    """Number of successive steps for which a rank must be slower than the others to be a straggler; 0: no check."""
    replace_stragglers: bool = False
    """True if the nodes of stragglers are replaced when other nodes have room."""
    stop_on_divergence: bool = False
    """True if the job ends as soon as its result is no longer proven; otherwise it trains to its end."""
    rewrites: bool = True
    """False if nothing may be written into the script's frames; features that need to write there are refused."""
    check_for_nan: bool = False
    """True if a step with a non-finite loss or gradient runs again, and ends the job the second time."""
    numa_binding: str = ""
    """Part of a node, in torchrun's terms, to which workers are bound near their accelerators; empty: no binding."""
    hydration: str = "sockets"
    """Way in which newcomers read state (`--hydration`): over `sockets`, from `memory`, or by `nixl`."""
    log_rules: list[LogRule] = []
    """Rules for the lines that workers print."""
    trial_steps: int = 0
    """`regrow try`: most steps to run, each of which logs the state that it began with; 0: all steps of the script."""
    node_lease: Seconds = 10.0
    """Silence after which a node on another machine than the coordinator counts as lost."""
    node_deadline: Seconds = 600.0
    """Longest time that the job waits for a lost node to return."""
    checkpoint_every: Seconds = 0.0
    """Least time between two durable checkpoints; 0: none are written."""
    checkpoint_keep: int = 2
    """Number of durable checkpoints to keep, the newest ones."""
    lineage: Lineage = NOBODY
    """The training that owns the job's durable checkpoints."""
    must_resume: bool = False
    """True if the job must end when it finds no readable durable checkpoint (`--resume=must`)."""
    unit: int = 1
    """Number of ranks in one replica, which together hold one copy of the state. A world has whole replicas only."""
    min_replicas: int | None = None
    """Fewest replicas with which the job trains, else it waits; None: as many as at the start."""
    max_replicas: int | None = None
    """Most replicas; None: as many as at the start."""
    sizes: list[int] = []
    """Allowed numbers of replicas from `min_replicas` to `max_replicas`; empty: all."""
    change_pause: Seconds = 0.0
    """Least time between two voluntary changes of the world's size."""
    leave_deadline: Seconds = 600.0
    """Idle time, or processor time, after which a worker that was released in the middle of the job is ended.

    Nothing waits for it, and it yields to the workers that train: on busy cores its last acts take long by the clock.
    """
    most_nodes: int = 0
    """Most nodes, if other nodes may join later; 0: only as many as at the start."""
    spares: int = 0
    """Number of nodes that hold no ranks, and wait to take over the ranks of a lost node."""

    @property
    def halt_patience(self) -> Seconds:
        """Time after which a worker that has not answered a halt is checked for a hang."""
        return min(self.halt_deadline, self.hang_bound)

    @property
    def hang_bound(self) -> Seconds:
        """Shortest standstill that may count as a hang."""
        return self.hang_floor if self.hang_timeout is None else self.hang_timeout

    @property
    def node_limit(self) -> int:
        """Largest number of nodes, now or later."""
        return max(self.nodes, self.most_nodes)

    @property
    def elastic(self) -> bool:
        """True if the number of replicas may change."""
        return self.min_replicas is not None or self.max_replicas is not None

    @property
    def can_lose_nodes(self) -> bool:
        """True if the job can go on without one of its nodes."""
        return self.elastic and self.node_limit > 1

    @property
    def can_elect(self) -> bool:
        """True if another coordinator can be elected: nodes suffice for a majority, and the job can lose a node."""
        return self.elects and (self.node_limit > 2 or self.witness) and (self.spares > 0 or self.can_lose_nodes)

    @property
    def keeps_copies(self) -> bool:
        """True if agents keep copies of the ranks' state."""
        return self.buddy_every > 0 or self.digest_every > 0

    @property
    def world(self) -> int:
        """Number of ranks in the whole job at its start."""
        return self.nproc * (self.nodes - self.spares)

    @property
    def replicas(self) -> int:
        """Number of replicas at the start of the job."""
        return self.world // self.unit

    @property
    def most_world(self) -> int:
        """Number of ranks in the largest world that the job may have."""
        return self.world if self.max_replicas is None else max(self.world, self.max_replicas * self.unit)
