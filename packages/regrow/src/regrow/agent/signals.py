"""Signals that ask an agent to go: notice that its node is given back, or an end that its launcher has heard of too."""

import asyncio
import os
import signal
from collections.abc import Callable
from typing import NamedTuple

from regrow.core.config import AgentConfig
from regrow.core.ids import Seconds
from regrow.core.messages import facts

_SIGNAL_GRACE_S: Seconds = 1.0
_LAUNCHER_S: Seconds = 5.0
"""Time beyond `drain_grace` to wait for the launcher's word: it saves the state first."""
_NOTICES = (signal.SIGUSR1, signal.SIGTERM)
_ALL = (*_NOTICES, signal.SIGINT, signal.SIGHUP)


class Ending(NamedTuple):
    """Why and how the agent ends. `grace`: what workers get. `ordered`: as agreed, so that it says `NodeStopped`."""

    code: int
    grace: Seconds
    reason: str
    ordered: bool = False


class NoticeSignals:
    """Listens from `open` on. The first notice drains the node; a second one ends the agent at once.

    A signal may be sent to all processes of a job at once. Then the launcher decides, if it lives: it has the state
    saved and orders the end. Where the job cannot do without a node the agent waits for that, and nothing is told.

    An agent that a signal ends after a notice has left as announced: it says so, and its launcher starts no other.

    Args:
        config: of the agent; `drain_grace` is what its ranks get to leave.
        report: tells the coordinator.
        end: ends the agent.
        hold: has the workers stay that were sent the same signal.
    """

    def __init__(
        self,
        config: AgentConfig,
        report: Callable[[facts.NodeDraining], None],
        end: Callable[[Ending], None],
        hold: Callable[[], None],
    ) -> None:
        self._config = config
        self._report = report
        self._end = end
        self._hold = hold
        self._launcher = os.getppid()
        self._given = self._waiting = False

    def open(self) -> None:
        """Take the signals over."""
        loop = asyncio.get_running_loop()
        for number in _ALL:
            loop.add_signal_handler(number, self._arrived, number)

    def _arrived(self, number: signal.Signals) -> None:
        self._hold()
        # SIGTERM is also what the kernel sends when the launcher has died; then nobody is left to drain for.
        if self._given or self._waiting or os.getppid() != self._launcher:
            self._end_by(number)
            return
        if number not in _NOTICES or not self._config.spec.can_lose_nodes:
            self._waiting = True
            asyncio.get_running_loop().call_later(self._config.drain_grace + _LAUNCHER_S, self._end_by, number)
            return
        self._given = True
        grace = self._config.drain_grace
        self._report(facts.NodeDraining(self._config.node, grace, f"signal {number.name}"))
        if number == signal.SIGTERM:  # who asks for an end gets one, whatever the job has made of the notice
            asyncio.get_running_loop().call_later(grace, self._end_by, number)

    def _end_by(self, number: signal.Signals) -> None:
        code = 0 if self._given else 128 + number
        self._end(Ending(code, _SIGNAL_GRACE_S, f"signal {number.name}", ordered=self._given))
