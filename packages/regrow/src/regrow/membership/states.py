"""The states of a job. Each holds the facts about its own wait; a transition replaces the whole state."""

from dataclasses import dataclass

from regrow.core.ids import Instant, StepNo


@dataclass(frozen=True)
class Gathering:
    """State while not all nodes have registered. The launcher limits its duration."""


@dataclass(frozen=True)
class Building:
    """State while workers run the script up to its first step. A script without regrow stays in it until it ends."""

    verdict_at: Instant | None = None
    """Time until which another worker's death may turn out to be the cause of a worker's error; None: no error."""


@dataclass(frozen=True)
class Forming:
    """State after a membership that starts with `state@step` was ordered, until every worker has joined it."""

    deadline: Instant
    step: StepNo


@dataclass(frozen=True)
class Training:
    """State while steps are being run; no step needs the coordinator."""

    deadline: Instant | None = None
    """Time by which the other ranks must finish, set when a rank has finished; None: no rank has."""


@dataclass(frozen=True)
class Switching:
    """State after all workers were ordered to stop before step `at`, at which a world of another size begins."""

    at: StepNo | None
    """The agreed step; None: all stop at once, because not all could stop at the agreed step."""
    deadline: Instant
    margin: int
    """Number of steps by which `at` was chosen ahead of the newest known one."""
    tries: int = 1
    over: bool = False
    """True if the training has ended on some rank, so that the world stays as it is."""


@dataclass(frozen=True)
class Mending:
    """State after a generation was given up: survivors report their steps, and lost ranks are filled."""

    halt_deadline: Instant


@dataclass(frozen=True)
class Waiting:
    """State while too few whole replicas are left: survivors keep the state and wait until there is room for more."""

    deadline: Instant
    saving: bool = False
    """True if the deadline has passed and the state is written to disk before the job ends."""


@dataclass(frozen=True)
class Retaining:
    """State before all workers are restarted with the state in memory: survivors copy it to their agents."""

    deadline: Instant
    step: StepNo
    """Newest step of which survivors have the whole state; `NO_STATE`: there is none, so older copies are used."""


@dataclass(frozen=True)
class Saving:
    """State while the job is ending: the state of halted workers is saved to disk, and nothing is repaired any more."""

    halt_by: Instant
    """Time until which workers that have not reported their step are awaited."""
    code: int
    diagnosis: str


@dataclass(frozen=True)
class Restarting:
    """State while all workers are ending, to be started again."""

    deadline: Instant
    leave_by: Instant | None = None
    """Time by which workers that have finished one of several trainings must have ended; None: they were fenced."""


@dataclass(frozen=True)
class Closing:
    """State after every step is done, while the script's code after its loop runs and faults in it are repaired."""

    again_at: Instant
    """Time at which the permission to leave the loop is sent again to all workers."""


@dataclass(frozen=True)
class Releasing:
    """State after every step is done, when faults in the script's code after its loop are no longer repaired."""

    again_at: Instant
    """Time at which the release is sent again to remaining workers; no later order would replace a lost one."""


@dataclass(frozen=True)
class Ended:
    """State after the end of the job; no more decisions are made."""

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
"""States from the beginning of the first step to the release of the ranks, in which faults are repaired."""
