"""Messages about copies of state outside the workers: in an agent's shared memory, or its buddy's."""

import msgspec

from regrow.core.ids import Generation, NodeId, Rank, Seconds, StepNo, WorkerId


class KeptCopy(msgspec.Struct, frozen=True):
    """One complete copy of one rank's `state@step`. `holding`: the shards in it; equal on replicas."""

    rank: Rank
    holding: str
    step: StepNo
    nbytes: int = 0


class CopySource(msgspec.Struct, frozen=True):
    """An agent's copy store from which a worker reads `state@step` of rank `rank`."""

    rank: Rank
    step: StepNo
    endpoint: str


# --- a worker to its agent ---------------------------------------------------------------------------------------


class SnapshotTaken(msgspec.Struct, frozen=True, tag=True):
    """A worker to its agent: its whole `state@step` is in the shared memory `descriptor`, until the header changes."""

    worker: WorkerId
    rank: Rank
    holding: str
    step: StepNo
    descriptor: int
    nbytes: int
    asked: bool = False
    """True if the coordinator ordered it by `KeepState`, and waits for it."""


class KeepState(msgspec.Struct, frozen=True, tag=True):
    """To a halted worker: leave `state@step` in your agent's memory, because you will be ended.

    `as_committed`: leave the state as it was when that step was committed, without the script's later changes.
    """

    worker: WorkerId
    step: StepNo
    as_committed: bool = msgspec.field(default=False, name="inside")


class StateKept(msgspec.Struct, frozen=True, tag=True):
    """The answer to `KeepState`: the agent has the state, even if the worker dies. `error`: why it does not have it."""

    worker: WorkerId
    step: StepNo
    error: str = ""


class ForgetCopies(msgspec.Struct, frozen=True, tag=True):
    """To an agent: drop your copies, because nobody will go back to them."""

    node: NodeId


class SnapshotStored(msgspec.Struct, frozen=True, tag=True):
    """An agent's answer to `SnapshotTaken`: the snapshot is kept, and the node's buddy, if any, has all of it.

    `error`: why the buddy could not get it; the snapshot is kept on this node all the same.
    """

    worker: WorkerId
    step: StepNo
    error: str = ""


# --- agents and the coordinator ----------------------------------------------------------------------------------


class ReportCopies(msgspec.Struct, frozen=True, tag=True):
    """To an agent: report your copies. Sent while a generation is recovered."""

    node: NodeId
    generation: Generation


class CopiesHeld(msgspec.Struct, frozen=True, tag=True):
    """The answer to `ReportCopies`: all complete copies in this agent's memory, also those kept for other nodes."""

    node: NodeId
    generation: Generation
    copies: list[KeptCopy]


class PlaceCopies(msgspec.Struct, frozen=True, tag=True):
    """To an agent: from now on stream copies of your ranks to that agent's copy store; empty: keep them only here."""

    node: NodeId
    buddy: NodeId
    endpoint: str


class CopyStreamEnded(msgspec.Struct, frozen=True, tag=True):
    """A copy has reached the buddy, or will not (`error`). For people, not for decisions; not sent for every copy."""

    node: NodeId
    buddy: NodeId
    rank: Rank
    step: StepNo
    nbytes: int
    seconds: Seconds
    error: str = ""


class TakeSnapshot(msgspec.Struct, frozen=True, tag=True):
    """To a worker: put a copy of your state in shared memory when it has reached `step`."""

    worker: WorkerId
    step: StepNo
