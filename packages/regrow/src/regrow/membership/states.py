"""The states a job can be in. Each carries what it waits for; the machine replaces it whole."""

from dataclasses import dataclass

from regrow.core.ids import Instant, StepNo


@dataclass(frozen=True)
class Gathering:
    """Not all nodes have registered. The launcher bounds this wait."""


@dataclass(frozen=True)
class Building:
    """Workers run the script up to its first step. A script without regrow stays here until it ends."""

    verdict_at: Instant | None = None
    """Set when a worker failed by an error: until then another's death may turn out to be the cause."""


@dataclass(frozen=True)
class Forming:
    """A membership that starts with `state@step` was ordered; not every worker stands in it."""

    deadline: Instant
    step: StepNo


@dataclass(frozen=True)
class Training:
    """Steps are being run; nothing is asked of the coordinator."""

    deadline: Instant | None = None
    """Set when a rank has finished: by then the others must have too."""


@dataclass(frozen=True)
class Switching:
    """Everybody was told to stop before step `at`, for a world of another size to begin with it."""

    at: StepNo | None
    """None: at once, since not all could stop there."""
    deadline: Instant
    margin: int
    """Number of steps by which `at` was chosen ahead of the newest known one."""
    tries: int = 1
    over: bool = False
    """The training has ended on some rank: the world stays as it is."""


@dataclass(frozen=True)
class Mending:
    """The generation was given up. Survivors say where they stand, lost ranks are filled."""

    halt_deadline: Instant


@dataclass(frozen=True)
class Waiting:
    """Too few whole replicas are left. The survivors stand still and hold the state until there is room for more."""

    deadline: Instant
    saving: bool = False
    """That time is over; the state is written to disk before the job ends."""


@dataclass(frozen=True)
class Retaining:
    """All workers are to be started again with the state in memory; survivors leave it with their agents first."""

    deadline: Instant
    step: StepNo
    """The newest that survivors have all of; `NO_STATE`: they have not, and older copies count."""


@dataclass(frozen=True)
class Saving:
    """The job is over, and nothing is mended any more; the state that halted workers have goes to disk first."""

    halt_by: Instant
    """Until when those who have not said where they stand are waited for."""
    code: int
    diagnosis: str


@dataclass(frozen=True)
class Restarting:
    """All workers are being ended, or end, to be started again."""

    deadline: Instant
    leave_by: Instant | None = None
    """They have finished one of several trainings and end by themselves, by then; None: they were fenced."""


@dataclass(frozen=True)
class Closing:
    """Every step is done; what the script does behind its loop is still running, and faults in it are mended."""

    again_at: Instant
    """Time when all get the order again that they may leave their loop."""


@dataclass(frozen=True)
class Releasing:
    """Every step is done; what the script does after its loop may still be running, and is not mended any more."""

    again_at: Instant
    """Time to repeat the release to those still there: it is the one order that no later one makes up for."""


@dataclass(frozen=True)
class Ended:
    """Nothing is decided any more."""

    code: int


State = (
    Gathering
    | Building
    | Forming
    | Training
    | Switching
    | Mending
    | Waiting
    | Retaining
    | Saving
    | Restarting
    | Closing
    | Releasing
    | Ended
)

RUNNING = Forming | Training | Switching | Mending | Waiting | Retaining | Closing
"""The job has begun its first step, and not all are through with their script: a fault is mended."""
