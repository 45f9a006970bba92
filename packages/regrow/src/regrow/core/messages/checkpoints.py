"""Messages about durable checkpoints: a worker's copy in shared memory, parts on disk, the manifest over them.

    TakeSnapshot → SnapshotForDisk → SnapshotHeld → WriteCheckpoint → PartsWritten
      → FinishCheckpoint → CheckpointWritten

Each checkpoint has a number of its own, `attempt`; answers to an earlier one are dropped.
"""

import msgspec

from regrow.core.ids import NodeId, Rank, Seconds, StepNo, WorkerId
from regrow.core.messages.lineage import NOBODY, Lineage


class SnapshotForDisk(msgspec.Struct, frozen=True, tag=True):
    """A worker to its agent: its `state@step` stands in its shared memory `descriptor`, for a durable checkpoint.

    `asked`: the step of the `TakeSnapshot` that this answers; the worker may have been past it already.
    """

    worker: WorkerId
    rank: Rank
    holding: str
    asked: StepNo
    step: StepNo
    descriptor: int
    nbytes: int
    error: str = ""
    """Why there is no snapshot."""


class SnapshotHeld(msgspec.Struct, frozen=True, tag=True):
    """An agent to the coordinator: it can write this rank's `state@step`, whatever becomes of the worker."""

    worker: WorkerId
    asked: StepNo
    step: StepNo
    error: str = ""


class WriteCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """Write the parts of these ranks, from the snapshots that this node holds."""

    node: NodeId
    attempt: int
    step: StepNo
    ranks: list[Rank]
    last: bool = False
    """The job ends behind it: where the disk is full, older checkpoints of this training make room."""


class PartsWritten(msgspec.Struct, frozen=True, tag=True):
    """The parts of this node's ranks are on disk. `removed`: the older checkpoints that have made room for them."""

    node: NodeId
    attempt: int
    step: StepNo
    ranks: list[Rank]
    nbytes: int
    seconds: Seconds
    removed: list[str] = []


class FinishCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """All parts are on disk: write what connects them, give the folder its name, remove all but the newest `keep`.

    `refused`: steps of older ones that could not be read, and are none of those.
    """

    node: NodeId
    attempt: int
    step: StepNo
    ranks: list[Rank]
    keep: int
    refused: list[StepNo] = []
    last: bool = False


class CheckpointWritten(msgspec.Struct, frozen=True, tag=True):
    """The checkpoint is complete. `nbytes`: of all its files; `folder`: where it is.

    `unkept`: what could not be removed behind it, and why, for people. `removed`: as in `PartsWritten`.
    """

    node: NodeId
    attempt: int
    step: StepNo
    folder: str
    nbytes: int
    unkept: str = ""
    removed: list[str] = []


class CheckpointFailed(msgspec.Struct, frozen=True, tag=True):
    """A part, or the whole, could not be written. `torn`: the snapshot was overwritten meanwhile, nothing is wrong."""

    node: NodeId
    attempt: int
    step: StepNo
    reason: str
    torn: bool = False


class AbandonCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """This checkpoint will not be finished: remove what there is of it."""

    node: NodeId
    attempt: int
    step: StepNo


class CheckpointPlace(msgspec.Struct, frozen=True):
    """First message to a writer process: where checkpoints are kept, and which training owns them."""

    url: str
    lineage: Lineage = NOBODY


WriterOrder = WriteCheckpoint | FinishCheckpoint | AbandonCheckpoint
"""Orders that an agent passes on to its writer process."""

WriterFact = PartsWritten | CheckpointWritten | CheckpointFailed
"""Answers of the writer process."""
