"""What coordinator, agents and workers say to one another.

Facts are past tense, orders imperative. A fact about a worker names it; an order to a worker is routed by its agent.
Every message of a generation carries its number, and is dropped where that number is not the current one.
"""

from enum import StrEnum

import msgspec

from regrow.core.ids import Generation, Instant, JobId, NodeId, Rank, Seconds, StepNo, WorkerId


class FaultStage(StrEnum):
    """Where in a step (or in a recovery) an injected fault strikes."""

    NOW = "now"
    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCE = "reduce"
    UPDATE = "update"
    COMMIT = "commit"
    FORM = "form"
    HYDRATE = "hydrate"


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
    OOM_LIKE = "oom-like"


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
    """A worker's place in a generation, and where its state can be read."""

    rank: Rank
    worker: WorkerId
    node: NodeId
    local_rank: int
    endpoint: str


# --- facts about nodes -------------------------------------------------------------------------------------------


class NodeJoined(msgspec.Struct, frozen=True, tag=True):
    """An agent registered. `slots`: how many ranks it can hold; `store`: where its keys can be read and written."""

    node: NodeId
    host: str
    slots: int
    store: str
    pid: int = 0


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

    `state_at`: the step its state stands at. `layout`: digest of its reduction layout and state names.
    """

    worker: WorkerId
    state_at: StepNo
    endpoint: str
    layout: str
    built_s: Seconds = 0.0


class WorkerFaulted(msgspec.Struct, frozen=True, tag=True):
    """The worker saw an exception in its step and waits for a verdict. `collective`: a symptom, not a cause."""

    worker: WorkerId
    generation: Generation
    step: StepNo
    kind: FaultKind
    error: ErrorReport


class WorkerHalted(msgspec.Struct, frozen=True, tag=True):
    """The worker uses its groups of this generation no more; its state stands at `state_at` and stays there."""

    worker: WorkerId
    generation: Generation
    state_at: StepNo


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
    """Fork a worker. `rank`: its place, provisional for a standby. `store`: where the generation's keys live."""

    node: NodeId
    worker: WorkerId
    role: Role
    rank: Rank
    local_rank: int
    world: int
    generation: Generation
    store: str
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
    """The new membership. Who is not in `holders` receives `state@step` from those who are."""

    worker: WorkerId
    generation: Generation
    rank: Rank
    local_rank: int
    step: StepNo
    members: list[Member]
    holders: list[Rank]
    store: str
    faults: list[FaultSpec] = []


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
)
"""What a worker tells its agent."""

WorkerOrder = StartScript | HaltGeneration | FormGeneration | ReleaseWorker | ArmFault
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
)
"""What an agent tells the coordinator."""

AgentOrder = (
    SpawnWorker | FenceWorker | StopNode | StartScript | HaltGeneration | FormGeneration | ReleaseWorker | ArmFault
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

    @property
    def world(self) -> int:
        """Ranks in the whole job."""
        return self.nproc * self.nodes
