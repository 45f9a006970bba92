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
    """An agent registered. `slots`: how many ranks it can hold; `store`: where its keys can be read and written.

    `copy_endpoint`: where copies of state can be left and fetched. `domain`: what fails with this node (a rack's name).
    `stay`: how long the node is expected to be there; None: nothing is known of an end.
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
    """An agent's connection ended without a goodbye. `silent`: time since the last message from it."""

    node: NodeId
    reason: str
    silent: Seconds = 0.0


class NodeDraining(msgspec.Struct, frozen=True, tag=True):
    """A node is to be given back: its ranks are to leave it within `grace` seconds from now. `reason`: who asks.

    When nobody of the job is left on it, its agent is sent `StopNode`.
    """

    node: NodeId
    grace: Seconds
    reason: str


class DrainRequested(msgspec.Struct, frozen=True, tag=True):
    """Somebody asks for a node back, as `NodeDraining`; the machine may refuse.

    `certain`: the node goes in any case, as its own launcher has heard.
    """

    node: NodeId
    grace: Seconds
    reason: str
    certain: bool = False


class MoveRequested(msgspec.Struct, frozen=True, tag=True):
    """Somebody asks that ranks go on elsewhere: all of `node`, or `rank` alone, to node `to` or where there is room."""

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

    `state_at`: the step its state stands at. `layout`: digest of its reduction layout and state names. `holding`: which
    shards it has, equal on replicas. `sharded`: the script gives ranks different parts of the state.
    `microbatches`: into how many the script divides a step, so no more replicas than that are of use; 0: into none.
    `fixed`: why the world of this script can have no other size; empty: it can.
    `between`: the script has functions marked `@regrow.restartable` that may run between its steps.
    `parts`: digests of parts of the state, by name, where it was built by the script and counts.
    `early`: what the script has asked of its place before its loop, by `core.early_reads.Place`, and where.
    `imported`: the installed modules that the script has imported by then, in order, if this is rank 0; `environment`:
    the variables that it has changed.
    `whole_body`: its bodies compute after their first update, and are given up as a whole.
    `refused`: steps of durable checkpoints that it could not read, and why; with `NO_STATE` it could read none at all.
    `unprovable`: why nothing of this script can be compared in a shadow; empty: it can.
    `devices_taken`: it uses a device, and its node has no more of them than ranks.
    `training`: name of the training that its script has come to, where it has several.
    `stages`: seconds of each of its stages so far, by `core.process.stage_times`.
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
    """An `imports` standby has imported what it was ordered to.

    `unfit`: a package that it should not have, since it asks for what the script may change first, or cannot be
    imported; then this worker is of no use. `why`: for people.
    """

    worker: WorkerId
    unfit: str = ""
    why: str = ""


class WorkerNoted(msgspec.Struct, frozen=True, tag=True):
    """The worker has seen something of its script that people should know; said once, whoever says it.

    `doubts`: so that the result is not proven any more to be that of a run without faults.
    """

    worker: WorkerId
    text: str
    doubts: bool = False


class WorkerFaulted(msgspec.Struct, frozen=True, tag=True):
    """The worker saw an exception in its step and waits for a verdict. `collective`: a symptom, not a cause."""

    worker: WorkerId
    generation: Generation
    step: StepNo
    kind: FaultKind
    error: ErrorReport


class WorkerHalted(msgspec.Struct, frozen=True, tag=True):
    """The worker uses its groups of this generation no more; its state stands at `state_at` and stays there.

    After a planned halt `state_at` is the step that was ordered, and the groups stand until the next order.
    `ready`: it has all it needs for the update of that step, and applies it if the next generation starts after it.
    `restart_index`: which restartable function after its last step it is in, or may run next, from 1; 0: none any more.
    `verified`: the step of the state upon which all replicas agreed last, where it has a copy of that.
    `whole_body`: it gives a body up with its updates. `step`: in the middle of which update its state was torn.
    `stands`: its script waits for the next generation. Where another thread said this first it is told again then.
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
    """The worker had begun step `step` already when it was told to stop before step `at`, and goes on with it."""

    worker: WorkerId
    generation: Generation
    at: StepNo
    step: StepNo


class WorkerResumed(msgspec.Struct, frozen=True, tag=True):
    """The worker's groups stand in the new generation and its state is that generation's.

    `ways`: addresses over which the state came. `at`: when, on the node's monotonic clock; 0: not told.
    `unlike`: plain variables that those do not have alike who have given the state; None: it is the rank's own.
    `kept`: those that it has as the rank had them before.
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
    """The worker's state went from `step` to `step + 1`. `at`: when, on the node's monotonic clock.

    `data`: what it has read for the step; in a step of micro-batches `parts`, a record for each of its own.
    `rank`: its own in that step; it may have another by now. `data_wait`, `stall`: as in `StepCommitted`.
    `own`: what it has waited for its batch, and what its body took up to the update while it waited for nobody; 0: not
    known.
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
    """Metrics of a step of which the worker has not said that it has committed it.

    They count if the step is committed and this worker never says so: it dies in its update, or while its device still
    has to do what the host has committed. `data`, `parts`: as in `WorkerCommitted`. `untold`: it has committed it.
    """

    worker: WorkerId
    generation: Generation
    step: StepNo
    metrics: dict[str, float]
    parts: list[BatchRecord] = []
    data: BatchRecord | None = None
    untold: bool = False


class WorkerFinished(msgspec.Struct, frozen=True, tag=True):
    """The worker has no step left to run and waits to be released, still able to give its state.

    `goes_on`: what its script does behind its loop is mended too, and it will finish a second time, at its end.
    `training`: that end is one of a training after which the script has another.
    """

    worker: WorkerId
    generation: Generation
    state_at: StepNo
    goes_on: bool = False
    training: FinishedTraining | None = None


class WorkerFailed(msgspec.Struct, frozen=True, tag=True):
    """The script ended with an exception outside any step. The exit follows.

    `own`: nothing had failed around it, so it is the script's own error; else it may be another's fault.
    """

    worker: WorkerId
    error: ErrorReport
    step: StepNo
    own: bool = False


class ScriptReturned(msgspec.Struct, frozen=True, tag=True):
    """The script's last line is done, without an error. `threads`: those that keep the process, by name."""

    worker: WorkerId
    threads: list[str] = []


class ScriptEnded(msgspec.Struct, frozen=True, tag=True):
    """The script has come to its end without an error, its exit handlers too: what follows is Python's own."""

    worker: WorkerId


class WorkerExited(msgspec.Struct, frozen=True, tag=True):
    """The process is gone. `code`: its exit code, or minus the signal that ended it. `at`: when the agent saw it.

    `memory`: the kernel ended it, or another process here at that time, because memory had run out.
    `left`: what it had of its own in its last steps, where ranks have different values.
    """

    worker: WorkerId
    code: int
    at: Instant
    memory: bool = False
    left: list[OwnValues] = []


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
    """A signal or an operator asks the job to end.

    `patience`: how long that may take, where the state can be saved before; 0: at once.
    """

    reason: str
    patience: Seconds = 0.0


class FaultRequested(msgspec.Struct, frozen=True, tag=True):
    """`regrow kill`: let one worker fail."""

    fault: FaultSpec


class ScaleRequested(msgspec.Struct, frozen=True, tag=True):
    """`regrow scale`: the job shall have `replicas`, or the replicas that make up `ranks` where that is given.

    `stay`: how long the capacity is expected to be there; None: nothing is known of an end.
    """

    replicas: int
    reason: str
    stay: Seconds | None = None
    ranks: int | None = None


class TimeAdvanced(msgspec.Struct, frozen=True, tag=True):
    """A deadline may have passed."""
