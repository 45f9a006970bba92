"""Rows over HTTP: one attempt at one worker, whole or as a stream that is ended where it loops."""

import os
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol, Self

import aiohttp
import msgspec

from regrow.core.ids import Seconds
from regrow_batch.answers import NOT_READ
from regrow_batch.retries import Answered, Unanswered
from regrow_batch.rows import BatchRow
from regrow_batch.streams import StreamedText

CONNECT_S: Seconds = 10.0
PROBE_S: Seconds = 5.0
_PROBE_LIMIT = aiohttp.ClientTimeout(total=PROBE_S)
_HEADERS = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class ProbeAnswer:
    """A worker's description of itself.

    Attributes:
        why: the error, as a sentence that follows its name; empty: none.
        models: that it lists; none: it does not say.
        context: the longest row that any of these takes, in tokens; 0: it does not say.
        version: of the server; empty: it does not say.
    """

    why: str = ""
    models: frozenset[str] = frozenset()
    context: int = 0
    version: str = ""


class Sender(Protocol):
    """Sender of rows."""

    async def send(self, url: str, row: BatchRow) -> Answered | Unanswered:
        """One attempt of a row at a worker; raises nothing that belongs to the world."""
        ...

    async def probe(self, url: str) -> ProbeAnswer:
        """Ask whether a worker is there, and what it serves."""
        ...


class HttpSender:
    """Sends rows to OpenAI-compatible servers.

    Args:
        session: its connections, as many as are wanted.
        timeout: how long a whole answer may take.
    """

    def __init__(self, session: aiohttp.ClientSession, timeout: Seconds) -> None:
        self._session = session
        self._limits = aiohttp.ClientTimeout(total=timeout, sock_connect=CONNECT_S)
        self._timeout = timeout
        self._numbers = count()
        self._name = f"regrow-{secrets.token_hex(6)}-"
        self._names = re.compile(self._name.encode() + rb"(\d+)")

    @classmethod
    @asynccontextmanager
    async def open(cls, *, timeout: Seconds, key: str = "") -> AsyncIterator[Self]:
        """A sender with its connections. `key`: what workers want to be shown."""
        headers = _HEADERS | ({"Authorization": f"Bearer {key}"} if key else {})
        connector = _Connections(limit=0, ttl_dns_cache=60)
        async with aiohttp.ClientSession(
            connector=connector, headers=headers, cookie_jar=aiohttp.DummyCookieJar(), read_bufsize=1 << 18
        ) as session:
            yield cls(session, timeout)

    async def send(self, url: str, row: BatchRow) -> Answered | Unanswered:
        """One attempt of a row at a worker."""
        number = next(self._numbers)
        named = {"X-Request-Id": f"{self._name}{number}"}
        try:
            async with self._session.post(
                url + row.url, data=row.body, headers=named, timeout=self._limits, allow_redirects=False
            ) as response:
                if row.streams and response.status == 200 and "event-stream" in response.content_type:
                    outcome = await _streamed(response, row)
                else:
                    outcome = await _whole(response)
                if isinstance(outcome, Answered) and self._is_of_another(outcome, number):
                    response.close()
                    return Unanswered("answered another row than it was asked", strayed=True)
                return outcome
        except aiohttp.ConnectionTimeoutError:
            return Unanswered(f"could not be connected to within {CONNECT_S:g} s", hung=True)
        except TimeoutError:
            return Unanswered(f"gave no whole answer within {self._timeout:g} s (--timeout)", hung=True)
        except aiohttp.ClientPayloadError as error:
            return Unanswered(f"broke off its answer: {_first_line(error)}")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return Unanswered(f"cannot be reached: {_text_of(error)}")

    def _is_of_another(self, outcome: Answered, number: int) -> bool:
        """True if an answer names another request of ours than that of this number: many servers say which it was."""
        found = self._names.search(outcome.request_id.encode()) or self._names.search(outcome.body)
        return found is not None and int(found[1]) != number

    async def probe(self, url: str) -> ProbeAnswer:
        """Ask a worker how it is and which models it has; having no page for either is good enough."""
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
        kind = "HTML" if "html" in response.content_type else response.content_type
        if response.status == 200 and kind != "HTML":
            return _Page(body=body)
        why = f"answered {kind} with status {response.status} when asked for {page}"
        return _Page(why, missing=response.status in (404, 405, 501))


class _Connections(aiohttp.TCPConnector):
    """Connections of which none is used again on which something came that nobody had asked for.

    A worker, or a proxy before it, that answers a request twice would else answer the next row with that.
    """

    async def connect(self, req: Any, traces: Any, timeout: Any) -> Any:
        while True:
            found = await super().connect(req, traces, timeout)
            if found.protocol is None or not found.protocol.should_close:
                return found
            found.close()


@dataclass(frozen=True)
class _Page:
    """A page of a worker. `missing`: it has no such page."""

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
    """Models in a list, and the longest row that it takes."""
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
    """Text of a connection's error, without its library's words around it."""
    if isinstance(error, aiohttp.ClientConnectorError):
        reason = error.os_error
        if reason.errno is not None and reason.errno > 0:
            return os.strerror(reason.errno)
        return str(reason.strerror or reason).partition("\n")[0]
    return _first_line(error)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


async def _whole(response: aiohttp.ClientResponse) -> Answered:
    body, headers = await response.read(), response.headers
    name = headers.get("x-request-id", "")
    return Answered(response.status, body, response.content_type, headers.get("Retry-After", ""), name)


async def _streamed(response: aiohttp.ClientResponse, row: BatchRow) -> Answered | Unanswered:
    """Read a stream of events to its end, or to where it loops: the worker then finds that nobody listens."""
    text = StreamedText(chat=row.url.endswith("/chat/completions"))
    try:
        async for line in response.content:
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
    name = response.headers.get("x-request-id", "")
    return Answered(200, text.body(), "application/json", "", name, ended_early=text.loop)
