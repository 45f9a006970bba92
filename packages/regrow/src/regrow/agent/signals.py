"""Signals that ask an agent to end: a notice that its node is given back, or an end of which its launcher knows too."""

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
"""Time, in addition to `drain_grace`, to wait for the launcher's order, which comes after the state is saved."""
_NOTICES = (signal.SIGUSR1, signal.SIGTERM)
_ALL = (*_NOTICES, signal.SIGINT, signal.SIGHUP)


class Ending(NamedTuple):
    """End of the agent. `grace`: time for workers to end. `ordered`: on order or as announced; sends `NodeStopped`."""

    code: int
    grace: Seconds
    reason: str
    ordered: bool = False


class NoticeSignals:
    """Handles signals from `open` on: the first notice drains the node, a second one ends the agent at once.

    A signal may be sent to all processes of a job at once. Then the launcher, if alive, has the state saved and orders
    the end. If the job cannot do without a node, the agent waits for that order and sends no notice.

    An agent that a signal ends after a notice reports that it left as announced, and its launcher starts no other.

    Args:
        config: configuration of the agent; `drain_grace` is the time for its ranks to leave.
        report: sends a fact to the coordinator.
        end: ends the agent.
        hold: keeps workers that received the same signal alive.
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
        """Install the signal handlers."""
        loop = asyncio.get_running_loop()
        for number in _ALL:
            loop.add_signal_handler(number, self._arrived, number)

    def _arrived(self, number: signal.Signals) -> None:
        self._hold()
        # The kernel also sends SIGTERM when the launcher has died; then a drain is pointless.
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
        if number == signal.SIGTERM:  # SIGTERM ends the agent in any case, whatever the job does about the notice.
            asyncio.get_running_loop().call_later(grace, self._end_by, number)

    def _end_by(self, number: signal.Signals) -> None:
        code = 0 if self._given else 128 + number
        self._end(Ending(code, _SIGNAL_GRACE_S, f"signal {number.name}", ordered=self._given))
