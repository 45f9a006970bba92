"""Records of a job: `events.jsonl`, written by the coordinator, and `steps.<node>.jsonl`, written by each agent.

Every line is one JSON object with `type` and the fields below. `at` is the machine's monotonic clock in seconds, `time`
(added by the writer) the wall clock. Readers give defaults to fields that an older version has not written, and skip
unknown ones; any other change raises `SCHEMA`.
"""

import msgspec

from regrow.core.ids import Generation, Instant, JobId, NodeId, Rank, Seconds, StepNo, WorkerId
from regrow.core.messages.data import BatchRecord, OrderSpec
from regrow.core.messages.state_ways import StateWay

SCHEMA = 1
"""Version of the records, raised for a new kind of line or a changed meaning of a field."""
NODE_LOST = "its node was lost"
"""`WorkerGone.reason` of workers that were lost with their node, whose agent may not have written its newest lines."""

IN_TRAINING = "in training"
"""`NodeJudged.occasion` of findings from the training itself, as opposed to an examination of the node."""


PLANNED = ("grow", "shrink", "preempt", "move")
"""Kinds of `IncidentOpened` and `IncidentClosed` that are changes of the world on purpose, not faults."""


class Record(msgspec.Struct, frozen=True, tag=True, tag_field="type"):
    """Base of all lines."""

    at: Instant


class JobStarted(Record, frozen=True):
    """The coordinator has started, and waits for its agents."""

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
    """The coordinator ordered an agent to start a worker."""

    worker: WorkerId
    node: NodeId
    role: str
    rank: Rank
    generation: Generation


class WorkerForked(Record, frozen=True):
    """The process of a worker exists."""

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
    """Worker of each rank; the keys are ranks as text."""
    training: str = ""
    """Name of the training, if the script has several."""
    began: StepNo = StepNo(0)
    """The step of the job that is step 0 of that training."""


class IncidentOpened(Record, frozen=True):
    """A fault or a change of size was noticed, and the recovery begins."""

    incident: int
    generation: Generation
    step: StepNo
    kind: str
    ranks: list[Rank]
    cause: str


class IncidentClosed(Record, frozen=True):
    """One fault, from its detection to the next committed step on every rank. Times in seconds.

    Also a change of the world without a fault (`kind` `grow`, `shrink`, `preempt`, `move`; `faults` 0): it begins with
    the first worker that stopped for it, so that `total` is the pause of the workers that stay.

    `detect`: from the fault (if its time is known) until the coordinator knows of it; `abort`: until every survivor has
    left its groups; `regroup`: until a new generation is formed, with its replacements and groups; `hydrate`: until
    every receiver has its state; `redo`: until the next step is committed on every rank.
    """

    incident: int
    generation: Generation
    step: StepNo
    kind: str
    ranks: list[Rank]
    cause: str
    rung: str
    """Way of recovery: `retry`, `standby`, `fork`, `node` (a lost node came back, or another took its ranks), `shrink`,
    `all` or `restart`; for a change without a fault `grow`, `shrink` or `node` (its ranks moved)."""
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
    """Replicas before the incident; like `after` 0 if the number of replicas did not change."""
    after: int = 0
    ways: list[StateWay] = []
    """Addresses from which receivers got their state, with the flows and the rate of each, also failed ones."""
    slowest: WorkerId | None = None
    """The replacement that took longest; None if no worker was replaced, or if this is not known."""
    stages: dict[str, Seconds] = {}
    """Stages of that replacement, in seconds, by `core.process.stage_times.STAGES`. A stage that did not happen, or
    began before the fault, is absent. They overlap the times above: it is built while survivors halt."""
    not_kept: dict[str, list[Rank]] = {}
    """Plain variables of which each rank had its own value (a sum of its losses), and the ranks that lost theirs
    by being replaced or taking another rank's state: they have that rank's values, or the script's first ones."""


class FaultInjected(Record, frozen=True):
    """An injected fault has struck its worker."""

    fault: str
    worker: WorkerId
    rank: Rank | None
    step: StepNo
    stage: str
    how: str


class Noted(Record, frozen=True):
    """An event that people should know and that has no record type of its own."""

    text: str
    worker: WorkerId | None = None


class ReplicaCorrupted(Record, frozen=True):
    """The state of a rank before `step` differed from its replicas': silent corruption, counted against its node.

    `tensors`: the first few that differed, as far as known. `on_node`: number of such findings on that node so far.
    """

    step: StepNo
    rank: Rank
    worker: WorkerId
    node: NodeId
    tensors: list[str]
    on_node: int


class NodeJudged(Record, frozen=True):
    """A judgement of a node: a `core.verdicts.HealthVerdict`, and its occasion.

    It comes from an examination that found more than `ok`; or, with the occasion `IN_TRAINING`, from the training: a
    straggler, numbers that are not finite, lines in a log. There, `ok` withdraws that source's verdicts on the device.
    """

    node: NodeId
    device: str
    severity: str
    action: str
    source: str
    evidence: str
    occasion: str = ""


class NodeQuarantined(Record, frozen=True):
    """A node has failed twice within the window, and gets no new workers. `alone`: only reported, as the only node."""

    node: NodeId
    reason: str
    alone: bool
    text: str


class ReplicasDiverged(Record, frozen=True):
    """Ranks that should have had the same state differed before `step`. Training goes on unchanged.

    `alike`: groups of ranks with the same state, the largest first. `parts`: the first few names of differing parts.
    """

    step: StepNo
    alike: list[list[Rank]]
    parts: list[str]
    text: str


class ReplacementJudged(Record, frozen=True):
    """A newcomer was compared with the rank that it would replace.

    `step`: the step of the comparison. `reason`: the difference, for people; empty: it computed the same, bit for bit.
    """

    rank: Rank
    step: StepNo
    reason: str = ""


class CheckpointSaved(Record, frozen=True):
    """A durable checkpoint of `state@step` is complete. `seconds`: since its order; training went on meanwhile."""

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
    """A request to change the world to `replicas` was refused. The job goes on with its present size."""

    replicas: int
    reason: str


class GrowthWeighed(Record, frozen=True):
    """Decision whether more replicas pay within their announced stay. `gain`, `cost`: seconds of the old world's work.

    `gain` is `(after / before - 1) * stay`; `cost` the pause at the last growth, 0 if none was measured.
    """

    before: int
    after: int
    stay: Seconds
    gain: Seconds
    cost: Seconds
    grows: bool


class WorldChanged(Record, frozen=True):
    """The next generation has a different number of replicas, or different ranks in them. `step`: its first step.

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

    `seconds`: duration of the step's body; before it the rank waited `data_wait` for its batch, and before that `stall`
    for copies of the state. `data`: its read for the step; a step of micro-batches has one record for each in `parts`.
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
        """Records of all shares that the rank has read; empty if it has not reported them."""
        return [self.data] if self.data is not None else self.parts


class OrderStated(Record, frozen=True):
    """Order of a job's samples, as one of its workers reported it. In `steps.<node>.jsonl`."""

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
