"""A node's agent as a child process of the launcher."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence

import msgspec

from regrow.core.config import AgentConfig
from regrow.core.exit_codes import exit_text
from regrow.core.ids import Seconds

AGENT_COMMAND = (sys.executable, "-m", "regrow.agent")


class AgentProcess:
    """The agent, in a session of its own, so that the terminal's Ctrl-C reaches only the launcher."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    @classmethod
    async def start(cls, config: AgentConfig, command: Sequence[str] = AGENT_COMMAND) -> "AgentProcess":
        """Start the agent and send its configuration through a pipe, so that the token shows in no process list.

        The agent's parent-death signal is bound to the calling thread, which must be the main one.
        """
        process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, start_new_session=True)
        if process.stdin is None:
            raise RuntimeError("the agent was started without a pipe")
        try:
            process.stdin.write(msgspec.json.encode(config))
            await process.stdin.drain()
        except ConnectionError:
            pass  # The agent has ended already; `wait` returns how.
        process.stdin.close()
        return cls(process)

    @property
    def running(self) -> bool:
        """True until the agent's end was observed."""
        return self._process.returncode is None

    @property
    def obeyed(self) -> bool:
        """True if the agent has ended on the coordinator's order."""
        return self._process.returncode == 0

    def kill(self) -> None:
        """Kill the agent at once, unless it has ended by itself."""
        # Not with `Process.kill`: that reaps an ended process, whose exit code asyncio then reports as unknown.
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    async def wait(self) -> str:
        """Wait, without a limit, until the agent has ended; returns how, in words."""
        return exit_text(await self._process.wait())

    async def end(self, *, within: Seconds) -> None:
        """Give the agent `within` seconds to end by itself, then kill it."""
        try:
            await asyncio.wait_for(self._process.wait(), within)
        except TimeoutError:
            self.kill()
            await self._process.wait()
