"""What a script does behind its loop: restartable functions and collectives are run again there too, to its end.

All ranks leave their loops together, once each has run the last step. From then on what stands in the loop is over for
all of them: a rank that is replaced receives the last state, passes the loop by, and comes to what stands behind it,
where the others run again what they have run already. Nobody ends its process, or destroys the group of all ranks,
before all have come to that. See decision 0057.
"""

import atexit
from typing import Protocol

from regrow.train.loop_context import LoopContext
from regrow.train.restartable import RestartableCalls


class Leaver(Protocol):
    """The loop that is left."""

    regions: RestartableCalls
    standing: LoopContext
    left: bool
    """Whether this worker has no part in the job any more."""

    def finish(self) -> None:
        """Wait until no rank needs this one."""


class AfterLoop:
    """The time between the last step and the end of the script.

    Args:
        loop: that has been left.
    """

    def __init__(self, loop: Leaver) -> None:
        self._loop = loop
        self._begun = self._ended = False

    @property
    def open(self) -> bool:
        """Whether the script is behind its loop, and a fault there is mended."""
        return self._begun and not self._ended

    def begin(self) -> None:
        """The script has left its loop, as all ranks have, or will."""
        member, state = self._loop.standing.member, self._loop.standing.protected()
        if self._begun or not member.over:
            return
        self._begun = True
        self._loop.regions.over()
        state.between.over(member.step)
        state.variables.leave(over=True)
        member.before_leaving(self._end)
        atexit.register(self._end)

    def passes_by(self) -> None:
        """This worker came in when all were behind the loop, and still has the rest of its last turn before it."""
        if self._loop.standing.member.over:
            self._loop.standing.protected().between.passes_by(self._loop.standing.member.step)

    def recovered(self) -> None:
        """In a new generation. Who has still to leave its loop has nothing to run again there: all are behind it."""
        if self._loop.standing.member.over and not self._begun:
            self._loop.regions.over()

    def _end(self) -> None:
        """The script is about to end, or leaves the groups: all others may still need this worker."""
        if self._ended or self._loop.left or self._loop.standing.member.leaves_others:
            return
        self._loop.finish()
        self._ended = True
