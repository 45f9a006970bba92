"""What coordinator, agents and workers say to one another.

Facts are past tense, orders imperative. A fact about a worker names it; an order to a worker is routed by its agent.
Every message of a generation carries its number, and is dropped where that number is not the current one.
"""

from enum import StrEnum

import msgspec

from regrow.core.checkpoint_messages import (
    AbandonCheckpoint,
    CheckpointFailed,
    CheckpointWritten,
    FinishCheckpoint,
    PartsWritten,
    SnapshotForDisk,
    SnapshotHeld,
    WriteCheckpoint,
)
from regrow.core.copies import (
    CopiesHeld,
    CopySource,
    CopyStreamed,
    PlaceCopies,
    ReportCopies,
    SnapshotStored,
    SnapshotTaken,
    TakeSnapshot,
)
from regrow.core.ids import NO_STATE, Generation, Instant, JobId, NodeId, Rank, Seconds, StepNo, WorkerId
from regrow.core.replica_messages import CorruptionNamed, ReplicasDiffer


class FaultStage(StrEnum):
    """Where in a step (or in a recovery) an injected fault strikes."""

    NOW = "now"
    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCE = "reduce"
    VOTE = "vote"
    """All have voted that the update may happen (sharded worlds); it has not begun."""
    UPDATE = "update"
    COMMIT = "commit"
    BETWEEN = "between"
    """In a restartable function between the step before and this one."""
    FORM = "form"
    HYDRATE = "hydrate"
    ROLL = "roll"
    """The verdict was that the step has happened; its update has not begun here."""


STEP_STAGES = (
    FaultStage.DATA,
    FaultStage.FORWARD,
    FaultStage.BACKWARD,
    FaultStage.REDUCE,
    FaultStage.UPDATE,
    FaultStage.COMMIT,
)


class FaultHow(StrEnum):
    """What an injected fault does to its worker."""

    SIGKILL = "sigkill"
    SIGSTOP = "sigstop"
    EXCEPTION = "exception"
    EXIT = "exit"
    PAUSE = "pause"
    """One second of nothing, which harms nobody by itself."""
    OOM_LIKE = "oom-like"
    BITFLIP = "bitflip"
    """One bit of the largest element of a protected parameter changes, and nobody notices."""


class FaultKind(StrEnum):
    """What a worker saw go wrong in its own step."""

    COLLECTIVE = "collective"
    BODY = "body"
    HYDRATION = "hydration"


class Role(StrEnum):
    """What a worker was started as."""

    RANK = "rank"
    JOINER = "joiner"
    STANDBY = "standby"


class Warmth(StrEnum):
    """How far a standby goes before it waits: torch imported, or the script run up to `session.steps`."""

    IMPORTS = "imports"
    BUILT = "built"


class FaultSpec(msgspec.Struct, frozen=True):
    """One fault on demand: rank `rank` suffers `how` at `stage` of `step` (None: the next step it runs)."""

    fault: str
    rank: Rank
    how: FaultHow = FaultHow.SIGKILL
    stage: FaultStage = FaultStage.NOW
    step: StepNo | None = None


class ErrorReport(msgspec.Struct, frozen=True):
    """An exception of a worker as text: its type, its message, the traceback without our frames."""

    type: str
    message: str
    traceback: str
    where: str = ""

    @property
    def fingerprint(self) -> str:
        """Equal for two occurrences of the same error at the same place."""
        return f"{self.type}|{self.message}|{self.where}"


class Member(msgspec.Struct, frozen=True):
    """A worker's place in a generation, and where its state can be read. `holding`: equal where the state is too."""

    rank: Rank
    worker: WorkerId
    node: NodeId
    local_rank: int
    endpoint: str
    holding: str = ""


# --- facts about nodes -------------------------------------------------------------------------------------------


class NodeJoined(msgspec.Struct, frozen=True, tag=True):
    """An agent registered. `slots`: how many ranks it can hold; `store`: where its keys can be read and written.

    `vault`: where copies of state can be left and fetched. `domain`: what fails together with this node (a rack's name).
    """

    node: NodeId
    host: str
    slots: int
    store: str
    pid: int = 0
    vault: str = ""
    domain: str = ""


class NodeLost(msgspec.Struct, frozen=True, tag=True):
    """An agent's connection ended without a goodbye."""

    node: NodeId
    reason: str


class NodeStopped(msgspec.Struct, frozen=True, tag=True):
    """An agent has ended all its processes, as ordered."""

    node: NodeId


# --- facts about workers -----------------------------------------------------------------------------------------


class WorkerStarted(msgspec.Struct, frozen=True, tag=True):
    """The worker's process exists."""

    worker: WorkerId
    pid: int


class WorkerReady(msgspec.Struct, frozen=True, tag=True):
    """The worker reached `session.steps`: built and rehearsed; or, as an `imports` standby, waits to run the script.

    `state_at`: the step its state stands at. `layout`: digest of its reduction layout and state names. `holding`: which
    shards it has, equal on replicas. `sharded`: the script gives ranks different parts of the state.
    """

    worker: WorkerId
    state_at: StepNo
    endpoint: str
    layout: str
    built_s: Seconds = 0.0
    holding: str = ""
    sharded: bool = False


class WorkerFaulted(msgspec.Struct, frozen=True, tag=True):
    """The worker saw an exception in its step and waits for a verdict. `collective`: a symptom, not a cause."""

    worker: WorkerId
    generation: Generation
    step: StepNo
    kind: FaultKind
    error: ErrorReport


class WorkerHalted(msgspec.Struct, frozen=True, tag=True):
    """The worker uses its groups of this generation no more; its state stands at `state_at` and stays there.

    `ready`: it has all it needs for the update of that step, and applies it if the next generation starts after it.
    `inside`: which restartable function after its last step it is in, or may run next, from 1; 0: none any more.
    `verified`: the step of the state upon which all replicas agreed last, where it has a copy of that.
    """

    worker: WorkerId
    generation: Generation
    state_at: StepNo
    ready: bool = False
    inside: int = 0
    verified: StepNo = NO_STATE


class WorkerResumed(msgspec.Struct, frozen=True, tag=True):
    """The worker's groups stand in the new generation and its state is that generation's."""

    worker: WorkerId
    generation: Generation
    form_s: Seconds = 0.0
    hydrate_s: Seconds = 0.0
    hydrated_bytes: int = 0


class WorkerCommitted(msgspec.Struct, frozen=True, tag=True):
    """The worker's state went from `step` to `step + 1`. `at`: when, on the node's monotonic clock."""

    worker: WorkerId
    generation: Generation
    step: StepNo
    at: Instant
    seconds: Seconds
    metrics: dict[str, float] = {}
    samples: int = 0
    adopted: bool = False


class WorkerStaged(msgspec.Struct, frozen=True, tag=True):
    """Metrics of a step that has not committed yet; they count if the step commits without this worker."""

    worker: WorkerId
    generation: Generation
    step: StepNo
    metrics: dict[str, float]


class WorkerFinished(msgspec.Struct, frozen=True, tag=True):
    """The worker has no step left to run and waits to be released, still able to give its state."""

    worker: WorkerId
    generation: Generation
    state_at: StepNo


class WorkerFailed(msgspec.Struct, frozen=True, tag=True):
    """The script ended with an exception outside any step. The exit follows.

    `own`: nothing had failed around it, so it is the script's own error; else it may be another's fault.
    """

    worker: WorkerId
    error: ErrorReport
    step: StepNo
    own: bool = False


class WorkerHung(msgspec.Struct, frozen=True, tag=True):
    """The worker made no progress for longer than the bound on its step time."""

    worker: WorkerId
    generation: Generation
    step: StepNo
    seconds: Seconds
    bound: Seconds
    detail: str


class WorkerExited(msgspec.Struct, frozen=True, tag=True):
    """The process is gone. `code`: its exit code, or minus the signal that ended it. `at`: when the agent saw it."""

    worker: WorkerId
    code: int
    at: Instant


class FaultFired(msgspec.Struct, frozen=True, tag=True):
    """A fault on demand is about to strike; sent by the one it strikes."""

    worker: WorkerId
    fault: str
    step: StepNo
    at: Instant


class NodeProgress(msgspec.Struct, frozen=True, tag=True):
    """The newest committed step of each worker of a node; for people, not for decisions."""

    node: NodeId
    commits: list[WorkerCommitted]


# --- facts from people -------------------------------------------------------------------------------------------


class StopRequested(msgspec.Struct, frozen=True, tag=True):
    """A signal or an operator asks the job to end."""

    reason: str


class FaultRequested(msgspec.Struct, frozen=True, tag=True):
    """`regrow kill`: let one worker fail."""

    fault: FaultSpec


class TimeAdvanced(msgspec.Struct, frozen=True, tag=True):
    """A deadline may have passed."""


# --- orders to agents --------------------------------------------------------------------------------------------


class SpawnWorker(msgspec.Struct, frozen=True, tag=True):
    """Fork a worker. `rank`: its place, provisional for a standby.

    `stores`: the agents' stores in the order of nodes; the keys of the generation are spread over them.
    """

    node: NodeId
    worker: WorkerId
    role: Role
    rank: Rank
    local_rank: int
    world: int
    generation: Generation
    stores: list[str]
    restarts: int
    resume: bool
    faults: list[FaultSpec] = []


class FenceWorker(msgspec.Struct, frozen=True, tag=True):
    """Make sure the worker can do nothing any more (SIGKILL), stacks first when asked."""

    node: NodeId
    worker: WorkerId
    reason: str
    dump_stacks: bool = False


class StopNode(msgspec.Struct, frozen=True, tag=True):
    """End all workers, give them `grace` to go, then yourself."""

    node: NodeId
    reason: str
    grace: Seconds


# --- orders to workers -------------------------------------------------------------------------------------------


class StartScript(msgspec.Struct, frozen=True, tag=True):
    """To an `imports` standby: build for this place now."""

    worker: WorkerId
    rank: Rank
    local_rank: int
    generation: Generation


class HaltGeneration(msgspec.Struct, frozen=True, tag=True):
    """Give up the groups of this generation and say where your state stands."""

    worker: WorkerId
    generation: Generation
    reason: str


class FormGeneration(msgspec.Struct, frozen=True, tag=True):
    """The new membership. Who is not in `holders` receives `state@step` from those of them with its own holding.

    `restore`: the copy to go back to instead, where no living worker has the state; then nobody is a holder.
    `inside`: from which restartable function on, of those after the last step, all run them again; 0: none.
    `rewind`: holders go back to their own copy of `state@step`, upon which all replicas had agreed.
    """

    worker: WorkerId
    generation: Generation
    rank: Rank
    local_rank: int
    step: StepNo
    members: list[Member]
    holders: list[Rank]
    stores: list[str]
    faults: list[FaultSpec] = []
    restore: CopySource | None = None
    inside: int = 0
    rewind: bool = False


class ReleaseWorker(msgspec.Struct, frozen=True, tag=True):
    """Every worker has finished its steps: nobody needs your state any more."""

    worker: WorkerId


class ArmFault(msgspec.Struct, frozen=True, tag=True):
    """Fail on demand."""

    worker: WorkerId
    fault: FaultSpec


WorkerFact = (
    WorkerReady
    | WorkerFaulted
    | WorkerHalted
    | WorkerResumed
    | WorkerCommitted
    | WorkerStaged
    | WorkerFinished
    | WorkerFailed
    | FaultFired
    | SnapshotTaken
    | SnapshotForDisk
    | ReplicasDiffer
    | CorruptionNamed
)
"""What a worker tells its agent."""

WorkerOrder = StartScript | HaltGeneration | FormGeneration | ReleaseWorker | ArmFault | SnapshotStored | TakeSnapshot
"""What an agent passes on to a worker."""

AgentFact = (
    NodeJoined
    | NodeStopped
    | NodeProgress
    | WorkerStarted
    | WorkerReady
    | WorkerFaulted
    | WorkerHalted
    | WorkerResumed
    | WorkerCommitted
    | WorkerFinished
    | WorkerFailed
    | WorkerHung
    | WorkerExited
    | FaultFired
    | CopiesHeld
    | CopyStreamed
    | SnapshotHeld
    | PartsWritten
    | CheckpointWritten
    | CheckpointFailed
    | ReplicasDiffer
    | CorruptionNamed
)
"""What an agent tells the coordinator."""

AgentOrder = (
    SpawnWorker
    | FenceWorker
    | StopNode
    | StartScript
    | HaltGeneration
    | FormGeneration
    | ReleaseWorker
    | ArmFault
    | ReportCopies
    | PlaceCopies
    | TakeSnapshot
    | WriteCheckpoint
    | FinishCheckpoint
    | AbandonCheckpoint
)
"""What the coordinator orders an agent, for itself or for one of its workers."""

Fact = AgentFact | NodeLost | StopRequested | FaultRequested | TimeAdvanced
"""All that the membership machine is told."""


class JobFacts(msgspec.Struct, frozen=True):
    """What every process of a job must agree on, fixed when the job starts."""

    job: JobId
    nproc: int
    nodes: int
    standbys: int
    warmth: Warmth
    max_faults: int
    window: Seconds
    max_restarts: int | None
    durable: bool
    halt_deadline: Seconds = 20.0
    form_deadline: Seconds = 120.0
    build_deadline: Seconds = 1800.0
    verdict_grace: Seconds = 1.0
    buddy_every: int = 0
    """Steps between two copies of every rank's state in shared memory, streamed to the buddy node; 0: none."""
    digest_every: int = 0
    """Steps between two comparisons of the replicas' state; 0: never."""
    node_deadline: Seconds = 600.0
    """How long a lost node's return is waited for."""
    checkpoint_every: Seconds = 0.0
    """Least time between two durable checkpoints; 0: none are written."""
    checkpoint_keep: int = 2
    """How many of the newest durable checkpoints stay."""

    @property
    def keeps_copies(self) -> bool:
        """Whether agents keep copies of the ranks' state."""
        return self.buddy_every > 0 or self.digest_every > 0

    @property
    def world(self) -> int:
        """Ranks in the whole job."""
        return self.nproc * self.nodes
