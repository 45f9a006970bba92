"""Workers that the head starts itself, on this machine: each with a port, started again when it ends."""

import asyncio
import contextlib
import ctypes
import os
import shlex
import signal
import socket
from collections.abc import Callable

from regrow.core.errors import UsageError
from regrow.core.exit_codes import exit_text
from regrow.core.ids import Seconds
from regrow.infer.batch.attendance import Attendance

_PORT = "{port}"
_PR_SET_PDEATHSIG = 1
_LONGEST_WAIT: Seconds = 30.0
_SOUND_AFTER: Seconds = 60.0


class SpawnedWorkers:
    """Some workers of the same command.

    Args:
        command: with `{port}` where the port goes.
        count: how many.
        attendance: told of each.
        grace: between SIGTERM and SIGKILL.
        say: told in a sentence what becomes of them.
    """

    def __init__(
        self, command: str, count: int, attendance: Attendance, *, grace: Seconds, say: Callable[[str], None]
    ) -> None:
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise UsageError(f"--spawn {command!r} is no command: {error}") from error
        if _PORT not in command:
            raise UsageError(f"--spawn {command!r} does not say where the port goes", hint="write {port} there")
        self._count, self._attendance, self._grace, self._say = count, attendance, grace, say

    async def run(self) -> None:
        """Keep them running until this is cancelled; then end them, and what they have started."""
        await asyncio.gather(*(self._keep() for _ in range(self._count)))

    async def _keep(self) -> None:
        wait: Seconds = 0.5
        loop = asyncio.get_running_loop()
        while True:
            port, began = _free_port(), loop.time()
            url = f"http://127.0.0.1:{port}"
            words = [word.replace(_PORT, str(port)) for word in self._words]
            try:
                process = await asyncio.create_subprocess_exec(
                    *words, stdin=asyncio.subprocess.DEVNULL, start_new_session=True, preexec_fn=_end_with_parent
                )
            except OSError as error:
                raise UsageError(f"--spawn: {words[0]} cannot be started: {error.strerror}") from error
            self._attendance.join(url)
            try:
                code = await process.wait()
            except asyncio.CancelledError:
                await _end(process, self._grace)
                raise
            self._attendance.drain(url, 0.0)
            _signal(process.pid, signal.SIGKILL)
            wait = 0.5 if loop.time() - began > _SOUND_AFTER else min(2 * wait, _LONGEST_WAIT)
            self._say(f"the worker on port {port} {exit_text(code)}; another is started in {wait:g} s")
            await asyncio.sleep(wait)


def _end_with_parent() -> None:
    """Let a head that is killed leave nobody: the kernel ends its children."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


async def _end(process: asyncio.subprocess.Process, grace: Seconds) -> None:
    _signal(process.pid, signal.SIGTERM)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(process.wait())), grace)
    _signal(process.pid, signal.SIGKILL)
    await process.wait()


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
