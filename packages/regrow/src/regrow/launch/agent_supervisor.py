"""Supervises a node's agent: restarts it when it ends before its job does."""

import asyncio
import contextlib
import errno
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from regrow.agent.workers.processes import own_children
from regrow.core.config import AgentConfig
from regrow.core.errors import RegrowError, passes
from regrow.core.ids import Instant, NodeId, Seconds, StepNo
from regrow.core.messages.elections import Leader
from regrow.core.net import sockets_home
from regrow.core.process.shortage import short_of_processes
from regrow.launch.cache import CacheHome
from regrow.launch.child import AgentProcess
from regrow.launch.console import Console

DEATHS = 3
"""A node is given up after this many deaths of its agents in a row with no step committed in between."""
_BURY_S: Seconds = 5.0
_LOOK_S: Seconds = 0.01
_AGAIN_S: Seconds = 1.0
_PASSES_S: Seconds = 60.0
"""Time for which starting an agent is retried while a resource is exhausted."""


class Departure(NamedTuple):
    """End of a node's last agent. `how`: in words. `given_back`: as agreed, and the job goes on without the node."""

    how: str
    given_back: bool


class Outlook(NamedTuple):
    """The coordinator's answer about a node and its job. `leaving`: the node is being given back, or was."""

    step: StepNo
    leaving: bool


@dataclass
class NodeAgents:
    """The agents that this process has started, to distinguish them from processes that a dead agent left behind."""

    command: Sequence[str]
    console: Console
    caches: CacheHome
    _pids: set[int] = field(default_factory=set)
    _starting: int = 0

    async def start(self, config: AgentConfig) -> AgentProcess:
        """Start an agent. Raises `RegrowError` if no more processes or threads can be started."""
        self._starting += 1
        try:
            agent = await AgentProcess.start(config, self.command)
            self._pids.add(agent.pid)
            return agent
        except (RuntimeError, OSError) as error:
            if short := short_of_processes(error):
                raise RegrowError(short) from BlockingIOError(errno.EAGAIN, short)
            raise
        finally:
            self._starting -= 1

    async def bury(self, agent: AgentProcess) -> None:
        """End the processes that an ended agent has left as descendants of this one: its workers and their children."""
        self._pids.discard(agent.pid)
        deadline = time.monotonic() + _BURY_S
        while time.monotonic() < deadline:
            # While an agent is being started its pid is not known yet: it would be taken for a leftover.
            if not self._starting:
                left = [pid for pid in own_children() if pid not in self._pids]
                if not left:
                    return
                for pid in left:
                    _end(pid)
            await asyncio.sleep(_LOOK_S)
        self.console.say("some processes of a lost agent cannot be ended (they wait inside the kernel)")


class AgentSupervisor:
    """Runs the agent of one node, and restarts it.

    Args:
        node_agents: starts the agents.
        config: an agent's configuration; each agent gets its own socket names and cache folder.
        ask: queries the coordinator whenever an agent has ended.
    """

    def __init__(
        self, node_agents: NodeAgents, config: AgentConfig, ask: Callable[[NodeId], Awaitable[Outlook]]
    ) -> None:
        self._node_agents = node_agents
        self._config = config
        self._ask = ask
        self._agent: AgentProcess | None = None
        self._over = False
        self._short_since: Instant | None = None

    @property
    def node(self) -> NodeId:
        """The supervised node."""
        return self._config.node

    def follow(self, leader: Leader) -> None:
        """Let agents that are started from now on register with this leader."""
        self._config = msgspec.structs.replace(self._config, coordinator=leader.address, term=leader.term)

    async def keep(self) -> Departure:
        """Run agents until the job is over, the node was given back, or too many agents have ended."""
        deaths, known = 0, None
        earlier = (await self._ask(self.node)).leaving  # refers to a former node of that name, not back yet
        while True:
            try:
                how, obeyed = await self._live()
            except (OSError, RegrowError) as error:
                if not await self._may_pass(error):
                    return Departure(f"cannot be started: {error}", given_back=False)
                continue
            self._short_since = None
            if self._over or obeyed:
                return Departure(how, given_back=obeyed and not self._over)
            step, leaving = await self._ask(self.node)
            if leaving and not earlier:  # a new agent would register as a returned node and get ranks
                return Departure(how, given_back=not self._over)
            deaths, known = (deaths + 1 if step == known else 1), step
            if deaths >= DEATHS:
                return Departure(f"{how}, {deaths} times with no step committed in between", given_back=False)
            self._node_agents.console.note(f"the agent of {self.node} {how}; starting another")

    async def _live(self) -> tuple[str, bool]:
        """Run one agent to its end, then end its leftovers; returns how it ended, and True if it was ordered to end."""
        caches = self._node_agents.caches
        furnished, cache = caches.assemble(self._config)
        try:
            config = msgspec.structs.replace(furnished, socket_dir=sockets_home())
            self._agent = agent = await self._node_agents.start(config)
            if self._over:
                agent.kill()
            how = await agent.wait()
            if not self._over:
                await self._node_agents.bury(agent)
            return how, agent.obeyed
        finally:
            caches.clear(cache)

    async def _may_pass(self, error: OSError | RegrowError) -> bool:
        """Pause, and return True to try again, if descriptors, memory or disk space may soon be free again."""
        now = time.monotonic()
        if self._short_since is None:
            self._short_since = now
            self._node_agents.console.say(f"the agent of {self.node} cannot be started now: {error}")
        if self._over or not passes(error) or now - self._short_since > _PASSES_S:
            return False
        await asyncio.sleep(_AGAIN_S)
        return not self._over

    def kill(self) -> None:
        """Kill an agent that the coordinator has declared lost, which must not act again even if it was only paused."""
        if self._agent is not None:
            self._agent.kill()

    def retire(self) -> None:
        """Start no further agent, because the job is over."""
        self._over = True

    async def end(self, *, within: Seconds) -> None:
        """Give the agent `within` seconds to end by itself, then kill it."""
        self._over = True
        if self._agent is not None and self._agent.running:
            await self._agent.end(within=within)


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
