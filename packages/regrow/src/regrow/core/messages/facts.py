"""Facts, sent upwards: by workers to their agent, by agents to the coordinator, and by people."""

import msgspec

from regrow.core.ids import NO_STATE, Generation, Instant, NodeId, Rank, Seconds, StepNo, WorkerId
from regrow.core.messages.data import BatchRecord
from regrow.core.messages.replicas import OwnValues
from regrow.core.messages.state_ways import StateWay
from regrow.core.messages.trainings import FinishedTraining
from regrow.core.messages.vocabulary import ErrorReport, FaultKind, FaultSpec

# --- facts about nodes -------------------------------------------------------------------------------------------


class NodeJoined(msgspec.Struct, frozen=True, tag=True):
    """An agent registered. `slots`: number of ranks that its node can hold; `store`: address of its key-value store.

    `copy_endpoint`: address of its copy store. `domain`: failure domain of the node (a rack's name). `stay`: time that
    the node is expected to stay; None: no end is known.
    """

    node: NodeId
    host: str
    slots: int
    store: str
    pid: int = 0
    copy_endpoint: str = msgspec.field(default="", name="vault")
    domain: str = ""
    stay: Seconds | None = None


class NodeLost(msgspec.Struct, frozen=True, tag=True):
    """The connection of an agent ended without a goodbye. `silent`: time since the agent's last message."""

    node: NodeId
    reason: str
    silent: Seconds = 0.0


class NodeDraining(msgspec.Struct, frozen=True, tag=True):
    """A node will be given back: its ranks must leave it within `grace` seconds from now. `reason`: who requests it.

    When no rank of the job is left on the node, its agent is sent `StopNode`.
    """

    node: NodeId
    grace: Seconds
    reason: str


class DrainRequested(msgspec.Struct, frozen=True, tag=True):
    """A request to give a node back, which the machine may refuse; the fields are those of `NodeDraining`.

    `certain`: the node goes in any case, as its own launcher knows.
    """

    node: NodeId
    grace: Seconds
    reason: str
    certain: bool = False


class MoveRequested(msgspec.Struct, frozen=True, tag=True):
    """A request to move ranks (all of `node`, or `rank` alone) to node `to`, or to any node with room."""

    node: NodeId
    rank: Rank | None
    to: NodeId | None
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

    `state_at`: the step of its state. `layout`: digest of its reduction layout and state names. `holding`: the shards
    that it has, equal on replicas. `sharded`: the script gives ranks different parts of the state. `microbatches`: the
    number of micro-batches of a step, beyond which more replicas are of no use; 0: steps are not divided. `fixed`: why
    this script's world cannot change its size; empty: it can. `between`: the script has functions marked
    `@regrow.restartable` that may run between its steps. `parts`: digests of parts of the state, by name, if the worker
    begins with the state that the script built. `early`: rank-dependent values that the script read before its loop
    (`core.early_reads.PlaceInWorld`), and where. `imported`: on rank 0, the installed modules that the script has
    imported so far, in order. `environment`: the variables that it has changed. `whole_body`: its bodies compute after
    their first update, and are rolled back as a whole. `refused`: steps of durable checkpoints that it could not read,
    and why; with `NO_STATE` it could read none. `unprovable`: why nothing of this script can be compared in a shadow;
    empty: it can. `devices_taken`: it uses a device, and its node has no more devices than ranks. `training`: name of
    the training that its script has reached, if it has several. `stages`: seconds of each of its stages so far, by
    `core.process.stage_times`.
    """

    worker: WorkerId
    state_at: StepNo
    endpoint: str
    layout: str
    built_s: Seconds = 0.0
    holding: str = ""
    sharded: bool = False
    microbatches: int = 0
    fixed: str = ""
    between: bool = False
    early: dict[str, str] = {}
    whole_body: bool = False
    parts: dict[str, int] = {}
    imported: list[str] = []
    environment: list[str] = []
    refused: dict[StepNo, str] = {}
    unprovable: str = ""
    devices_taken: bool = False
    training: str = ""
    stages: dict[str, Seconds] = {}


class ModulesImported(msgspec.Struct, frozen=True, tag=True):
    """An `imports` standby has imported the modules that it was ordered to import.

    `unfit`: a package that cannot be imported, or that it should not have imported because that package reads values
    that the script may change first; this worker is then useless. `why`: for people.
    """

    worker: WorkerId
    unfit: str = ""
    why: str = ""


class WorkerNoted(msgspec.Struct, frozen=True, tag=True):
    """The worker noticed something about its script that people should know; recorded once, however many send it.

    `doubts`: the result is therefore no longer proven to equal that of a run without faults.
    """

    worker: WorkerId
    text: str
    doubts: bool = False


class WorkerFaulted(msgspec.Struct, frozen=True, tag=True):
    """The worker saw an exception in its step and waits for a decision. A `kind` of `collective` is only a symptom."""

    worker: WorkerId
    generation: Generation
    step: StepNo
    kind: FaultKind
    error: ErrorReport


class WorkerHalted(msgspec.Struct, frozen=True, tag=True):
    """The worker no longer uses its groups of this generation; its state is at `state_at` and stays there.

    After a planned halt `state_at` is the step that was ordered, and the groups exist until the next order.
    `ready`: it has all it needs for the update of that step, and applies it if the next generation starts after it.
    `restart_index`: number, from 1, of the restartable function after its last step that it runs, or may run next; 0:
    none. `verified`: the step of the state on which all replicas agreed last, if the worker has a copy of that state.
    `whole_body`: it rolls a body back with its updates. `step`: the step in whose update its state was torn.
    `stands`: its script waits for the next generation. If another thread sent this fact before, it is sent again then.
    `left`: as in `WorkerExited`; its agent adds it.
    """

    worker: WorkerId
    generation: Generation
    state_at: StepNo
    ready: bool = False
    restart_index: int = msgspec.field(default=0, name="inside")
    verified: StepNo = NO_STATE
    whole_body: bool = False
    step: StepNo = NO_STATE
    stands: bool = True
    left: list[OwnValues] = []


class HaltMissed(msgspec.Struct, frozen=True, tag=True):
    """The worker had already begun step `step` when it was ordered to stop before step `at`, and goes on with it."""

    worker: WorkerId
    generation: Generation
    at: StepNo
    step: StepNo


class WorkerResumed(msgspec.Struct, frozen=True, tag=True):
    """The worker has formed its groups in the new generation, and has that generation's state.

    `ways`: addresses over which the state came. `at`: time on the node's monotonic clock; 0: not reported.
    `unlike`: plain variables that differ among the ranks that gave the state; None: the state is the rank's own.
    `kept`: those of these variables that still have the values that this rank had before.
    """

    worker: WorkerId
    generation: Generation
    form_s: Seconds = 0.0
    hydrate_s: Seconds = 0.0
    hydrated_bytes: int = 0
    ways: list[StateWay] = []
    at: Instant = 0.0
    unlike: list[str] | None = None
    kept: list[str] = []


class WorkerCommitted(msgspec.Struct, frozen=True, tag=True):
    """The worker's state went from `step` to `step + 1`. `at`: time on the node's monotonic clock.

    `data`: record of its read for the step; in a step of micro-batches `parts` has one record for each of these.
    `rank`: the worker's rank in that step; it may have another by now. `data_wait`, `stall`: as in `StepCommitted`.
    `own`: time waiting for its batch, plus time in the body up to the update without waiting for others; 0: unknown.
    """

    worker: WorkerId
    generation: Generation
    step: StepNo
    at: Instant
    seconds: Seconds
    metrics: dict[str, float] = {}
    samples: int = 0
    adopted: bool = False
    data: BatchRecord | None = None
    parts: list[BatchRecord] = []
    rank: Rank | None = None
    data_wait: Seconds = 0.0
    stall: Seconds = 0.0
    own: Seconds = 0.0


class WorkerStaged(msgspec.Struct, frozen=True, tag=True):
    """Metrics of a step that the worker has not reported as committed.

    They count if the step is committed and this worker never reports it, because it dies in its update, or while its
    device still executes steps that the host has committed. `data`, `parts`: as in `WorkerCommitted`. `untold`: the
    worker has committed the step.
    """

    worker: WorkerId
    generation: Generation
    step: StepNo
    metrics: dict[str, float]
    parts: list[BatchRecord] = []
    data: BatchRecord | None = None
    untold: bool = False


class WorkerFinished(msgspec.Struct, frozen=True, tag=True):
    """The worker has no step left to run, and waits to be released; until then it can give its state.

    `goes_on`: faults after its loop are recovered too, and it will finish a second time, at the script's end.
    `training`: the training that ends here, if the script has another one after it.
    """

    worker: WorkerId
    generation: Generation
    state_at: StepNo
    goes_on: bool = False
    training: FinishedTraining | None = None


class WorkerFailed(msgspec.Struct, frozen=True, tag=True):
    """The script ended with an exception outside any step. `WorkerExited` follows.

    `own`: nothing around the script had failed, so that the error is the script's own; else another worker's fault may
    have caused it.
    """

    worker: WorkerId
    error: ErrorReport
    step: StepNo
    own: bool = False


class ScriptReturned(msgspec.Struct, frozen=True, tag=True):
    """The script's last line has run without an error. `threads`: names of threads that keep the process alive."""

    worker: WorkerId
    threads: list[str] = []


class ScriptEnded(msgspec.Struct, frozen=True, tag=True):
    """The script and its exit handlers have ended without an error: only Python's own shutdown follows."""

    worker: WorkerId


class WorkerExited(msgspec.Struct, frozen=True, tag=True):
    """The worker's process has ended. `code`: exit code, or minus the signal's number. `at`: when the agent noticed.

    `memory`: the kernel ended it, or another process here at that time, because memory had run out.
    `left`: the rank's own values in its last steps, if ranks have different values.
    """

    worker: WorkerId
    code: int
    at: Instant
    memory: bool = False
    left: list[OwnValues] = []


class FaultFired(msgspec.Struct, frozen=True, tag=True):
    """An injected fault is about to strike; sent by the worker that it strikes."""

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
    """A signal or an operator asks the job to end.

    `patience`: longest time that the job may use to save its state first; 0: end at once.
    """

    reason: str
    patience: Seconds = 0.0


class FaultRequested(msgspec.Struct, frozen=True, tag=True):
    """`regrow kill`: make one worker fail."""

    fault: FaultSpec


class ScaleRequested(msgspec.Struct, frozen=True, tag=True):
    """`regrow scale`: change the job to `replicas`, or to the replicas that make up `ranks` if that is given.

    `stay`: time that the capacity is expected to stay; None: no end is known.
    """

    replicas: int
    reason: str
    stay: Seconds | None = None
    ranks: int | None = None


class TimeAdvanced(msgspec.Struct, frozen=True, tag=True):
    """A deadline may have passed."""
