"""Orders, sent downwards: by the coordinator to agents, and through agents to workers."""

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
    A `rank` outside the present world is that of a candidate, which builds for a future world of `world` ranks.
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
    """Warmth of a standby; None: the job's default."""
    restored: bool = False
    avoid: list[StepNo] = []
    """Steps of durable checkpoints that some rank could not read, and that must not be used."""
    stores: list[str] = []
    """Addresses of the agents' key-value stores, for a node that has not received them with a table."""
    finished: list[FinishedTraining] = []
    """The script's trainings before the training that the worker joins."""


class FenceWorker(msgspec.Struct, frozen=True, tag=True):
    """End the worker with certainty (SIGKILL). `dump_stacks`: take its stacks first."""

    node: NodeId
    worker: WorkerId
    reason: str
    dump_stacks: bool = False


class StopNode(msgspec.Struct, frozen=True, tag=True):
    """End all workers within `grace` seconds, then yourself."""

    node: NodeId
    reason: str
    grace: Seconds


class NoteGeneration(msgspec.Struct, frozen=True, tag=True):
    """To a node without a rank in the new generation: it goes on from `state@step`, so older steps are committed."""

    node: NodeId
    generation: Generation
    step: StepNo


# --- orders to workers -------------------------------------------------------------------------------------------


class ImportModules(msgspec.Struct, frozen=True, tag=True):
    """To an `imports` standby: import these modules, as the script will, while you wait.

    `environment`: variables that the script changes before its loop; a module that reads one must not be imported.
    """

    worker: WorkerId
    modules: list[str]
    environment: list[str] = []


class StartScript(msgspec.Struct, frozen=True, tag=True):
    """To an `imports` standby: run the script now, as this rank. `world`: size of its world; 0: as it was spawned."""

    worker: WorkerId
    rank: Rank
    local_rank: int
    generation: Generation
    world: int = 0


class HaltGeneration(msgspec.Struct, frozen=True, tag=True):
    """Stop using the groups of this generation, and report the step of your state.

    `at`: a planned halt. Go on until just before step `at`, then stop and report that step; the groups stay until the
    next order. A worker that has begun that step already reports `HaltMissed` at once and goes on. A newer order
    replaces this one. None: stop at once.
    """

    worker: WorkerId
    generation: Generation
    reason: str
    at: StepNo | None = None


class FormGeneration(msgspec.Struct, frozen=True, tag=True):
    """The new generation: an agent sends it to its worker, which then joins it.

    A worker that is not in `holders` receives `state@step` from those holders that have the same holding.

    `restore`: the copy to go back to instead, if no living worker has the state; then nobody is a holder.
    `restart_index`: first of the restartable functions after the last step, from which on all run again; 0: none.
    `rewind`: holders go back to their own copy of `state@step`, on which all replicas had agreed.
    `change`: difference in size between this world and the one before; None if there is none.
    `whole_body`: bodies are rolled back with their updates, since on some rank they cannot be separated.
    `over`: every rank has run the last step; `restart_index` counts the functions after the loop.
    `own`: the rank's own values, left by its former worker, which has ended.
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
    """To a worker whose state nobody needs any more: all workers have finished, or it is halted and leaves the job.

    `change`: the change of the world because of which it leaves.
    `goes_on`: only leave the loop, as all workers do, and stay ready to give state until the script has finished again.
    """

    worker: WorkerId
    change: WorldChange | None = None
    goes_on: bool = False


class KeepOwn(msgspec.Struct, frozen=True, tag=True):
    """To a worker: ranks have different values in these variables, so write yours to your board in each step."""

    worker: WorkerId
    places: list[str]


class ArmFault(msgspec.Struct, frozen=True, tag=True):
    """To a worker: prepare to fail by an injected fault."""

    worker: WorkerId
    fault: FaultSpec
