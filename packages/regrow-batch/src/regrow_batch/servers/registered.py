"""A server that registers itself with a batch: runs while it is needed, and leaves without losing a row.

Started by a manager of machines: Slurm, Kubernetes, systemd, a shell. When it is asked to end, it asks the head to
drain it, waits for its rows, and then ends the server.
"""

import asyncio
import signal
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp
import msgspec

from regrow.core.errors import UsageError
from regrow.core.exit_codes import OK, RUN_AGAIN, SCRIPT_ERROR, exit_text
from regrow.core.hosts import LOOPBACK, address_of, is_loopback, route_to
from regrow.core.ids import Seconds
from regrow.core.process.tasks import TaskScope
from regrow_batch.attendance import LEASE_S, RENEW_S
from regrow_batch.control import PATH, WorkerRequest, read_endpoint
from regrow_batch.servers.server_process import PORT, ServerProcess, free_port, placed

_LOOK_S: Seconds = 0.1
_ASK_S: Seconds = 5.0
_END_S: Seconds = 5.0
_BELONGS, _UNAUTHORIZED, _NOT_HERE, _GONE = 200, 401, 404, 410


@dataclass(frozen=True)
class WorkerOptions:
    """Arguments of a worker.

    Attributes:
        head: the head's address; empty: the head is on this machine, and `endpoint` contains its address.
        endpoint: the file with the address and the token.
        token: for a head with an address.
        command: starts the server; `{port}` and `{host}` are replaced by its address.
        port: its port; 0: any free port.
        advertise: host name under which the head reaches this machine; empty: found from the route to the head.
        cap: most rows at once; 0: the head's own.
        grace: from the request to end to the server's end.
        patience: time that the head may not answer.
    """

    head: str
    endpoint: Path
    command: tuple[str, ...]
    token: str = ""
    port: int = 0
    advertise: str = ""
    cap: int = 0
    grace: Seconds = 30.0
    patience: Seconds = 600.0


class HeadReply(NamedTuple):
    """Answer of the head. `status`: 0: no answer. `refused`: the connection was refused. `text`: the error."""

    status: int
    text: str = ""
    refused: bool = False


class _HeadLink:
    """Sends requests to the head at its present address."""

    def __init__(self, session: aiohttp.ClientSession, options: WorkerOptions) -> None:
        self._session, self._options = session, options

    async def send(self, request: WorkerRequest) -> HeadReply:
        try:
            url, token = self._options.head, self._options.token
            if not url:
                endpoint = read_endpoint(self._options.endpoint)
                url, token = endpoint.url, endpoint.token
            async with self._session.post(
                url + PATH, data=msgspec.json.encode(request), headers={"Authorization": f"Bearer {token}"}
            ) as answer:
                return HeadReply(answer.status, (await answer.text(errors="replace")).partition("\n")[0][:200])
        except UsageError as error:
            return HeadReply(0, error.cause, refused=True)
        except TimeoutError:
            return HeadReply(0, f"it did not answer within {_ASK_S:g} s")
        except aiohttp.ClientConnectorError as error:
            return HeadReply(0, f"no process listens there ({error.os_error.strerror or error.os_error})", refused=True)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return HeadReply(0, str(error).partition("\n")[0])


class RegisteredWorker:
    """One server, from its start to its end.

    Args:
        options: the arguments.
        say: prints a sentence about each change.
    """

    def __init__(self, options: WorkerOptions, say: Callable[[str], None]) -> None:
        if not any(PORT in word for word in options.command):
            raise UsageError(f"{options.command[0]}: the command has no place for the port", hint="write {port} there")
        self._options, self._say = options, say
        self._asked = asyncio.Event()
        self._url = ""
        self._server: ServerProcess | None = None

    async def run(self) -> int:
        """Run until asked to end, no longer needed, or the server ends; returns the exit code. Raises `UsageError`."""
        async with AsyncExitStack() as stack:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self._ask_to_go)
                stack.callback(loop.remove_signal_handler, number)
            limit = aiohttp.ClientTimeout(total=_ASK_S)
            link = _HeadLink(await stack.enter_async_context(aiohttp.ClientSession(timeout=limit)), self._options)
            host = self._options.advertise or own_address(self._options.head)
            port = self._options.port or free_port(host if not self._options.advertise else LOOPBACK)
            self._url = f"http://{address_of(host, port)}"
            self._server = server = await ServerProcess.start(placed(self._options.command, host, port))
            try:
                return await self._attend(server, link)
            finally:
                server.kill()
                await server.wait()

    def _ask_to_go(self) -> None:
        if self._asked.is_set() and self._server is not None:
            self._server.kill()
        self._asked.set()

    async def _attend(self, server: ServerProcess, link: _HeadLink) -> int:
        async with TaskScope() as scope:
            ended, announced = scope.start(server.wait()), scope.start(self._announce(link))
            waiting: list[asyncio.Task[int] | asyncio.Task[bool]] = [ended, announced, scope.start(self._asked.wait())]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                await link.send(WorkerRequest(self._url, leave=True, grace=0.0, lease=LEASE_S))
                self._say(f"{self._options.command[0]} {exit_text(ended.result())} without being asked to")
                return ended.result() if ended.result() > 0 else SCRIPT_ERROR
            code = announced.result() if announced.done() else OK
            by = time.monotonic() + self._options.grace
            if not announced.done():
                announced.cancel()
                await self._drain(link, ended, by - min(_END_S, self._options.grace / 4))
            await server.end(max(0.0, by - time.monotonic()))
            return code

    async def _announce(self, link: _HeadLink) -> int:
        """Renew until the head needs no worker or does not answer; returns the exit code. Raises `UsageError`."""
        met, shown, answered_at = False, "", time.monotonic()
        while True:
            request = WorkerRequest(self._url, cap=self._options.cap, lease=LEASE_S, again=met)
            answer = await link.send(request)
            if answer.status == _BELONGS:
                if not met or shown:
                    self._say(f"{self._url} belongs to the batch of {self._head}")
                met, shown, answered_at = True, "", time.monotonic()
            elif answer.status == _GONE:
                self._say(f"{self._url} is no longer needed: {answer.text}")
                return OK
            elif answer.status == _UNAUTHORIZED and not met:
                raise UsageError(f"the head {self._head} has another token", hint="see --token-file")
            else:
                why = answer.text if not answer.status else f"it answered with status {answer.status}: {answer.text}"
                if time.monotonic() - answered_at > self._options.patience:
                    self._say(f"no head was found for {self._options.patience:g} s (--patience): {self._head}: {why}")
                    return RUN_AGAIN
                if not shown:
                    self._say(f"no head at {self._head}: {why}; waiting for one")
                shown = why
            await asyncio.sleep(RENEW_S if answer.status == _BELONGS else RENEW_S / 4)

    async def _drain(self, link: _HeadLink, ended: "asyncio.Task[int]", by: float) -> None:
        """Ask for no more rows, and wait for those under way."""
        while (left := by - time.monotonic()) > 0 and not ended.done():
            answer = await link.send(WorkerRequest(self._url, leave=True, grace=left, lease=LEASE_S))
            if answer.status in (_NOT_HERE, _GONE) or answer.refused:
                return
            await asyncio.wait([ended], timeout=_LOOK_S)
        self._say(f"{self._url} ends with rows under way: they go elsewhere")

    @property
    def _head(self) -> str:
        return self._options.head or str(self._options.endpoint.name.removesuffix(".control"))


def own_address(head: str) -> str:
    """Address of this machine at which the head reaches it. Raises `RegrowError` if there is no route."""
    if not head:
        return LOOPBACK
    parts = urlsplit(head)
    host = parts.hostname or LOOPBACK
    return LOOPBACK if is_loopback(host) else route_to(host, parts.port or 80, flag="the head's address")
