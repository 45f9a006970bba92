"""Workers that the head starts itself; each is restarted when it ends.

They run here with a port each, or, if the command contains the head's address, anywhere: those register themselves.
"""

import asyncio
import shlex
from collections.abc import Callable
from pathlib import Path

from regrow.core.errors import UsageError
from regrow.core.exit_codes import exit_text
from regrow.core.hosts import LOOPBACK
from regrow.core.ids import Seconds
from regrow_batch.attendance import Attendance
from regrow_batch.servers.server_process import PORT, ServerProcess, free_port, placed

HEAD = "{head}"
_LONGEST_WAIT: Seconds = 30.0
_SOUND_AFTER: Seconds = 60.0


class SpawnedWorkers:
    """Workers of one command.

    Args:
        command: with `{port}` in place of the port, or with `{head}` in place of the head's address.
        count: number of workers.
        attendance: gets each worker that does not register itself.
        head: how workers reach the head.
        logs: a folder for their output, one file each.
        grace: between SIGTERM and SIGKILL.
        say: prints a sentence about each change.
    """

    def __init__(
        self,
        command: str,
        count: int,
        attendance: Attendance,
        *,
        head: str,
        logs: Path,
        grace: Seconds,
        say: Callable[[str], None],
    ) -> None:
        self._arguments = arguments_of(command)
        self._announced = HEAD in command
        self._count, self._attendance, self._head = count, attendance, head
        self._logs, self._grace, self._say = logs, grace, say

    async def run(self) -> None:
        """Keep them running until cancelled; then end them and their descendants."""
        self._logs.mkdir(exist_ok=True)
        await asyncio.gather(*(self._keep(self._logs / f"{number}.log") for number in range(1, self._count + 1)))

    async def _keep(self, log: Path) -> None:
        wait: Seconds = 0.5
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            process, url = await self._start(log)
            if url:
                self._attendance.join(url)
            try:
                code = await process.wait()
            except asyncio.CancelledError:
                await process.end(self._grace)
                raise
            if url:
                self._attendance.drain(url, 0.0)
            process.kill()
            wait = 0.5 if loop.time() - began > _SOUND_AFTER else min(2 * wait, _LONGEST_WAIT)
            named = f"the worker {url}" if url else "a worker that was started"
            self._say(f"{named} {exit_text(code)}; another is started in {wait:g} s; what it wrote is in {log}")
            await asyncio.sleep(wait)

    async def _start(self, log: Path) -> tuple[ServerProcess, str]:
        """Start a server; returns it and its address; empty: it registers itself."""
        if self._announced:
            return await ServerProcess.start([word.replace(HEAD, self._head) for word in self._arguments], log), ""
        port = free_port()
        return await ServerProcess.start(placed(self._arguments, LOOPBACK, port), log), f"http://{LOOPBACK}:{port}"


def arguments_of(command: str) -> list[str]:
    """The words of a `--spawn` command. Raises `UsageError` if the head could not find its workers."""
    try:
        arguments = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--spawn {command!r} is no command: {error}") from error
    if PORT not in command and HEAD not in command:
        raise UsageError(
            f"--spawn {command!r} has no place for the port",
            hint="write {port} there; or {head}, for a regrow batch worker",
        )
    return arguments
