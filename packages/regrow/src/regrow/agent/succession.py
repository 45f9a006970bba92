"""Queries to this node's launcher for the present coordinator, after the last one was lost or became silent."""

import asyncio
import contextlib

import aiohttp
import msgspec

from regrow.core.config import AgentConfig
from regrow.core.ids import Instant, Seconds
from regrow.core.messages import facts
from regrow.core.messages.elections import Leader
from regrow.core.messages.unions import AgentFact
from regrow.core.wire import UNREADABLE

_LONGEST_S: Seconds = 120.0
_NEED_AFTER_S: Seconds = 3.0
_LOOK_S: Seconds = 0.5
_ANSWERED = facts.WorkerExited | facts.WorkerFailed | facts.WorkerFaulted | facts.WorkerHalted
"""Facts that a coordinator answers with orders."""


class NextCoordinator:
    """Queries by which one agent asks its launcher for the present coordinator.

    Args:
        config: configuration of the agent.
    """

    def __init__(self, config: AgentConfig) -> None:
        self._launcher, self._headers = config.launcher, {"Authorization": f"Bearer {config.token}"}
        self._leader = Leader(config.term, config.coordinator)
        self._unanswered: Instant | None = None

    def sent(self, fact: AgentFact) -> None:
        """Note that a fact is sent to the coordinator, which may have to answer it."""
        if isinstance(fact, _ANSWERED) and self._unanswered is None:
            self._unanswered = asyncio.get_running_loop().time()

    def answered(self) -> None:
        """Note that an order has arrived, so that the coordinator answers."""
        self._unanswered = None

    async def find(self, session: aiohttp.ClientSession) -> Leader | None:
        """Find a lost coordinator's successor; None: there is none, or the old one lives and dropped this agent."""
        if not self._launcher:
            return None
        leader = await self._ask(session, "lost", _LONGEST_S)
        self._leader = leader or self._leader
        if self._unanswered is not None:
            self._unanswered = asyncio.get_running_loop().time()  # The new coordinator's time begins now.
        return leader

    async def wait(self, session: aiohttp.ClientSession) -> None:
        """Wait for another coordinator. The connection may still seem alive, as a machine without power closes none."""
        while self._launcher and await self._ask(session, "later", None) is None:
            await asyncio.sleep(_LOOK_S)

    async def _ask(self, session: aiohttp.ClientSession, when: str, within: Seconds | None) -> Leader | None:
        timeout = aiohttp.ClientTimeout(total=within)
        url, since = f"{self._launcher}/leader", {"after": str(self._leader.term), "when": when}
        try:
            async with session.get(url, params=since, headers=self._headers, timeout=timeout) as response:
                if response.status == 200:
                    return msgspec.json.decode(await response.read(), type=Leader)
        except (aiohttp.ClientError, TimeoutError, *UNREADABLE):
            pass
        return None

    async def report_need(self, session: aiohttp.ClientSession) -> None:
        """Inform the launcher, until cancelled, whenever a coordinator is needed and does not answer."""
        loop = asyncio.get_running_loop()
        while self._launcher:
            await asyncio.sleep(_LOOK_S)
            if self._unanswered is not None and loop.time() - self._unanswered > _NEED_AFTER_S:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    timeout = aiohttp.ClientTimeout(total=_NEED_AFTER_S)
                    url, whom = f"{self._launcher}/needed", {"after": str(self._leader.term)}
                    async with session.post(url, params=whom, headers=self._headers, timeout=timeout):
                        pass
