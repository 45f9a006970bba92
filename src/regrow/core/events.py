"""What is written down about a job: `events.jsonl` by the coordinator, `steps.<node>.jsonl` by each agent.

Every line is one JSON object with `type` and the fields below. `at` is the machine's monotonic clock in seconds,
`time` (added by the writer) the wall clock.
"""

import msgspec

from regrow.core.data_messages import BatchRecord, OrderSpec
from regrow.core.ids import Generation, Instant, JobId, NodeId, Rank, Seconds, StepNo, WorkerId

NODE_LOST = "its node was lost"
"""`WorkerGone.reason` of workers that went with their node: their agent may not have written its newest lines."""


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
    """`retry`, `standby`, `fork`, `node` (a lost node came back), `restart`."""
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


class CheckpointSaved(Record, frozen=True):
    """A durable checkpoint of `state@step` is complete. `seconds`: since it was ordered; training went on meanwhile."""

    step: StepNo
    folder: str
    nbytes: int
    seconds: Seconds


class CopyStreamed(Record, frozen=True):
    """A copy of a rank's state has reached the node's buddy, in so many seconds; not every one is written down."""

    node: NodeId
    buddy: NodeId
    rank: Rank
    step: StepNo
    nbytes: int
    seconds: Seconds
    every: int
    """Steps between two copies."""


class JobEnded(Record, frozen=True):
    """The end. `code` is the exit code; `diagnosis` says in one text what happened, empty when all went well."""

    code: int
    diagnosis: str


class StepCommitted(Record, frozen=True):
    """One rank's state went from `step` to `step + 1`. In `steps.<node>.jsonl`."""

    step: StepNo
    rank: Rank
    worker: WorkerId
    generation: Generation
    seconds: Seconds
    metrics: dict[str, float]
    samples: int = 0
    adopted: bool = False
    data: BatchRecord | None = None


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
    | CheckpointSaved
    | CopyStreamed
    | JobEnded
    | StepCommitted
    | OrderStated
)
