"""Orders, sent downwards: by the coordinator to agents, and through them to workers."""

import msgspec

from regrow.core.ids import Generation, NodeId, Rank, Seconds, StepNo, WorkerId
from regrow.core.messages.copies import CopySource
from regrow.core.messages.replicas import OwnValues
from regrow.core.messages.trainings import FinishedTraining
from regrow.core.messages.vocabulary import FaultSpec, Member, Role, Warmth, WorldChange

# --- orders to agents --------------------------------------------------------------------------------------------


class SpawnWorker(msgspec.Struct, frozen=True, tag=True):
    """Fork a worker. `rank`: its place, provisional for a standby.

    `restored`: all ranks are started again, and their state comes from copies that agents have.
    A `rank` that the world does not have yet is that of a candidate: it builds for a world of `world` that is to come.
    """

    node: NodeId
    worker: WorkerId
    role: Role
    rank: Rank
    local_rank: int
    world: int
    generation: Generation
    restarts: int
    resume: bool
    faults: list[FaultSpec] = []
    warmth: Warmth | None = None
    """Warmth of a standby; None: as the job was started with."""
    restored: bool = False
    avoid: list[StepNo] = []
    """Steps of durable checkpoints that some rank could not read."""
    stores: list[str] = []
    """Addresses of the agents' stores, for a node that has not got them with a table."""
    finished: list[FinishedTraining] = []
    """Trainings that the script has before the one that the worker is for."""


class FenceWorker(msgspec.Struct, frozen=True, tag=True):
    """Make sure the worker can do nothing any more (SIGKILL), stacks first when asked."""

    node: NodeId
    worker: WorkerId
    reason: str
    dump_stacks: bool = False


class StopNode(msgspec.Struct, frozen=True, tag=True):
    """End all workers, give them `grace` to go, then yourself."""

    node: NodeId
    reason: str
    grace: Seconds


class NoteGeneration(msgspec.Struct, frozen=True, tag=True):
    """A generation in which this node has no rank goes on from `state@step`: older steps are committed."""

    node: NodeId
    generation: Generation
    step: StepNo


# --- orders to workers -------------------------------------------------------------------------------------------


class ImportModules(msgspec.Struct, frozen=True, tag=True):
    """An `imports` standby imports these modules, as the script will, while it waits.

    `environment`: variables that the script changes before its loop; a module that asks for one is not to be imported.
    """

    worker: WorkerId
    modules: list[str]
    environment: list[str] = []


class StartScript(msgspec.Struct, frozen=True, tag=True):
    """To an `imports` standby: build for this place now. `world`: ranks of its world; 0: as it was spawned."""

    worker: WorkerId
    rank: Rank
    local_rank: int
    generation: Generation
    world: int = 0


class HaltGeneration(msgspec.Struct, frozen=True, tag=True):
    """Give up the groups of this generation and say where your state stands.

    `at`: a planned halt. Go on until just before step `at`, then stop and say so; the groups stay as they are until the
    next order. Who has begun that step already says `HaltMissed` at once and goes on. A newer order replaces this one.
    None: at once, whatever is being done.
    """

    worker: WorkerId
    generation: Generation
    reason: str
    at: StepNo | None = None


class FormGeneration(msgspec.Struct, frozen=True, tag=True):
    """The new membership, as a worker is told by its agent.

    Who is not in `holders` receives `state@step` from those of them with its own holding.

    `restore`: the copy to go back to instead, where no living worker has the state; then nobody is a holder.
    `restart_index`: from which restartable function on, of those after the last step, all run them again; 0: none.
    `rewind`: holders go back to their own copy of `state@step`, upon which all replicas had agreed.
    `change`: how this world differs in size from the one before, if it does.
    `whole_body`: bodies are given up with their updates, since some rank has seen that they cannot be parted from them.
    `over`: every rank has run the last step; `restart_index` counts what stands behind the loop.
    `own`: what the worker had of its own that had this rank before, and that has ended.
    """

    worker: WorkerId
    generation: Generation
    rank: Rank
    local_rank: int
    step: StepNo
    members: list[Member]
    holders: list[Rank]
    stores: list[str]
    faults: list[FaultSpec] = []
    restore: CopySource | None = None
    restart_index: int = msgspec.field(default=0, name="inside")
    rewind: bool = False
    change: WorldChange | None = None
    whole_body: bool = False
    over: bool = False
    own: OwnValues | None = None


class ReleaseWorker(msgspec.Struct, frozen=True, tag=True):
    """Nobody needs your state any more: every worker has finished its steps, or you are halted and leave the job.

    `change`: what becomes of the world that you leave.
    `goes_on`: leave your loop alone, as all do, and be ready to give your state until you have finished again.
    """

    worker: WorkerId
    change: WorldChange | None = None
    goes_on: bool = False


class KeepOwn(msgspec.Struct, frozen=True, tag=True):
    """Ranks have different values in these variables: leave yours, in each step, where your agent finds them."""

    worker: WorkerId
    places: list[str]


class ArmFault(msgspec.Struct, frozen=True, tag=True):
    """Fail on demand."""

    worker: WorkerId
    fault: FaultSpec
