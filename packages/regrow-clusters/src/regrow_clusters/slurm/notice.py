"""Reaction of a gang's node to Slurm's notice after an election: the job saves its state and ends.

Slurm notifies all nodes of a gang. The first node's launcher ends the job by itself; any other would only release its
own node, and the elected coordinator would leave with its node before the state is saved.
"""

import time
from collections.abc import Callable
from typing import Final, Protocol

from regrow.core.errors import RegrowError
from regrow.core.ids import Instant, Seconds

_ASK_S: Final[Seconds] = 5.0
"""Time after the notice in which an unreachable coordinator is asked again."""
_MARGIN_S: Final[Seconds] = 5.0
"""Time, after the grace, for the job's processes to end."""


class Stoppable(Protocol):
    """The job's present coordinator."""

    @property
    def moved(self) -> bool:
        """True if another coordinator was elected to replace the first."""
        ...

    def stop(self, reason: str, *, patience: Seconds) -> None:
        """Ask the job to end. Raises `RegrowError`."""
        ...


class GangNotice:
    """Slurm's notice, on one node of a gang that can elect a coordinator.

    Args:
        coordinator: the job's coordinator.
        host: name of this node.
        grace: time in which the state may be saved.
        clock: monotonic clock of this process.
    """

    def __init__(
        self, coordinator: Stoppable, host: str, grace: Seconds, clock: Callable[[], Instant] = time.monotonic
    ) -> None:
        self._coordinator, self._host, self._grace, self._clock = coordinator, host, grace, clock
        self._reported_at: Instant | None = None
        self._asked = False

    def pass_on(self) -> bool:
        """Called repeatedly from the notice on; True if this node's own launcher must get the SIGTERM now.

        That is so if no other coordinator was elected, or it does not answer, or the job has not ended in time.
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
