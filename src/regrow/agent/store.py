"""The node's key-value store: where ranks leave what others need to form groups. It outlives every worker."""

import asyncio
import hmac
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from regrow.core.config import AgentConfig
from regrow.core.errors import ProtocolError
from regrow.core.ids import Generation, Seconds
from regrow.core.store_messages import (
    StoreAdd,
    StoreCheck,
    StoreCompareSet,
    StoreCount,
    StoreDelete,
    StoreGet,
    StoreHello,
    StoreReply,
    StoreRequest,
    StoreSet,
    StoreWait,
)
from regrow.core.wire import MAX_FRAME_BYTES, FrameCodec

_TOTAL_LIMIT = 1 << 30
_HELLO_S: Seconds = 10.0
_WAIT_LIMIT_S: Seconds = 24 * 3600.0
_GENERATION = re.compile(r"g(\d+)/")
_log = logging.getLogger("regrow.agent")


class _Refused(Exception):
    """The sentence that goes back to the client."""


class KeyTable:
    """The keys themselves. Keys of a generation begin with `g<number>/`, and end with it.

    Args:
        limit: bytes of all keys and values together.
    """

    def __init__(self, *, limit: int = _TOTAL_LIMIT) -> None:
        self._limit = limit
        self._values: dict[str, bytes] = {}
        self._bytes = 0
        self._oldest = Generation(0)
        self._waiters: dict[str, set[asyncio.Future[None]]] = {}

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: str) -> bytes | None:
        """The value, None where there is none."""
        self._refuse_old(key)
        return self._values.get(key)

    def put(self, key: str, value: bytes) -> None:
        """Write, and wake who waits for it."""
        self._refuse_old(key)
        if len(value) > MAX_FRAME_BYTES:
            raise _Refused(f"the value of {key!r} has {len(value)} bytes; the most is {MAX_FRAME_BYTES}")
        grown = self._bytes + len(value) - len(self._values.get(key, b"")) + (0 if key in self._values else len(key))
        if grown > self._limit:
            raise _Refused(f"the store is full: {key!r} would make it {grown} bytes, the most is {self._limit}")
        self._bytes = grown
        self._values[key] = value
        for waiter in self._waiters.pop(key, ()):
            if not waiter.done():
                waiter.set_result(None)

    def delete(self, key: str) -> bool:
        """Whether it was there."""
        value = self._values.pop(key, None)
        if value is None:
            return False
        self._bytes -= len(key) + len(value)
        return True

    def missing(self, keys: Iterable[str]) -> list[str]:
        """Those that are not there."""
        wanted = list(keys)
        for key in wanted:
            self._refuse_old(key)
        return [key for key in wanted if key not in self._values]

    def arrival(self, key: str) -> "asyncio.Future[None]":
        """Done when a key that is missing is written; an error when its generation ends. Cancel it to stop waiting.

        No coroutine: it waits from the moment of the call, so that no write between a look and the wait is missed.
        """
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(key, set()).add(waiter)
        waiter.add_done_callback(lambda done: self._forget(key, done))
        return waiter

    def _forget(self, key: str, waiter: "asyncio.Future[None]") -> None:
        waiters = self._waiters.get(key)
        if waiters is not None:
            waiters.discard(waiter)
            if not waiters:
                del self._waiters[key]

    def drop_before(self, oldest: Generation) -> None:
        """Forget the keys of earlier generations, and refuse them from now on."""
        if oldest <= self._oldest:
            return
        self._oldest = oldest
        for key in [key for key in self._values if self._is_old(key)]:
            self.delete(key)
        for key in [key for key in self._waiters if self._is_old(key)]:
            for waiter in self._waiters.pop(key):
                if not waiter.done():
                    waiter.set_exception(_Refused(self._over(key)))

    def _is_old(self, key: str) -> bool:
        match = _GENERATION.match(key)
        return match is not None and int(match.group(1)) < self._oldest

    def _over(self, key: str) -> str:
        return f"the generation of {key!r} is over: the oldest kept is {self._oldest}"

    def _refuse_old(self, key: str) -> None:
        if self._is_old(key):
            raise _Refused(self._over(key))


class StoreServer:
    """Serves a `KeyTable` to whoever knows the job's token.

    Args:
        config: one node serves a unix socket, several serve TCP on `bind`.
    """

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._token = config.token.encode()
        self._table = KeyTable()
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self.address = ""

    async def __aenter__(self) -> Self:
        config = self._config
        if config.facts.nodes > 1:
            self._server = await asyncio.start_server(self._serve, config.bind, 0)
            self.address = f"tcp:{config.advertise}:{self._server.sockets[0].getsockname()[1]}"
        else:
            path = Path(config.socket_dir) / "store"
            path.unlink(missing_ok=True)
            self._server = await asyncio.start_unix_server(self._serve, str(path))
            self.address = f"unix:{path}"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def generation_formed(self, generation: Generation) -> None:
        """Keep the keys of this generation and of the one before."""
        self._table.drop_before(Generation(generation - 1))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)
        try:
            await _Conversation(self._table, self._token, reader, writer).run()
        except (ProtocolError, TimeoutError) as error:
            _log.warning("a connection to the store was closed: %s", str(error) or "no greeting came")
        except ConnectionError:
            pass  # the client died; its agent sees that
        except asyncio.CancelledError:
            pass  # this agent ends
        finally:
            writer.close()


class _Conversation:
    """One client: requests answered in order."""

    def __init__(
        self, table: KeyTable, token: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._table = table
        self._token = token
        self._reader = reader
        self._writer = writer
        self._codec: FrameCodec[StoreRequest] = FrameCodec(StoreRequest)
        self._next: asyncio.Task[StoreRequest | None] | None = None

    async def run(self) -> None:
        """Answer until the client leaves. Raises `ProtocolError` where it has no business here."""
        hello = await asyncio.wait_for(self._codec.read(self._reader), _HELLO_S)
        if hello is None:
            return
        if not isinstance(hello, StoreHello) or not hmac.compare_digest(hello.token.encode(), self._token):
            raise ProtocolError("the client does not know the job's token")
        await self._answer(StoreReply())
        try:
            while (request := await self._read()) is not None:
                await self._answer(await self._reply(request))
        finally:
            if self._next is not None:
                self._next.cancel()

    async def _answer(self, reply: StoreReply) -> None:
        self._writer.write(self._codec.frame(reply))
        await self._writer.drain()

    async def _read(self) -> StoreRequest | None:
        if self._next is None:
            return await self._codec.read(self._reader)
        reading, self._next = self._next, None
        return await reading

    async def _reply(self, request: StoreRequest) -> StoreReply:
        try:
            return await self._carry_out(request)
        except _Refused as refused:
            return StoreReply(error=str(refused))

    async def _carry_out(self, request: StoreRequest) -> StoreReply:
        table = self._table
        match request:
            case StoreSet(key=key, value=value):
                table.put(key, value)
                return StoreReply()
            case StoreGet(key=key, timeout=timeout):
                if not await self._wait([key], timeout):
                    return StoreReply(error="timeout")
                return StoreReply(value=table.get(key) or b"")
            case StoreWait(keys=keys, timeout=timeout):
                return StoreReply() if await self._wait(keys, timeout) else StoreReply(error="timeout")
            case StoreAdd(key=key, amount=amount):
                return self._add(key, amount)
            case StoreCheck(keys=keys):
                return StoreReply(number=0 if table.missing(keys) else 1)
            case StoreCompareSet(key=key, expected=expected, desired=desired):
                found = table.get(key)
                if found == expected or (found is None and not expected):
                    table.put(key, desired)
                    found = desired
                return StoreReply(value=found or b"")
            case StoreDelete(key=key):
                return StoreReply(number=int(table.delete(key)))
            case StoreCount():
                return StoreReply(number=len(table))
            case StoreHello():
                return StoreReply(error="hello was said already")

    def _add(self, key: str, amount: int) -> StoreReply:
        text = self._table.get(key) or b"0"
        try:
            number = int(text) + amount
        except ValueError:
            return StoreReply(error=f"{key!r} holds {text[:40]!r}, which is no counter")
        self._table.put(key, str(number).encode())
        return StoreReply(number=number)

    async def _wait(self, keys: list[str], timeout: Seconds) -> bool:
        """Whether all keys were there in time. A client that leaves meanwhile is not waited for."""
        deadline = asyncio.get_running_loop().time() + min(max(timeout, 0.0), _WAIT_LIMIT_S)
        while missing := self._table.missing(keys):
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                return False
            if self._next is None:
                self._next = asyncio.create_task(self._codec.read(self._reader))
            arrival = self._table.arrival(missing[0])
            watched: set[asyncio.Future[Any]] = {arrival} if self._next.done() else {arrival, self._next}
            await asyncio.wait(watched, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not arrival.done():
                arrival.cancel()
            elif (refused := arrival.exception()) is not None:
                raise refused
            if self._next.done() and self._next.result() is None:
                raise ConnectionResetError("the client left while it waited")
        return True
