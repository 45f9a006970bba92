"""Records of a job: `events.jsonl` by the coordinator, `steps.<node>.jsonl` by each agent.

Every line is one JSON object with `type` and the fields below. `at` is the machine's monotonic clock in seconds, `time`
(added by the writer) the wall clock. Readers give defaults to fields that an older version has not written, and skip
unknown ones; any other change raises `SCHEMA`.
"""

import msgspec

from regrow.core.ids import Generation, Instant, JobId, NodeId, Rank, Seconds, StepNo, WorkerId
from regrow.core.messages.data import BatchRecord, OrderSpec
from regrow.core.messages.state_ways import StateWay

SCHEMA = 1
"""Version of the records. It rises with a new kind of line, or when a field changes its meaning."""
NODE_LOST = "its node was lost"
"""`WorkerGone.reason` of workers that were lost with their node: their agent may not have written its newest lines."""

IN_TRAINING = "in training"
"""`NodeJudged.occasion` of findings from the training itself, not from an examination of the node."""


PLANNED = ("grow", "shrink", "preempt", "move")
"""Kinds of `IncidentOpened` and `IncidentClosed` that are changes of the world on purpose, not faults."""


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
    """Version of all records of the job."""
    local: bool = False
    """True if all nodes are on this machine, so that it waits for no other at its start."""


class WorkerSpawned(Record, frozen=True):
    """The coordinator ordered a worker from an agent."""

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
    """Every rank runs in the new generation, with `state@step`."""

    generation: Generation
    step: StepNo
    workers: dict[str, WorkerId]
    """Rank (as text) to worker."""
    training: str = ""
    """Name of the training, where the script has several."""
    began: StepNo = StepNo(0)
    """The step of the job that is step 0 of that training."""


class IncidentOpened(Record, frozen=True):
    """Something went wrong; the recovery begins."""

    incident: int
    generation: Generation
    step: StepNo
    kind: str
    ranks: list[Rank]
    cause: str


class IncidentClosed(Record, frozen=True):
    """One fault from detection to the next committed step on every rank. Times in seconds.

    Also a change of the world without a fault (`kind` `grow`, `shrink`, `preempt`, `move`; `faults` 0): it begins with
    the first worker that stopped for it, so that `total` is the pause of the workers that stay.

    `detect`: from the fault (if its time is known) until the coordinator knows of it; `abort`: until every survivor is
    out of its groups; `regroup`: until a new generation is formed, with its replacements and groups; `hydrate`: until
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
    `restart`; for a change of the world without a fault `grow`, `shrink`, or `node` (its ranks moved)."""
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
    """Replicas before and after; both 0 if their number did not change."""
    after: int = 0
    ways: list[StateWay] = []
    """Addresses over which receivers got their state, with the flows and the rate of each; failed ones too."""
    slowest: WorkerId | None = None
    """The replacement that took longest; None if nobody was replaced, or this is not known."""
    stages: dict[str, Seconds] = {}
    """Stages of that replacement, by `core.process.stage_times.STAGES`, as it measured them. A stage that did not
    happen, or began before the fault, is absent. They overlap the times above: it is built while survivors halt."""
    not_kept: dict[str, list[Rank]] = {}
    """Plain variables of which each rank had a value of its own (a running sum of its losses), and the ranks that were
    replaced, or took another rank's state, without theirs: they have another rank's values, or the script's first."""


class FaultInjected(Record, frozen=True):
    """An injected fault has struck."""

    fault: str
    worker: WorkerId
    rank: Rank | None
    step: StepNo
    stage: str
    how: str


class Noted(Record, frozen=True):
    """An event worth a line that has no record of its own."""

    text: str
    worker: WorkerId | None = None


class ReplicaCorrupted(Record, frozen=True):
    """The state of a rank before `step` differed from its replicas': silent corruption, counted against its node.

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

    It comes from an examination, unless that was `ok`; or, with the occasion `IN_TRAINING`, from the work: a straggler,
    numbers that are not finite, lines in a log. There `ok` withdraws the verdicts of the same source on the device.
    """

    node: NodeId
    device: str
    severity: str
    action: str
    source: str
    evidence: str
    occasion: str = ""


class NodeQuarantined(Record, frozen=True):
    """A node has failed twice within the window: no new workers there. `alone`: only reported, it is the only node."""

    node: NodeId
    reason: str
    alone: bool
    text: str


class ReplicasDiverged(Record, frozen=True):
    """Ranks that should have had the same state differed before `step`. Training goes on as it is.

    `alike`: groups of ranks with the same state, the largest first. `parts`: the first names of what differs.
    """

    step: StepNo
    alike: list[list[Rank]]
    parts: list[str]
    text: str


class ReplacementJudged(Record, frozen=True):
    """A newcomer was compared with the rank that it would replace.

    `step`: of the comparison. `reason`: why it is not equal, for people; empty: it computed the same, bit for bit.
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
    """A copy of a rank's state has reached the node's buddy, in `seconds`; not every copy is recorded."""

    node: NodeId
    buddy: NodeId
    rank: Rank
    step: StepNo
    nbytes: int
    seconds: Seconds
    every: int
    """Steps between two copies."""


class ScaleRefused(Record, frozen=True):
    """A change of the world to `replicas` was requested and refused. The job goes on as it was."""

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
    `restart`, `start` (requested before the first step).
    """

    generation: Generation
    step: StepNo
    kind: str
    before: int
    after: int
    reason: str


class JobEnded(Record, frozen=True):
    """The job has ended. `code` is the exit code; `diagnosis` explains what went wrong, empty if nothing did."""

    code: int
    diagnosis: str


class StepCommitted(Record, frozen=True):
    """One rank's state went from `step` to `step + 1`. In `steps.<node>.jsonl`.

    `seconds`: duration of its body; before that the rank waited `data_wait` for its batch, and before that `stall` for
    copies of the state. `data`: its read for the step; in a step of micro-batches `parts` has one record for each.
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
        """All shares that the rank has read; empty if it has not reported them."""
        return [self.data] if self.data is not None else self.parts


class OrderStated(Record, frozen=True):
    """Order of the samples of a job, as one of its workers reported it. In `steps.<node>.jsonl`."""

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
