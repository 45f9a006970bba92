"""Messages about copies of state outside the workers: in an agent's shared memory, or its buddy's."""

import msgspec

from regrow.core.ids import Generation, NodeId, Rank, Seconds, StepNo, WorkerId


class KeptCopy(msgspec.Struct, frozen=True):
    """One whole copy of one rank's `state@step`. `holding`: which shards it has; equal on replicas."""

    rank: Rank
    holding: str
    step: StepNo
    nbytes: int = 0


class CopySource(msgspec.Struct, frozen=True):
    """Place from which a worker reads `state@step` of rank `rank`: the copy store of an agent."""

    rank: Rank
    step: StepNo
    endpoint: str


# --- a worker to its agent ---------------------------------------------------------------------------------------


class SnapshotTaken(msgspec.Struct, frozen=True, tag=True):
    """The worker's `state@step` stands in its shared memory `descriptor`, whole, until it says otherwise there."""

    worker: WorkerId
    rank: Rank
    holding: str
    step: StepNo
    descriptor: int
    nbytes: int
    asked: bool = False
    """It was ordered by `KeepState`, and the coordinator waits for it."""


class KeepState(msgspec.Struct, frozen=True, tag=True):
    """To a halted worker: leave `state@step` in your agent's memory, for you are to be ended.

    `as_committed`: as it was when that step was committed, before what the script has done since.
    """

    worker: WorkerId
    step: StepNo
    as_committed: bool = msgspec.field(default=False, name="inside")


class StateKept(msgspec.Struct, frozen=True, tag=True):
    """The answer: the worker's agent has it, whatever becomes of the worker. `error`: why it has not."""

    worker: WorkerId
    step: StepNo
    error: str = ""


class ForgetCopies(msgspec.Struct, frozen=True, tag=True):
    """To an agent: nobody will go back to the copies that you have."""

    node: NodeId


class SnapshotStored(msgspec.Struct, frozen=True, tag=True):
    """The agent's answer: this snapshot is kept, and its buddy has it in full where there is one.

    `error`: why the buddy could not get it; the snapshot is kept on this node all the same.
    """

    worker: WorkerId
    step: StepNo
    error: str = ""


# --- agents and the coordinator ----------------------------------------------------------------------------------


class ReportCopies(msgspec.Struct, frozen=True, tag=True):
    """Say which copies you have. Asked while a generation is mended."""

    node: NodeId
    generation: Generation


class CopiesHeld(msgspec.Struct, frozen=True, tag=True):
    """The answer: all whole copies in this agent's memory, those for other nodes included."""

    node: NodeId
    generation: Generation
    copies: list[KeptCopy]


class PlaceCopies(msgspec.Struct, frozen=True, tag=True):
    """Stream the copies of this node's ranks to that agent's vault from now on; empty: keep them here alone."""

    node: NodeId
    buddy: NodeId
    endpoint: str


class CopyStreamEnded(msgspec.Struct, frozen=True, tag=True):
    """A copy has reached the buddy, or will not (`error`); for people, not for decisions. Not told of every one."""

    node: NodeId
    buddy: NodeId
    rank: Rank
    step: StepNo
    nbytes: int
    seconds: Seconds
    error: str = ""


class TakeSnapshot(msgspec.Struct, frozen=True, tag=True):
    """To a worker: put a copy of `state@step` in shared memory when it stands there."""

    worker: WorkerId
    step: StepNo
