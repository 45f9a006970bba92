"""Orders, sent downwards: by the coordinator to agents, and through them to workers."""

import msgspec

from regrow.core.ids import Generation, NodeId, Rank, Seconds, StepNo, WorkerId
from regrow.core.messages.copies import CopySource
from regrow.core.messages.replicas import OwnValues
from regrow.core.messages.trainings import FinishedTraining
from regrow.core.messages.vocabulary import FaultSpec, Member, Role, Warmth, WorldChange

# --- orders to agents --------------------------------------------------------------------------------------------


class SpawnWorker(msgspec.Struct, frozen=True, tag=True):
    """Fork a worker. `rank`: its rank, provisional for a standby.

    `restored`: all ranks are started again, and their state comes from copies that agents have.
    A `rank` beyond the present world is that of a candidate: it builds for a future world of `world` ranks.
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
    """Warmth of a standby; None: that of the job."""
    restored: bool = False
    avoid: list[StepNo] = []
    """Steps of durable checkpoints that some rank could not read."""
    stores: list[str] = []
    """Addresses of the agents' stores, for a node that has not received them with a table."""
    finished: list[FinishedTraining] = []
    """Trainings of the script before the one that the worker is for."""


class FenceWorker(msgspec.Struct, frozen=True, tag=True):
    """End the worker for certain (SIGKILL); `dump_stacks`: take its stacks first."""

    node: NodeId
    worker: WorkerId
    reason: str
    dump_stacks: bool = False


class StopNode(msgspec.Struct, frozen=True, tag=True):
    """End all workers after at most `grace`, then yourself."""

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

    `environment`: variables that the script changes before its loop; a module that reads one must not be imported.
    """

    worker: WorkerId
    modules: list[str]
    environment: list[str] = []


class StartScript(msgspec.Struct, frozen=True, tag=True):
    """To an `imports` standby: build as this rank now. `world`: size of its world; 0: as it was spawned."""

    worker: WorkerId
    rank: Rank
    local_rank: int
    generation: Generation
    world: int = 0


class HaltGeneration(msgspec.Struct, frozen=True, tag=True):
    """Give up the groups of this generation and report the step of your state.

    `at`: a planned halt. Go on until just before step `at`, then stop and report that; the groups stay until the next
    order. A worker that has begun that step already reports `HaltMissed` at once and goes on. A newer order replaces
    this one. None: stop at once.
    """

    worker: WorkerId
    generation: Generation
    reason: str
    at: StepNo | None = None


class FormGeneration(msgspec.Struct, frozen=True, tag=True):
    """The new membership, as an agent sends it to its worker.

    A worker that is not in `holders` receives `state@step` from the holders with its own holding.

    `restore`: the copy to go back to instead, if no living worker has the state; then nobody is a holder.
    `restart_index`: the first of the restartable functions after the last step that all run again; 0: none.
    `rewind`: holders go back to their own copy of `state@step`, on which all replicas had agreed.
    `change`: how this world differs in size from the one before, if it does.
    `whole_body`: bodies are rolled back with their updates, since on some rank they cannot be separated.
    `over`: every rank has run the last step; `restart_index` counts the functions after the loop.
    `own`: values of its own that the former worker of this rank had, which has ended.
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

    `change`: the change of the world that you leave.
    `goes_on`: only leave your loop, as all do, and be ready to give your state until you have finished again.
    """

    worker: WorkerId
    change: WorldChange | None = None
    goes_on: bool = False


class KeepOwn(msgspec.Struct, frozen=True, tag=True):
    """Ranks have different values in these variables: in each step, write yours to your board for your agent."""

    worker: WorkerId
    places: list[str]


class ArmFault(msgspec.Struct, frozen=True, tag=True):
    """Prepare to fail by an injected fault."""

    worker: WorkerId
    fault: FaultSpec
