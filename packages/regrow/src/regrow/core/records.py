"""Records of a job: `events.jsonl` by the coordinator, `steps.<node>.jsonl` by each agent.

Every line is one JSON object with `type` and the fields below. `at` is the machine's monotonic clock in seconds, `time`
(added by the writer) the wall clock. Readers give fields that an older version has not written their defaults, and skip
those that they do not know; changes beyond that are marked by `SCHEMA`.
"""

import msgspec

from regrow.core.ids import Generation, Instant, JobId, NodeId, Rank, Seconds, StepNo, WorkerId
from regrow.core.messages.data import BatchRecord, OrderSpec
from regrow.core.messages.state_ways import StateWay

SCHEMA = 1
"""Version of the records. It rises with a new kind of line, or when a field changes its meaning."""
NODE_LOST = "its node was lost"
"""`WorkerGone.reason` of workers that went with their node: their agent may not have written its newest lines."""

IN_TRAINING = "in training"
"""`NodeJudged.occasion` of what is seen of the work on a node, not by an examination."""


class Record(msgspec.Struct, frozen=True, tag=True, tag_field="type"):
    """Base of all lines."""

    at: Instant


class JobStarted(Record, frozen=True):
    """The coordinator is up and waits for its agents."""

    job: JobId
    world: int
    nodes: int
    standbys: int
    command: list[str]
    schema: int = SCHEMA
    """Of all records of the job."""


class WorkerSpawned(Record, frozen=True):
    """A worker was ordered from an agent."""

    worker: WorkerId
    node: NodeId
    role: str
    rank: Rank
    generation: Generation


class WorkerForked(Record, frozen=True):
    """The worker's process exists."""

    worker: WorkerId
    pid: int


class WorkerBuilt(Record, frozen=True):
    """A worker reached `session.steps`."""

    worker: WorkerId
    seconds: Seconds


class WorkerGone(Record, frozen=True):
    """A worker's process ended."""

    worker: WorkerId
    rank: Rank | None
    code: int
    reason: str


class GenerationFormed(Record, frozen=True):
    """Every member runs in the new generation, with `state@step`."""

    generation: Generation
    step: StepNo
    workers: dict[str, WorkerId]
    """Rank (as text) to worker."""
    training: str = ""
    """Name of the training, where the script has several."""
    began: StepNo = StepNo(0)
    """The step of the job that is step 0 of that training."""


class IncidentOpened(Record, frozen=True):
    """Something went wrong; the world is being mended."""

    incident: int
    generation: Generation
    step: StepNo
    kind: str
    ranks: list[Rank]
    cause: str


class IncidentClosed(Record, frozen=True):
    """One fault from detection to the next committed step on every rank. Times in seconds.

    Also a change of the world without a fault (`kind` `grow`, `shrink`, `preempt`, `move`; `faults` 0): from the first
    worker that stopped for it, so that `total` is the pause of those who stay.

    `detect`: from the fault (where its time is known) to the coordinator's knowing; `abort`: until every survivor is
    out of its groups; `regroup`: until a new membership stands, replacements and new groups included; `hydrate`: until
    every receiver has its state; `redo`: until the next step is committed on every rank.
    """

    incident: int
    generation: Generation
    step: StepNo
    kind: str
    ranks: list[Rank]
    cause: str
    rung: str
    """`retry`, `standby`, `fork`, `node` (a lost node came back, or another took its ranks), `shrink`, `all` or
    `restart`; of a change of the world without a fault `grow`, `shrink`, or `node` (its ranks moved)."""
    faults: int
    detect: Seconds
    abort: Seconds
    regroup: Seconds
    hydrate: Seconds
    redo: Seconds
    total: Seconds
    steps_lost: int
    hydrated_bytes: int
    opened_at: Instant
    fault_at: Instant
    before: int = 0
    """Replicas before and after; both 0 where their number did not change."""
    after: int = 0
    ways: list[StateWay] = []
    """Addresses over which receivers got their state, with the flows and the rate of each; failed ones too."""
    slowest: WorkerId | None = None
    """Replacement that took longest in all; None where nobody was replaced, or this is not known."""
    stages: dict[str, Seconds] = {}
    """Its stages, by `core.process.stage_times.STAGES`, as it has measured them; one that did not happen, or began
    before the fault, is absent. They overlap with those above: a replacement is built while survivors halt."""
    not_kept: dict[str, list[Rank]] = {}
    """Plain variables of which each rank had a value of its own (a running sum of its losses), and the ranks that were
    replaced, or came to a state of others, without theirs: they have another's, or those of the script's start."""


class FaultInjected(Record, frozen=True):
    """A fault on demand struck."""

    fault: str
    worker: WorkerId
    rank: Rank | None
    step: StepNo
    stage: str
    how: str


class Noted(Record, frozen=True):
    """Something worth a line that is none of the others."""

    text: str
    worker: WorkerId | None = None


class ReplicaCorrupted(Record, frozen=True):
    """The state of a rank before `step` was not that of its replicas: silent corruption, counted against its node.

    `tensors`: the first of those that differed, as far as known. `on_node`: how often that node was counted so far.
    """

    step: StepNo
    rank: Rank
    worker: WorkerId
    node: NodeId
    tensors: list[str]
    on_node: int


class NodeJudged(Record, frozen=True):
    """Judgement of a node: a `core.verdicts.HealthVerdict`, and its occasion.

    Of an examination, unless it is `ok`; or, with the occasion `IN_TRAINING`, of the work there: a straggler, numbers
    that are not finite, lines in a log. Then `ok` withdraws what its source has said of the device.
    """

    node: NodeId
    device: str
    severity: str
    action: str
    source: str
    evidence: str
    occasion: str = ""


class NodeQuarantined(Record, frozen=True):
    """A node has failed twice within the window: no new workers there. `alone`: only told, for want of other nodes."""

    node: NodeId
    reason: str
    alone: bool
    text: str


class ReplicasDiverged(Record, frozen=True):
    """Ranks that should have the same state had not, before `step`. Training goes on as it is.

    `alike`: the ranks with the same, the largest group first. `parts`: the first names of what differs.
    """

    step: StepNo
    alike: list[list[Rank]]
    parts: list[str]
    text: str


class ReplacementJudged(Record, frozen=True):
    """A newcomer was compared with the rank that it would replace.

    `step`: at which. `reason`: why it is not equal, for people; empty: it has computed the same, bit for bit.
    """

    rank: Rank
    step: StepNo
    reason: str = ""


class CheckpointSaved(Record, frozen=True):
    """A durable checkpoint of `state@step` is complete. `seconds`: since it was ordered; training went on meanwhile."""

    step: StepNo
    folder: str
    nbytes: int
    seconds: Seconds


class CopyStreamed(Record, frozen=True):
    """A copy of a rank's state has reached the node's buddy, in `seconds`; not every one is written down."""

    node: NodeId
    buddy: NodeId
    rank: Rank
    step: StepNo
    nbytes: int
    seconds: Seconds
    every: int
    """Steps between two copies."""


class ScaleRefused(Record, frozen=True):
    """A change of the world to `replicas` was asked for and is not done. The job goes on as it was."""

    replicas: int
    reason: str


class GrowthWeighed(Record, frozen=True):
    """Decision whether more replicas pay within the announced stay. `gain`, `cost`: seconds of work of the world now.

    `gain` is `(after / before - 1) * stay`; `cost` the pause at the last growth, 0 if none was measured.
    """

    before: int
    after: int
    stay: Seconds
    gain: Seconds
    cost: Seconds
    grows: bool


class WorldChanged(Record, frozen=True):
    """The next generation has another number of replicas, or others in them. `step`: the first that it runs.

    `kind`: `grow`, `shrink`, `preempt` (a node is given back), `move`, `fault` (nothing could fill a lost rank),
    `restart`, `start` (asked for before the first step).
    """

    generation: Generation
    step: StepNo
    kind: str
    before: int
    after: int
    reason: str


class JobEnded(Record, frozen=True):
    """The end. `code` is the exit code; `diagnosis` says in one text what happened, empty when all went well."""

    code: int
    diagnosis: str


class StepCommitted(Record, frozen=True):
    """One rank's state went from `step` to `step + 1`. In `steps.<node>.jsonl`.

    `seconds`: of its body; before that it waited `data_wait` for its batch, and before that `stall` for copies of the
    state. `data`: what it has read for the step; in a step of micro-batches `parts`, a record for each of its own.
    """

    step: StepNo
    rank: Rank
    worker: WorkerId
    generation: Generation
    seconds: Seconds
    metrics: dict[str, float]
    samples: int = 0
    adopted: bool = False
    data: BatchRecord | None = None
    parts: list[BatchRecord] = []
    data_wait: Seconds = 0.0
    stall: Seconds = 0.0

    @property
    def reads(self) -> list[BatchRecord]:
        """All shares that it has read; empty where nobody has said so."""
        return [self.data] if self.data is not None else self.parts


class OrderStated(Record, frozen=True):
    """In which order the samples of a job come, as one of its workers said. In `steps.<node>.jsonl`."""

    rank: Rank
    worker: WorkerId
    order: OrderSpec


AnyRecord = (
    JobStarted
    | WorkerSpawned
    | WorkerForked
    | WorkerBuilt
    | WorkerGone
    | GenerationFormed
    | IncidentOpened
    | IncidentClosed
    | FaultInjected
    | Noted
    | ReplicaCorrupted
    | ReplacementJudged
    | ReplicasDiverged
    | NodeJudged
    | NodeQuarantined
    | CheckpointSaved
    | CopyStreamed
    | ScaleRefused
    | GrowthWeighed
    | WorldChanged
    | JobEnded
    | StepCommitted
    | OrderStated
)
