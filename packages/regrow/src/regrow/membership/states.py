"""The states of a job. Each holds the facts about its own wait; a transition replaces the whole object."""

from dataclasses import dataclass

from regrow.core.ids import Instant, StepNo


@dataclass(frozen=True)
class Gathering:
    """Not all nodes have registered yet. The launcher bounds this wait."""


@dataclass(frozen=True)
class Building:
    """Workers run the script up to its first step. A script without regrow stays here until it ends."""

    verdict_at: Instant | None = None
    """Set when a worker failed by an error. Until then the death of another may turn out to be the cause."""


@dataclass(frozen=True)
class Forming:
    """A membership that starts with `state@step` was ordered; not every worker has joined it yet."""

    deadline: Instant
    step: StepNo


@dataclass(frozen=True)
class Training:
    """Steps are being run; no step needs the coordinator."""

    deadline: Instant | None = None
    """Set when a rank has finished: time by which the others must finish too."""


@dataclass(frozen=True)
class Switching:
    """All workers were ordered to stop before step `at`, at which a world of another size begins."""

    at: StepNo | None
    """None: they stop at once, because not all could stop at the agreed step."""
    deadline: Instant
    margin: int
    """Number of steps by which `at` was chosen ahead of the newest known one."""
    tries: int = 1
    over: bool = False
    """The training has ended on some rank: the world stays as it is."""


@dataclass(frozen=True)
class Mending:
    """The generation was given up. Survivors report their steps, and lost ranks are filled."""

    halt_deadline: Instant


@dataclass(frozen=True)
class Waiting:
    """Too few whole replicas are left. Survivors keep the state and wait until there is room for more."""

    deadline: Instant
    saving: bool = False
    """The deadline has passed; the state is written to disk before the job ends."""


@dataclass(frozen=True)
class Retaining:
    """All workers are to be restarted with the state in memory; survivors first copy it to their agents."""

    deadline: Instant
    step: StepNo
    """Newest step of which survivors have the whole state; `NO_STATE`: there is none, and older copies count."""


@dataclass(frozen=True)
class Saving:
    """The job is ending, and nothing is repaired any more; the state of halted workers is saved to disk first."""

    halt_by: Instant
    """Longest wait for workers that have not reported their step."""
    code: int
    diagnosis: str


@dataclass(frozen=True)
class Restarting:
    """All workers are ending, to be started again."""

    deadline: Instant
    leave_by: Instant | None = None
    """Time by which workers that have finished one of several trainings end by themselves; None: they were fenced."""


@dataclass(frozen=True)
class Closing:
    """Every step is done; the script's code after its loop is still running, and faults in it are repaired."""

    again_at: Instant
    """Time at which the permission to leave the loop is sent to all again."""


@dataclass(frozen=True)
class Releasing:
    """Every step is done; the script's code after its loop may still be running, but is no longer repaired."""

    again_at: Instant
    """Time at which the release is sent again to workers that remain; no later order would replace a lost one."""


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
"""States after the beginning of the first step and before the release of the ranks: faults are repaired."""
