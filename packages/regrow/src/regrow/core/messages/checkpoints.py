"""Messages about durable checkpoints: a worker's copy in shared memory, parts on disk, the manifest over them.

    TakeSnapshot → SnapshotForDisk → SnapshotHeld → WriteCheckpoint → PartsWritten
      → FinishCheckpoint → CheckpointWritten

Each checkpoint has its own number, `attempt`; answers to an earlier one are dropped.
"""

import msgspec

from regrow.core.ids import NodeId, Rank, Seconds, StepNo, WorkerId
from regrow.core.messages.lineage import NOBODY, Lineage


class SnapshotForDisk(msgspec.Struct, frozen=True, tag=True):
    """A worker to its agent: its `state@step` is in its shared memory `descriptor`, for a durable checkpoint.

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
    """Reason why there is no snapshot."""


class SnapshotHeld(msgspec.Struct, frozen=True, tag=True):
    """An agent to the coordinator: it can write this rank's `state@step`, even if the worker dies."""

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
    """The job ends after it: if the disk is full, older checkpoints of this training are removed for it."""


class PartsWritten(msgspec.Struct, frozen=True, tag=True):
    """The parts of this node's ranks are on disk. `removed`: older checkpoints that were removed to make room."""

    node: NodeId
    attempt: int
    step: StepNo
    ranks: list[Rank]
    nbytes: int
    seconds: Seconds
    removed: list[str] = []


class FinishCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """All parts are on disk: write the manifest, rename the folder, remove all checkpoints but the newest `keep`.

    `refused`: steps of older ones that could not be read, and do not count among these.
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

    `unkept`: which old ones could not be removed, and why, for people. `removed`: as in `PartsWritten`.
    """

    node: NodeId
    attempt: int
    step: StepNo
    folder: str
    nbytes: int
    unkept: str = ""
    removed: list[str] = []


class CheckpointFailed(msgspec.Struct, frozen=True, tag=True):
    """A part, or the whole, could not be written. `torn`: only because the snapshot was overwritten, no error."""

    node: NodeId
    attempt: int
    step: StepNo
    reason: str
    torn: bool = False


class AbandonCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """This checkpoint will not be finished: remove its files."""

    node: NodeId
    attempt: int
    step: StepNo


class CheckpointPlace(msgspec.Struct, frozen=True):
    """First message to a writer process: the folder of the checkpoints, and the training that owns them."""

    url: str
    lineage: Lineage = NOBODY


WriterOrder = WriteCheckpoint | FinishCheckpoint | AbandonCheckpoint
"""Orders that an agent passes on to its writer process."""

WriterFact = PartsWritten | CheckpointWritten | CheckpointFailed
"""Answers of the writer process."""
