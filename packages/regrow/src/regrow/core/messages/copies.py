"""Messages about copies of state outside the workers: in an agent's shared memory, or its buddy's."""

import msgspec

from regrow.core.ids import Generation, NodeId, Rank, Seconds, StepNo, WorkerId


class KeptCopy(msgspec.Struct, frozen=True):
    """One whole copy of one rank's `state@step`. `holding`: its shards; equal on replicas."""

    rank: Rank
    holding: str
    step: StepNo
    nbytes: int = 0


class CopySource(msgspec.Struct, frozen=True):
    """Source from which a worker reads `state@step` of rank `rank`: the copy store of an agent."""

    rank: Rank
    step: StepNo
    endpoint: str


# --- a worker to its agent ---------------------------------------------------------------------------------------


class SnapshotTaken(msgspec.Struct, frozen=True, tag=True):
    """The worker's whole `state@step` is in its shared memory `descriptor`, valid until the memory's header changes."""

    worker: WorkerId
    rank: Rank
    holding: str
    step: StepNo
    descriptor: int
    nbytes: int
    asked: bool = False
    """True if `KeepState` ordered it, and the coordinator waits for it."""


class KeepState(msgspec.Struct, frozen=True, tag=True):
    """To a halted worker: leave `state@step` in your agent's memory, for you will be ended.

    `as_committed`: as it was when that step was committed, without the script's changes since.
    """

    worker: WorkerId
    step: StepNo
    as_committed: bool = msgspec.field(default=False, name="inside")


class StateKept(msgspec.Struct, frozen=True, tag=True):
    """The answer: the worker's agent has the state, even if the worker dies. `error`: why it does not."""

    worker: WorkerId
    step: StepNo
    error: str = ""


class ForgetCopies(msgspec.Struct, frozen=True, tag=True):
    """To an agent: drop your copies; nobody will go back to them."""

    node: NodeId


class SnapshotStored(msgspec.Struct, frozen=True, tag=True):
    """The agent's answer: this snapshot is kept, and its buddy, if there is one, has all of it.

    `error`: why the buddy could not get it; the snapshot is kept on this node all the same.
    """

    worker: WorkerId
    step: StepNo
    error: str = ""


# --- agents and the coordinator ----------------------------------------------------------------------------------


class ReportCopies(msgspec.Struct, frozen=True, tag=True):
    """Report your copies. Requested while a generation is recovered."""

    node: NodeId
    generation: Generation


class CopiesHeld(msgspec.Struct, frozen=True, tag=True):
    """The answer: all whole copies in this agent's memory, including those that it keeps for other nodes."""

    node: NodeId
    generation: Generation
    copies: list[KeptCopy]


class PlaceCopies(msgspec.Struct, frozen=True, tag=True):
    """Stream the copies of this node's ranks to that agent's copy store from now on; empty: keep them only here."""

    node: NodeId
    buddy: NodeId
    endpoint: str


class CopyStreamEnded(msgspec.Struct, frozen=True, tag=True):
    """A copy has reached the buddy, or will not (`error`); for people, not for decisions. Not sent for every copy."""

    node: NodeId
    buddy: NodeId
    rank: Rank
    step: StepNo
    nbytes: int
    seconds: Seconds
    error: str = ""


class TakeSnapshot(msgspec.Struct, frozen=True, tag=True):
    """To a worker: put a copy of `state@step` in shared memory when your state is at that step."""

    worker: WorkerId
    step: StepNo
