"""Sends rows over HTTP: one attempt at one worker, as a whole answer or as a stream that is ended where it loops."""

import asyncio
import os
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol, Self
from weakref import WeakSet

import aiohttp
import msgspec

from regrow.core.ids import Seconds
from regrow_batch.answers import NOT_READ
from regrow_batch.retries import Answered, Doubtful, Unanswered, judge
from regrow_batch.rows import BatchRow
from regrow_batch.streams import StreamedText

CONNECT_S: Seconds = 10.0
PROBE_S: Seconds = 5.0
_PROBE_LIMIT = aiohttp.ClientTimeout(total=PROBE_S)
_HEADERS = {"Content-Type": "application/json"}
_MOST_BYTES = 1 << 30
"""Largest answer: a worker that sends more may never end, and would fill this machine's memory."""
_ENDLESS = f"sent more than {_MOST_BYTES >> 30} GiB as its answer"


@dataclass(frozen=True)
class ProbeAnswer:
    """Result of a probe.

    Attributes:
        why: the error, phrased to follow the worker's name; empty: none.
        models: those that it lists; none: it lists nothing.
        context: the longest row that any of these accepts, in tokens; 0: not known.
        version: of the server; empty: not known.
    """

    why: str = ""
    models: frozenset[str] = frozenset()
    context: int = 0
    version: str = ""


class Sender(Protocol):
    """Sends rows to workers."""

    async def send(self, url: str, row: BatchRow) -> Answered | Unanswered:
        """Try a row at a worker once. Network errors are returned, not raised."""
        ...

    async def probe(self, url: str) -> ProbeAnswer:
        """Ask a worker for its health and its models."""
        ...


class HttpSender:
    """Sends rows to OpenAI-compatible servers.

    Args:
        session: pooled connections, without a limit on their number.
        single: opens a connection for each request.
        timeout: of a whole attempt, in seconds.
    """

    def __init__(self, session: aiohttp.ClientSession, single: aiohttp.ClientSession, timeout: Seconds) -> None:
        self._session, self._single = session, single
        self._limits = aiohttp.ClientTimeout(total=timeout, sock_connect=CONNECT_S)
        self._timeout = timeout
        self._numbers = count()
        self._name = f"regrow-{secrets.token_hex(6)}-"
        self._names = re.compile(self._name.encode() + rb"(\d+)")

    @classmethod
    @asynccontextmanager
    async def open(cls, *, timeout: Seconds, key: str = "") -> AsyncIterator[Self]:
        """A sender with open connections. `key`: the API key that is sent to workers."""
        headers = _HEADERS | ({"Authorization": f"Bearer {key}"} if key else {})

        def session(connector: aiohttp.BaseConnector) -> aiohttp.ClientSession:
            jar = aiohttp.DummyCookieJar()
            return aiohttp.ClientSession(connector=connector, headers=headers, cookie_jar=jar, read_bufsize=1 << 18)

        async with (
            session(_Connections(limit=0, ttl_dns_cache=60)) as many,
            session(aiohttp.TCPConnector(limit=0, ttl_dns_cache=60, force_close=True)) as single,
        ):
            yield cls(many, single, timeout)

    async def send(self, url: str, row: BatchRow) -> Answered | Unanswered:
        """Try a row at a worker once.

        A refusal on a reused connection may be a second answer to the row before it, since few servers name the request
        in a refusal. The row is then sent once more, on a connection of its own.
        """
        outcome, named, used_before = await self._named(self._session, url, row)
        if isinstance(outcome, Answered) and not named and used_before and _is_refusal(outcome, row):
            outcome, _, _ = await self._named(self._single, url, row)
        return outcome

    async def _named(
        self, session: aiohttp.ClientSession, url: str, row: BatchRow
    ) -> tuple[Answered | Unanswered, bool, bool]:
        """The outcome, whether it names this request, and whether its connection was used before."""
        connection = _Connection()
        _CONNECTION.set(connection)
        number = next(self._numbers)
        outcome = await self._send(session, url, row, number)
        found = self._named_by(outcome) if isinstance(outcome, Answered) else None
        if found not in (None, number):
            # The pool already has the connection back, and the answer to this row may still arrive on it.
            connection.abort()
            outcome = Unanswered("answered another row than it was asked", strayed=True)
        return outcome, found is not None, connection.used_before

    async def _send(
        self, session: aiohttp.ClientSession, url: str, row: BatchRow, number: int
    ) -> Answered | Unanswered:
        named = {"X-Request-Id": f"{self._name}{number}"}
        try:
            async with session.post(
                url + row.url, data=row.body, headers=named, timeout=self._limits, allow_redirects=False
            ) as response:
                if row.streams and response.status == 200 and "event-stream" in response.content_type:
                    return await _streamed(response, row)
                return await _whole(response)
        except aiohttp.ConnectionTimeoutError:
            return Unanswered(f"could not be connected to within {CONNECT_S:g} s", hung=True)
        except TimeoutError:
            return Unanswered(f"gave no whole answer within {self._timeout:g} s (--timeout)", hung=True)
        except aiohttp.ClientPayloadError as error:
            return Unanswered(f"broke off its answer: {_first_line(error)}")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return Unanswered(f"cannot be reached: {_text_of(error)}")

    def _named_by(self, outcome: Answered) -> int | None:
        """The number of the request that an answer names; None: it names none of ours."""
        found = self._names.search(outcome.request_id.encode()) or self._names.search(outcome.body)
        return None if found is None else int(found[1])

    async def probe(self, url: str) -> ProbeAnswer:
        """Ask a worker for its health and its models. A server without these pages counts as healthy."""
        health = await self._page(url, "/health")
        if health.why and not health.missing:
            return ProbeAnswer(health.why)
        listed = await self._page(url, "/v1/models")
        if health.missing and listed.why and not listed.missing:
            return ProbeAnswer(listed.why)
        models, context = _models(listed.body)
        version = await self._page(url, "/version") if models else _Page()
        return ProbeAnswer("", models, context, _version(version.body))

    async def _page(self, url: str, page: str) -> "_Page":
        try:
            async with self._session.get(url + page, timeout=_PROBE_LIMIT, allow_redirects=False) as response:
                body = await response.read()
        except TimeoutError:
            return _Page(f"did not answer within {PROBE_S:g} s")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return _Page(f"cannot be reached: {_text_of(error)}")
        kind = "HTML" if "html" in response.content_type else _sound(response.content_type)
        if response.status == 200 and kind != "HTML":
            return _Page(body=body)
        why = f"answered {kind} with status {response.status} when asked for {page}"
        return _Page(why, missing=response.status in (404, 405, 501))


class _Connection:
    """The connection of one attempt. `used_before`: it has had another request."""

    def __init__(self) -> None:
        self.used_before = False
        self._transport: asyncio.Transport | None = None

    def take(self, transport: asyncio.Transport | None, *, used_before: bool) -> None:
        """Record the connection that the attempt got."""
        self._transport, self.used_before = transport, used_before

    def abort(self) -> None:
        """Abort the connection. An attempt that has taken it meanwhile sends its row again."""
        if self._transport is not None:
            self._transport.abort()


_CONNECTION: ContextVar[_Connection] = ContextVar("connection")
"""The connection of the attempt that this task makes."""


class _Connections(aiohttp.TCPConnector):
    """Never reuses a connection on which unrequested data has arrived.

    Otherwise the second of two answers by a worker, or by a proxy, would be taken for the answer to the next row.
    """

    def __init__(self, *, limit: int, ttl_dns_cache: int) -> None:
        super().__init__(limit=limit, ttl_dns_cache=ttl_dns_cache)
        self._used: WeakSet[Any] = WeakSet()

    async def connect(self, req: Any, traces: Any, timeout: Any) -> Any:
        while True:
            found = await super().connect(req, traces, timeout)
            if found.protocol is None or not found.protocol.should_close:
                break
            found.close()
        used_before = found.protocol in self._used
        self._used.add(found.protocol)
        if (mine := _CONNECTION.get(None)) is not None:
            mine.take(found.transport, used_before=used_before)
        return found


@dataclass(frozen=True)
class _Page:
    """A page of a worker. `missing`: the worker has no such page."""

    why: str = ""
    missing: bool = False
    body: bytes = b""


class _Model(msgspec.Struct):
    id: str
    max_model_len: Any = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


class _Version(msgspec.Struct):
    version: str = ""


def _models(body: bytes) -> tuple[frozenset[str], int]:
    """Models in a list, and the longest row that it allows."""
    try:
        found = msgspec.json.decode(body, type=_Models).data
    except NOT_READ:
        return frozenset(), 0
    lengths = [each.max_model_len for each in found if isinstance(each.max_model_len, int)]
    return frozenset(each.id for each in found), max(lengths, default=0)


def _version(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_Version).version
    except NOT_READ:
        return ""


def _text_of(error: Exception) -> str:
    """Text of a connection error without the library's prefix."""
    if isinstance(error, aiohttp.ClientConnectorError):
        reason = error.os_error
        if reason.errno is not None and reason.errno > 0:
            return os.strerror(reason.errno)
        return str(reason.strerror or reason).partition("\n")[0]
    return _first_line(error)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _is_refusal(outcome: Answered, row: BatchRow) -> bool:
    verdict = judge(outcome, row, wall=0.0)
    return isinstance(verdict, Doubtful) and verdict.answer is None


async def _whole(response: aiohttp.ClientResponse) -> Answered | Unanswered:
    parts, size = list[bytes](), 0
    async for part in response.content.iter_any():
        parts.append(part)
        if (size := size + len(part)) > _MOST_BYTES:
            response.close()
            return Unanswered(_ENDLESS)
    again, name = _header(response, "Retry-After"), _header(response, "X-Request-Id")
    return Answered(response.status, b"".join(parts), _sound(response.content_type), again, name)


async def _streamed(response: aiohttp.ClientResponse, row: BatchRow) -> Answered | Unanswered:
    """Read a stream of events to its end, or until it loops: closing the connection then ends the request."""
    text = StreamedText(chat=row.url.endswith("/chat/completions"))
    size = 0
    try:
        async for line in response.content:
            if (size := size + len(line)) > _MOST_BYTES:
                response.close()
                return Unanswered(_ENDLESS)
            if not line.startswith(b"data:"):
                continue
            event = line.strip().removeprefix(b"data:").strip()
            if event == b"[DONE]":
                continue
            text.take(event)
            if text.loop or text.error:
                response.close()
                break
    except (msgspec.DecodeError, RecursionError) as error:
        return Unanswered(f"sent an event that is not understood: {_first_line(error)}")
    if not text.loop and not text.error and not text.finished:
        return Unanswered("ended its stream before the answer was whole")
    name = _header(response, "X-Request-Id")
    return Answered(200, text.body(), "application/json", "", name, ended_early=text.loop)


def _header(response: aiohttp.ClientResponse, name: str) -> str:
    return _sound(response.headers.get(name, ""))


def _sound(text: str) -> str:
    """A header's text, with U+FFFD for bytes that are not UTF-8, since it appears in results and messages."""
    return text.encode(errors="surrogateescape").decode(errors="replace")
