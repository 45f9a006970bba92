"""Reaction of a gang's node to Slurm's notice after another coordinator was elected: the job ends, state first.

Slurm gives it to all nodes of a gang. The first node's launcher ends the job by itself; any other would only give its
own node back, and the elected one would take the coordinator along before the state is saved.
"""

import time
from collections.abc import Callable
from typing import Final, Protocol

from regrow.core.errors import RegrowError
from regrow.core.ids import Instant, Seconds

_ASK_S: Final[Seconds] = 5.0
"""Time limit of a request to a silent coordinator."""
_MARGIN_S: Final[Seconds] = 5.0
"""After the grace, what the job's processes get to end."""


class Stoppable(Protocol):
    """The job's coordinator, whoever that is."""

    @property
    def moved(self) -> bool:
        """True if another was elected in the place of the first."""
        ...

    def stop(self, reason: str, *, patience: Seconds) -> None:
        """Ask the job to end. Raises `RegrowError`."""
        ...


class GangNotice:
    """Slurm's notice, on one node of a gang that may elect.

    Args:
        coordinator: of the job.
        host: of this node.
        grace: how long saving the state may take.
        clock: of this process.
    """

    def __init__(
        self, coordinator: Stoppable, host: str, grace: Seconds, clock: Callable[[], Instant] = time.monotonic
    ) -> None:
        self._coordinator, self._host, self._grace, self._clock = coordinator, host, grace, clock
        self._reported_at: Instant | None = None
        self._asked = False

    def pass_on(self) -> bool:
        """Called again and again from the notice on; whether what runs on this node must be told itself now.

        So it is where nobody else was elected, where the coordinator does not answer, and where the job has not ended.
        """
        now = self._clock()
        if self._reported_at is None:
            self._reported_at = now
        if self._asked:
            return now >= self._reported_at + self._grace + _MARGIN_S
        if not self._coordinator.moved:
            return True
        try:
            self._coordinator.stop(f"Slurm takes {self._host} back", patience=self._grace)
        except RegrowError:
            return now >= self._reported_at + _ASK_S
        self._asked = True
        return False
