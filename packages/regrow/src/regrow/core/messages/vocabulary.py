"""Basic types of the messages: kinds of faults and workers, an error as text, a place in a generation."""

from enum import StrEnum

import msgspec

from regrow.core.ids import Generation, NodeId, Rank, Seconds, StepNo, WorkerId


class FaultStage(StrEnum):
    """Stage of a step (or of a recovery) at which an injected fault strikes."""

    NOW = "now"
    DATA = "data"
    BEGIN = "begin"
    """The step has its batch, and its body has not begun."""
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCE = "reduce"
    VOTE = "vote"
    """All ranks have voted for the update, which has not begun (sharded worlds)."""
    UPDATE = "update"
    COMMIT = "commit"
    AFTER = "after"
    """The step is committed, and the code after its body has run."""
    BETWEEN = "between"
    """In the first restartable function between two steps, before this step or a later one."""
    FORM = "form"
    HYDRATE = "hydrate"
    ROLL = "roll"
    """It was decided that the step counts as done; its update has not begun on this worker."""


STEP_STAGES = (
    FaultStage.DATA,
    FaultStage.FORWARD,
    FaultStage.BACKWARD,
    FaultStage.REDUCE,
    FaultStage.UPDATE,
    FaultStage.COMMIT,
)


STATE_METRIC = "regrow.state"
"""Metric under which each step of a trial logs a digest of the protected state that it began with."""


class FaultHow(StrEnum):
    """Effect of an injected fault on its worker."""

    SIGKILL = "sigkill"
    SIGSTOP = "sigstop"
    EXCEPTION = "exception"
    EXIT = "exit"
    PAUSE = "pause"
    """A pause of one second, harmless by itself."""
    OOM_LIKE = "oom-like"
    BITFLIP = "bitflip"
    """One bit of the largest element of a protected parameter changes, without any error."""


class FaultKind(StrEnum):
    """Kind of fault that a worker saw in its own step."""

    COLLECTIVE = "collective"
    BODY = "body"
    HYDRATION = "hydration"
    GROUPS = "groups"
    """A device's groups report an error of their own; no call of the script is wrong."""


class Role(StrEnum):
    """The purpose for which a worker was started."""

    RANK = "rank"
    JOINER = "joiner"
    STANDBY = "standby"
    PROVER = "prover"
    """A worker made for a proof that no standby could give; it is ended afterwards and never holds a rank."""

    @property
    def placed(self) -> bool:
        """True if a worker of this role is meant to hold a rank from its start."""
        return self in (Role.RANK, Role.JOINER)


class Warmth(StrEnum):
    """Progress that a standby makes before it waits: torch imported, or the script run up to `session.steps`."""

    IMPORTS = "imports"
    BUILT = "built"


class FaultSpec(msgspec.Struct, frozen=True):
    """One injected fault: rank `rank` suffers `how` at `stage` of `step` (None: of the next step that it runs)."""

    fault: str
    rank: Rank
    how: FaultHow = FaultHow.SIGKILL
    stage: FaultStage = FaultStage.NOW
    step: StepNo | None = None


class ErrorReport(msgspec.Struct, frozen=True):
    """An exception of a worker as text: its type, its message, the traceback without regrow's frames."""

    type: str
    message: str
    traceback: str
    where: str = ""

    @property
    def fingerprint(self) -> str:
        """A text that is equal for two errors of the same kind at the same place."""
        return f"{self.type}|{self.message}|{self.where}"


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A worker's place in a generation, and the endpoint of its state. `holding`: equal for ranks with equal state."""

    rank: Rank
    worker: WorkerId
    node: NodeId
    local_rank: int
    endpoint: str
    holding: str = ""


class WorldChange(msgspec.Struct, frozen=True):
    """A change of the world's size at a boundary. `kind`: `grow`, `shrink`, `preempt`, `move` or `fault`.

    `generation`: the first in which it was tried. `before`, `after`: replicas. `deadline`: seconds in which leaving
    workers must be gone; None: no limit.
    """

    kind: str
    generation: Generation
    before: int
    after: int
    reason: str = ""
    deadline: Seconds | None = None
