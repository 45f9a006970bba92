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
class Mending:
    """The generation was given up. Survivors say where they stand, lost ranks are filled."""

    halt_deadline: Instant


@dataclass(frozen=True)
class Restarting:
    """All workers are being ended, to be started again."""

    deadline: Instant


@dataclass(frozen=True)
class Releasing:
    """Every step is done; what the script does after its loop is still running."""

    again_at: Instant
    """When the release is repeated to who is still there: it is the one order that no later one makes up for."""


@dataclass(frozen=True)
class Ended:
    """Nothing is decided any more."""

    code: int


State = Gathering | Building | Forming | Training | Mending | Restarting | Releasing | Ended
