"""Rows over HTTP: one attempt at one worker, whole or as a stream that is ended where it loops."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol, Self

import aiohttp
import msgspec

from regrow.core.ids import Seconds
from regrow_batch.circles import LoopWatch
from regrow_batch.retries import Answered, Unanswered
from regrow_batch.rows import BatchRow, Usage

CONNECT_S: Seconds = 10.0
PROBE_S: Seconds = 5.0
_PROBE_LIMIT = aiohttp.ClientTimeout(total=PROBE_S)
_HEADERS = {"Content-Type": "application/json"}


class Sender(Protocol):
    """Who sends rows."""

    async def send(self, url: str, row: BatchRow) -> Answered | Unanswered:
        """One attempt of a row at a worker; raises nothing that belongs to the world."""
        ...

    async def probe(self, url: str) -> str:
        """Whether a worker is there; empty, or what is wrong as a sentence that follows its name."""
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

    @classmethod
    @asynccontextmanager
    async def open(cls, *, timeout: Seconds, key: str = "") -> AsyncIterator[Self]:
        """A sender with its connections. `key`: what workers want to be shown."""
        headers = _HEADERS | ({"Authorization": f"Bearer {key}"} if key else {})
        connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=60)
        async with aiohttp.ClientSession(
            connector=connector, headers=headers, cookie_jar=aiohttp.DummyCookieJar(), read_bufsize=1 << 18
        ) as session:
            yield cls(session, timeout)

    async def send(self, url: str, row: BatchRow) -> Answered | Unanswered:
        """One attempt of a row at a worker."""
        try:
            async with self._session.post(
                url + row.url, data=row.body, timeout=self._limits, allow_redirects=False
            ) as response:
                if row.streams and response.status == 200 and "event-stream" in response.content_type:
                    return await _streamed(response, row)
                body = await response.read()
                headers = response.headers
                return Answered(
                    response.status,
                    body,
                    response.content_type,
                    headers.get("Retry-After", ""),
                    headers.get("x-request-id", ""),
                )
        except aiohttp.ConnectionTimeoutError:
            return Unanswered(f"could not be connected to within {CONNECT_S:g} s", hung=True)
        except TimeoutError:
            return Unanswered(f"gave no whole answer within {self._timeout:g} s (--timeout)", hung=True)
        except aiohttp.ClientPayloadError as error:
            return Unanswered(f"broke off its answer: {_first_line(error)}")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return Unanswered(f"cannot be reached: {_first_line(error)}")

    async def probe(self, url: str) -> str:
        """Ask a worker how it is, and where it has no such page, for its models; having neither is good enough."""
        why = ""
        for page in ("/health", "/v1/models"):
            try:
                async with self._session.get(url + page, timeout=_PROBE_LIMIT, allow_redirects=False) as response:
                    await response.read()
            except TimeoutError:
                return f"did not answer within {PROBE_S:g} s"
            except (aiohttp.ClientError, OSError, ValueError) as error:
                return f"cannot be reached: {_first_line(error)}"
            kind = "HTML" if "html" in response.content_type else response.content_type
            if response.status == 200 and kind != "HTML":
                return ""
            if response.status not in (404, 405):
                why = f"answered {kind} with status {response.status} when asked for {page}"
                break
        return why


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


# --- streams -----------------------------------------------------------------------------------------------------


class _Delta(msgspec.Struct):
    content: str | None = None


class _PartOfChoice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Part(msgspec.Struct):
    id: str = ""
    created: int = 0
    model: str = ""
    choices: list[_PartOfChoice] = []
    usage: Usage | None = None


class StreamedText:
    """Puts the parts of one answer together, and sees when it runs in circles. Pure.

    Args:
        chat: whether the answer is a chat's message, or a completion's text.
    """

    def __init__(self, *, chat: bool) -> None:
        self._chat = chat
        self._first = _Part()
        self._texts: list[str] = []
        self._watch = LoopWatch()
        self._usage: Usage | None = None
        self.finish_reason = ""
        self.loop = 0
        """The period of the loop that was seen; 0: none."""

    def take(self, event: bytes) -> None:
        """Take in the JSON of one event. Raises `msgspec.DecodeError`."""
        part = msgspec.json.decode(event, type=_Part)
        if not self._first.id:
            self._first = part
        self._usage = part.usage or self._usage
        for choice in part.choices[:1]:
            text = (choice.delta.content if choice.delta is not None else choice.text) or ""
            self.finish_reason = choice.finish_reason or self.finish_reason
            if text:
                self._texts.append(text)
                self.loop = self.loop or self._watch.take(text)

    def body(self) -> bytes:
        """The answer as it would have come in one piece; of a loop as much as there was, ended by `length`."""
        text, reason = "".join(self._texts), "length" if self.loop else self.finish_reason
        said: dict[str, object] = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": reason}
        return msgspec.json.encode(
            {
                "id": self._first.id,
                "object": "chat.completion" if self._chat else "text_completion",
                "created": self._first.created,
                "model": self._first.model,
                "choices": [choice],
                "usage": self._usage,
            }
        )


async def _streamed(response: aiohttp.ClientResponse, row: BatchRow) -> Answered | Unanswered:
    """Read a stream of events to its end, or to where it loops: the worker then finds that nobody listens."""
    text = StreamedText(chat=row.url.endswith("/chat/completions"))
    try:
        async for line in response.content:
            event = line.strip().removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or event == b"[DONE]":
                continue
            text.take(event)
            if text.loop:
                response.close()
                break
    except msgspec.DecodeError as error:
        return Unanswered(f"sent an event that is not understood: {_first_line(error)}")
    if not text.finish_reason and not text.loop:
        return Unanswered("ended its stream before the answer was whole")
    name = response.headers.get("x-request-id", "")
    return Answered(200, text.body(), "application/json", "", name, ended_early=text.loop)
