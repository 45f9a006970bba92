"""Messages about durable checkpoints: copies in shared memory, parts on disk, and the manifest of the parts.

TakeSnapshot → SnapshotForDisk → SnapshotHeld → WriteCheckpoint → PartsWritten → FinishCheckpoint → CheckpointWritten

Each checkpoint has its own number, `attempt`; answers to an earlier one are dropped.
"""

import msgspec

from regrow.core.ids import NodeId, Rank, Seconds, StepNo, WorkerId
from regrow.core.messages.lineage import NOBODY, Lineage


class SnapshotForDisk(msgspec.Struct, frozen=True, tag=True):
    """A worker to its agent: `state@step` for a durable checkpoint is in the worker's shared memory `descriptor`.

    `asked`: the step of the `TakeSnapshot` that this message answers; the worker may already have been past that step.
    """

    worker: WorkerId
    rank: Rank
    holding: str
    asked: StepNo
    step: StepNo
    descriptor: int
    nbytes: int
    error: str = ""
    """Reason why there is no snapshot; empty if there is one."""


class SnapshotHeld(msgspec.Struct, frozen=True, tag=True):
    """An agent to the coordinator: the agent can write this rank's `state@step` to disk, even if the worker dies."""

    worker: WorkerId
    asked: StepNo
    step: StepNo
    error: str = ""


class WriteCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """To an agent: write the parts of these ranks to disk, from the snapshots that your node holds."""

    node: NodeId
    attempt: int
    step: StepNo
    ranks: list[Rank]
    last: bool = False
    """True if the job ends after it: if the disk is full, older checkpoints of this training are removed for it."""


class PartsWritten(msgspec.Struct, frozen=True, tag=True):
    """This node has written the parts of its ranks. `removed`: older checkpoints that were removed to make room."""

    node: NodeId
    attempt: int
    step: StepNo
    ranks: list[Rank]
    nbytes: int
    seconds: Seconds
    removed: list[str] = []


class FinishCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """To an agent: all parts are on disk; write the manifest, rename the folder, keep the newest `keep` checkpoints.

    `refused`: steps of older checkpoints that could not be read, and do not count among the kept ones.
    """

    node: NodeId
    attempt: int
    step: StepNo
    ranks: list[Rank]
    keep: int
    refused: list[StepNo] = []
    last: bool = False


class CheckpointWritten(msgspec.Struct, frozen=True, tag=True):
    """The checkpoint is complete. `nbytes`: size of all its files; `folder`: where it is.

    `unkept`: old checkpoints that could not be removed, and why, for people. `removed`: as in `PartsWritten`.
    """

    node: NodeId
    attempt: int
    step: StepNo
    folder: str
    nbytes: int
    unkept: str = ""
    removed: list[str] = []


class CheckpointFailed(msgspec.Struct, frozen=True, tag=True):
    """A part or the whole could not be written. `torn`: only because the snapshot was overwritten: no error."""

    node: NodeId
    attempt: int
    step: StepNo
    reason: str
    torn: bool = False


class AbandonCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """To an agent: this checkpoint will not be finished, so remove its files."""

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
