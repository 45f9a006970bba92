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
    tag: str = ""  # tag by which `regrow jobs --tag` selects jobs
    warmth_asked: bool = False
    """True if the user has chosen `warmth`: else standbys take no memory of devices that ranks use."""
    halt_deadline: Seconds = 20.0
    """Time until a worker that has not answered a halt is examined; `membership.recovery.hangs` decides on fencing."""
    hang_timeout: Seconds | None = None
    """Longest standstill of a worker in a step, if the user has set it; None: hangs are judged by evidence."""
    hang_floor: Seconds = HANG_FLOOR
    """Without `hang_timeout`: shortest standstill that may count as a hang."""
    form_deadline: Seconds = 720.0
    """Longer than a newcomer's state may take to arrive. Workers whose groups do not form report that sooner."""
    build_deadline: Seconds = 1800.0
    verdict_grace: Seconds = 1.0
    buddy_every: int = 0
    """Steps between two copies of every rank's state in shared memory, streamed to the buddy node; 0: none."""
    digest_every: int = 0
    """Steps between two comparisons of the replicas' state; 0: never."""
    audit: bool = True
    """True if workers look now and then for replicas that differ; `digest_every` compares all state, and repairs it."""
    proof: bool = False
    """True if standbys prove, by running in the shadow of ranks, that they compute the same."""
    proof_forks: bool = False
    """True if a newcomer is forked for the proof when no standby can give it."""
    health: bool = False
    """True if agents examine their nodes when they join and after each incident."""
    elects: bool = True
    """True if other nodes' launchers take over the coordinator when its node is lost."""
    witness: bool = False
    """True if a folder on a shared disk also votes for the coordinator."""
    health_checks: list[str] = []
    """Executables of the user's that examine nodes too."""
    straggler_steps: int = 20
    """Number of steps in a row that a rank must be slower than the others to count as a straggler; 0: no check."""
    replace_stragglers: bool = False
    """True if the nodes of stragglers are replaced when others have room."""
    stop_on_divergence: bool = False
    """True if a job ends at once when its result is not proven any more; else it is trained to its end."""
    rewrites: bool = True
    """False if nothing may be written into the script's frames; features that need that are refused."""
    check_for_nan: bool = False
    """True if a step with a loss or a gradient that is not finite is run again, and ends the job the second time."""
    numa_binding: str = ""
    """Part of a node, as torchrun names it, to which workers are bound near their accelerators; empty: no binding."""
    hydration: str = "sockets"
    """`--hydration`: how newcomers read state, `sockets`, `memory` or `nixl`."""
    log_rules: list[LogRule] = []
    """Rules for the lines that workers print."""
    trial_steps: int = 0
    """`regrow try`: most steps, each of which logs the state it began with; 0: as many as the script has."""
    node_lease: Seconds = 10.0
    """Silence after which a node on another machine than the coordinator counts as lost."""
    node_deadline: Seconds = 600.0
    """Longest wait for a lost node to return."""
    checkpoint_every: Seconds = 0.0
    """Least time between two durable checkpoints; 0: none are written."""
    checkpoint_keep: int = 2
    """Number of durable checkpoints that are kept, the newest."""
    lineage: Lineage = NOBODY
    """Owner of the job's durable checkpoints."""
    must_resume: bool = False
    """True if the job ends when it finds no readable durable checkpoint to resume from (`--resume=must`)."""
    unit: int = 1
    """Ranks of one replica: those that together hold one copy of the state. Worlds have whole replicas only."""
    min_replicas: int | None = None
    """Fewest replicas with which the job trains; with fewer it waits. None: as many as at the start."""
    max_replicas: int | None = None
    """Most replicas; None: as many as at the start."""
    sizes: list[int] = []
    """Allowed numbers of replicas between these two; empty: all."""
    change_pause: Seconds = 0.0
    """Least time between two voluntary changes of the world's size."""
    leave_deadline: Seconds = 600.0
    """Idle time, and processor time, after which a worker that was released in the middle of the job is ended.

    Nothing waits for it, and it yields to the workers that train: on busy cores its last acts take long by the clock.
    """
    most_nodes: int = 0
    """Most nodes, if others may join later; 0: no more than at the start."""
    spares: int = 0
    """Nodes that hold no ranks, and wait to take over those of a lost node."""

    @property
    def halt_patience(self) -> Seconds:
        """Time after which a worker that did not answer a halt is checked for a hang."""
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
        """True if another coordinator can be elected: nodes suffice for a majority, and the job can lose one."""
        return self.elects and (self.node_limit > 2 or self.witness) and (self.spares > 0 or self.can_lose_nodes)

    @property
    def keeps_copies(self) -> bool:
        """True if agents keep copies of the ranks' state."""
        return self.buddy_every > 0 or self.digest_every > 0

    @property
    def world(self) -> int:
        """Ranks in the whole job at its start."""
        return self.nproc * (self.nodes - self.spares)

    @property
    def replicas(self) -> int:
        """Replicas at the start of the job."""
        return self.world // self.unit

    @property
    def most_world(self) -> int:
        """Ranks in the largest world that the job may have."""
        return self.world if self.max_replicas is None else max(self.world, self.max_replicas * self.unit)
