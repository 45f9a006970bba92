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
    tag: str = ""  # of the jobs that `regrow jobs --tag` lists together
    warmth_asked: bool = False
    """True if the user has chosen it: else standbys take no memory of devices that ranks use."""
    halt_deadline: Seconds = 20.0
    """After which who has not answered a halt is looked at; `membership.recovery.hangs` says whether it is fenced."""
    hang_timeout: Seconds | None = None
    """Longest standstill of a worker in a step, as the user ordered; None: judged by evidence."""
    hang_floor: Seconds = HANG_FLOOR
    """Without an order: nobody hangs who has stood still for less."""
    form_deadline: Seconds = 720.0
    """Longer than a newcomer's state may take to arrive. Workers whose groups do not form say so far sooner."""
    build_deadline: Seconds = 1800.0
    verdict_grace: Seconds = 1.0
    buddy_every: int = 0
    """Steps between two copies of every rank's state in shared memory, streamed to the buddy node; 0: none."""
    digest_every: int = 0
    """Steps between two comparisons of the replicas' state; 0: never."""
    audit: bool = True
    """True if workers look now and then for replicas that differ; `digest_every` does that whole, and undoes it."""
    proof: bool = False
    """True if standbys show, in the shadow of ranks, that they compute the same."""
    proof_forks: bool = False
    """True if a newcomer is forked for that when no standby can do it."""
    health: bool = False
    """True if agents examine their nodes when they join and after each incident."""
    elects: bool = True
    """True if other nodes' launchers take over the coordinator when its node is lost."""
    witness: bool = False
    """True if a folder on a shared disk votes for the coordinator too."""
    health_checks: list[str] = []
    """Executables of the user's that do so too."""
    straggler_steps: int = 20
    """Steps in a row beyond the others that make a rank a straggler; 0: no check."""
    replace_stragglers: bool = False
    """True if their nodes are replaced when others have room."""
    stop_on_divergence: bool = False
    """True if a job whose result is not proven any more ends at once; else it is trained to its end."""
    rewrites: bool = True
    """False if nothing is written into the script's frames, and what would need that is refused."""
    check_for_nan: bool = False
    """True if a step with a loss or a gradient that is not finite is run again, and ends the job the second time."""
    numa_binding: str = ""
    """Part of a node, as torchrun names it, to which workers are bound near their accelerators; empty: none."""
    hydration: str = "sockets"
    """`--hydration`: `sockets`, `memory` or `nixl`, by which newcomers read state."""
    log_rules: list[LogRule] = []
    """Rules for the lines that workers print."""
    trial_steps: int = 0
    """`regrow try`: most steps, each of which logs the state it began with; 0: the script's own number."""
    node_lease: Seconds = 10.0
    """Silence after which a node on another machine than the coordinator is lost."""
    node_deadline: Seconds = 600.0
    """Longest wait for a lost node's return."""
    checkpoint_every: Seconds = 0.0
    """Least time between two durable checkpoints; 0: none are written."""
    checkpoint_keep: int = 2
    """Number of the newest durable checkpoints that stay."""
    lineage: Lineage = NOBODY
    """Owner of its durable checkpoints."""
    must_resume: bool = False
    """True if the job ends when no durable checkpoint can be read to go on from (`--resume=must`)."""
    unit: int = 1
    """Ranks of one replica: those that together hold one copy of the state. Worlds have whole replicas only."""
    min_replicas: int | None = None
    """With fewer the job waits; None: as many as at the start."""
    max_replicas: int | None = None
    """None: as many as at the start."""
    sizes: list[int] = []
    """The numbers of replicas that are allowed between these two; empty: all."""
    change_pause: Seconds = 0.0
    """Least time between two changes of the world that nothing forces."""
    leave_deadline: Seconds = 600.0
    """Time for a worker that was released in the middle of the job to be idle, and time to compute, before it ends.

    Nothing waits for it, and it has given way to those who train: on busy cores its last acts take long by the clock.
    """
    most_nodes: int = 0
    """Most nodes, if others may join later; 0: no more than at the start."""
    spares: int = 0
    """Nodes that hold no ranks, and wait to take those of a lost one."""

    @property
    def halt_patience(self) -> Seconds:
        """After how long it is asked whether who has not answered a halt hangs."""
        return min(self.halt_deadline, self.hang_bound)

    @property
    def hang_bound(self) -> Seconds:
        """Nobody hangs who has stood still for less."""
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
        """True if the job may go on without one of its nodes."""
        return self.elastic and self.node_limit > 1

    @property
    def can_elect(self) -> bool:
        """True if another coordinator is elected: nodes are enough for a majority, and the job can do without one."""
        return self.elects and (self.node_limit > 2 or self.witness) and (self.spares > 0 or self.can_lose_nodes)

    @property
    def keeps_copies(self) -> bool:
        """True if agents keep copies of the ranks' state."""
        return self.buddy_every > 0 or self.digest_every > 0

    @property
    def world(self) -> int:
        """Ranks in the whole job when it starts."""
        return self.nproc * (self.nodes - self.spares)

    @property
    def replicas(self) -> int:
        """Replicas when it starts."""
        return self.world // self.unit

    @property
    def most_world(self) -> int:
        """Ranks in the largest world that the job may have."""
        return self.world if self.max_replicas is None else max(self.world, self.max_replicas * self.unit)
