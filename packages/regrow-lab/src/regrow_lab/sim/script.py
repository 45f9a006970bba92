"""Script of simulated workers, and their activities."""

from enum import StrEnum

import msgspec

from regrow.core.ids import Rank, Seconds, StepNo
from regrow.core.phase import Phase


class Doing(StrEnum):
    """Activity of a simulated worker; faults can strike in any."""

    BUILDING = "building"
    IDLE = "idle"
    READY = "ready"
    FORMING = "forming"
    HYDRATING = "hydrating"
    COMPUTING = "computing"
    REDUCING = "reducing"
    VOTING = "voting"
    UPDATING = "updating"
    WAITING = "waiting"
    HALTING = "halting"
    HALTED = "halted"
    FINISHED = "finished"
    AFTER = "after"
    DEAD = "dead"


PHASES = {
    Doing.BUILDING: Phase.BUILDING,
    Doing.IDLE: Phase.WAITING,
    Doing.READY: Phase.WAITING,
    Doing.FINISHED: Phase.WAITING,
    Doing.FORMING: Phase.RECOVERING,
    Doing.HYDRATING: Phase.RECOVERING,
    Doing.WAITING: Phase.RECOVERING,
    Doing.HALTED: Phase.RECOVERING,
    Doing.UPDATING: Phase.UPDATING,
    Doing.AFTER: Phase.OUTSIDE,
}
"""Phase that the worker's board shows; an activity that is not listed is in a step."""

IN_STEP = frozenset({Doing.COMPUTING, Doing.REDUCING, Doing.VOTING, Doing.UPDATING})


class SimScript(msgspec.Struct, frozen=True):
    """Script of the workers. Times in seconds."""

    until: StepNo = StepNo(8)
    with_session: bool = True
    build: Seconds = 3.0
    compute: Seconds = 0.4
    update: Seconds = 0.05
    hydrate: Seconds = 0.2
    after: Seconds = 1.0
    patience: Seconds = 1000.0
    """Time that a worker waits for an order before it gives up."""
    bug: tuple[Rank, StepNo] | None = None
    """The rank whose body raises the same error whenever it runs this step."""
    parts: int = 0
    """Number of parts of the state: rank r has part r % parts, and ranks vote on each step. 0: not divided."""
    goes_on: bool = False
    """True if the code after the loop is recovered too."""
    fails: int = 0
    """Number of newcomers (not the first workers of the ranks) that fail while they build; -1: all of them."""
    leaves: tuple[Rank, StepNo] | None = None
    """A rank that leaves its loop at this step, independently of the others."""
