"""A server as a child process: it has a port, and a guard that ends it and its descendants."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from regrow.core.errors import UsageError
from regrow.core.hosts import LOOPBACK
from regrow.core.ids import Seconds
from regrow_batch.servers import guard

PORT, HOST = "{port}", "{host}"
"""Placeholders in a command for its server's address."""
_GUARD = str(Path(guard.__file__))
_FORKED_S: Seconds = 60.0
"""Longest wait for a guard to fork its server, which takes long only on a machine that is frozen."""


class ServerProcess:
    """A running server.

    Args:
        process: its guard, which ends with the server's status.
        leader: process id of the server.
    """

    def __init__(self, process: asyncio.subprocess.Process, leader: int) -> None:
        self._process, self._leader = process, leader

    @classmethod
    async def start(cls, arguments: Sequence[str], log: Path | None = None) -> Self:
        """Start a server. Raises `UsageError`.

        Args:
            arguments: its command.
            log: file to append its output to; None: it goes to this process's output.
        """
        if shutil.which(arguments[0]) is None:
            raise UsageError(f"{arguments[0]} cannot be started: there is no such program")
        try:
            with contextlib.ExitStack() as stack:
                output = None if log is None else stack.enter_context(log.open("ab"))
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", _GUARD, *arguments),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    start_new_session=True,
                )
        except OSError as error:
            raise UsageError(f"{arguments[0]} cannot be started: {error.strerror or error}") from error
        try:
            line = b"" if process.stdout is None else await asyncio.wait_for(process.stdout.readline(), _FORKED_S)
        except TimeoutError:
            process.kill()
            await process.wait()
            raise UsageError(
                f"{arguments[0]} cannot be started: its guard forked nothing for {_FORKED_S:g} s"
            ) from None
        if not line.strip().isdigit():
            raise UsageError(f"{arguments[0]} cannot be started: its guard ended with code {await process.wait()}")
        return cls(process, int(line))

    async def wait(self) -> int:
        """Its exit code, once it and its descendants have ended."""
        code = await self._process.wait()
        if code == -signal.SIGKILL and self._leader:
            # The guard itself was killed: kill the server's group. Only once, as another process may get the number.
            leader, self._leader = self._leader, 0
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(leader, signal.SIGKILL)
        return -signal.SIGKILL if code == guard.KILLED else code

    def kill(self) -> None:
        """Kill it and its descendants."""
        self._send(guard.END)

    async def end(self, grace: Seconds) -> None:
        """Ask it to end, and kill it after `grace`."""
        self._send(guard.ASK)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.wait(), grace)
        self.kill()
        await self.wait()

    def _send(self, what: bytes) -> None:
        stream = self._process.stdin
        if stream is not None and not stream.is_closing() and self._process.returncode is None:
            stream.write(what)


def placed(arguments: Sequence[str], host: str, port: int) -> list[str]:
    """A command with `{host}` and `{port}` replaced."""
    return [word.replace(PORT, str(port)).replace(HOST, host) for word in arguments]


def free_port(host: str = LOOPBACK) -> int:
    """A port that is free at present. Raises `UsageError` if this machine does not have that address."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family) as listener:
            return int(listener.getsockname()[1])
    except OSError as error:
        raise UsageError(f"{host} is no address of this machine: {error.strerror or error}") from error
