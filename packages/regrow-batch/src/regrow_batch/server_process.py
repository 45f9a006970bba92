"""A server as a process of ours: in a group of its own, with a port, never left behind."""

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
from collections.abc import Sequence
from typing import Self

from regrow.core.errors import UsageError
from regrow.core.hosts import LOOPBACK
from regrow.core.ids import Seconds

PORT, HOST = "{port}", "{host}"
"""What stands in a command where its server is to listen."""
_PR_SET_PDEATHSIG = 1


class ServerProcess:
    """A server that runs.

    Args:
        process: its leader.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, words: Sequence[str]) -> Self:
        """Start one. The kernel ends its leader with this process. Raises `UsageError`."""
        try:
            process = await asyncio.create_subprocess_exec(
                *words, stdin=asyncio.subprocess.DEVNULL, start_new_session=True, preexec_fn=_end_with_parent
            )
        except OSError as error:
            raise UsageError(f"{words[0]} cannot be started: {error.strerror}") from error
        return cls(process)

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        return await self._process.wait()

    def kill(self) -> None:
        """End it at once, and what it has started."""
        _signal(self._process.pid, signal.SIGKILL)

    async def end(self, grace: Seconds) -> None:
        """Ask it to end, and after `grace` end it."""
        _signal(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), grace)
        self.kill()
        await self._process.wait()


def placed(words: Sequence[str], host: str, port: int) -> list[str]:
    """A command with `{host}` and `{port}` replaced."""
    return [word.replace(PORT, str(port)).replace(HOST, host) for word in words]


def free_port(host: str = LOOPBACK) -> int:
    """A port that nobody has at present. Raises `UsageError` where this machine does not have that address."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family) as listener:
            return int(listener.getsockname()[1])
    except OSError as error:
        raise UsageError(f"{host} is no address of this machine: {error.strerror or error}") from error


def _end_with_parent() -> None:
    """Let a parent that is killed leave nobody: the kernel ends its children."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
