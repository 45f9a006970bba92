"""Calls of a function to the servers of a batch: each becomes a row of the head, and its caller awaits the result."""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from regrow.core.errors import RegrowError
from regrow_batch.answers import Tokens, Usage, read_result
from regrow_batch.journal import Journal
from regrow_batch.rows import BadRow, BatchRow, RowReading, read_row
from regrow_batch.scanning import OPEN, Feed
from regrow_batch.tables.making import CHAT, COMPLETIONS, EMBEDDINGS, plain


class CallFailed(RegrowError):
    """A call failed for good.

    Attributes:
        code: kind of failure, for example `http_400`, `gave_up`.
        fault: the side at fault: `row`, `worker`, `pool`, `unknown`.
        response: the server's answer, if there was one.
    """

    def __init__(self, code: str, message: str, fault: str = "", response: Any = None) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.fault, self.response = code, fault, response


class Calls:
    """Calls of one row's function to servers. Users do not construct it.

    Args:
        line: queue of the calls.
    """

    def __init__(self, line: "CallLine") -> None:
        self._line = line
        self.spent = Tokens()
        """Tokens of this row's calls."""

    async def post(self, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Post a body to a page, for example `/v1/chat/completions`; returns the answer's JSON. Raises `CallFailed`."""
        answer = await self._line.ask(url, body)
        with suppress(msgspec.ValidationError):  # an endpoint that counts other units
            self.spent.add(msgspec.convert(answer.get("usage") or {}, Usage).tokens)
        return answer

    async def chat(self, messages: str | Sequence[Mapping[str, Any]], **body: Any) -> dict[str, Any]:
        """Continue a chat; a single text is sent as a user message. Raises `CallFailed`."""
        said = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        return await self.post(CHAT, {"messages": said, **body})

    async def complete(self, prompt: str, **body: Any) -> dict[str, Any]:
        """Complete a text. Raises `CallFailed`."""
        return await self.post(COMPLETIONS, {"prompt": prompt, **body})

    async def embed(self, text: str | Sequence[str], **body: Any) -> dict[str, Any]:
        """Ask for embeddings. Raises `CallFailed`."""
        return await self.post(EMBEDDINGS, {"input": text, **body})


class CallLine:
    """The calls that wait to be sent, and those that wait for their answers.

    Args:
        model: used if a body names none; empty: none.
    """

    def __init__(self, model: str = "") -> None:
        self._model = model
        self.states = bytearray()
        """The state of each call, as the head keeps it for rows."""
        self.wanted = asyncio.Event()
        self.waiting: deque[BatchRow | BadRow] = deque()
        self.ended = False
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def ask(self, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Queue a call and wait for its answer. Raises `CallFailed`."""
        number = len(self.states)
        self.states.append(OPEN)
        fields = plain(body)
        if self._model:
            fields = {"model": self._model} | fields
        row = read_row(
            msgspec.json.encode({"custom_id": f"call-{number}", "url": url, "body": fields}), number, RowReading()
        )
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self.waiting.append(row)
        self.wanted.set()
        try:
            return await answer
        finally:
            del self._answers[number]

    def answered(self, number: int, result: bytes) -> None:
        """Deliver a call's result line. It is dropped if the caller no longer waits."""
        future = self._answers.get(number)
        if future is None or future.done():
            return
        line = read_result(result)
        error, body = line.get("error"), (line.get("response") or {}).get("body")
        if error is None and isinstance(body, dict):
            future.set_result(body)
            return
        error = error or {"code": "no_object", "message": "the answer is no JSON object"}
        future.set_exception(CallFailed(error["code"], error["message"], error.get("fault") or "", body))

    def close(self) -> None:
        """End the queue: no more calls come."""
        self.ended = True
        self.wanted.set()


class CallFeed(Feed):
    """Gives the head the waiting calls. It may be empty while more calls will come."""

    def __init__(self, line: CallLine) -> None:
        self._calls = line

    @property
    def ended(self) -> bool:
        """True if no more calls will come."""
        return self._calls.ended and not self._calls.waiting

    def read(self) -> list[BatchRow | BadRow]:
        """The calls that wait now."""
        rows = []
        while self._calls.waiting:
            rows.append(self._calls.waiting.popleft())
        return rows

    def close(self) -> None:
        """Nothing is open."""


class CallResults(Journal):
    """Delivers the results of calls to their callers. Only the results of rows are kept."""

    def __init__(self, line: CallLine, path: Path) -> None:
        self._calls, self.path = line, path

    def append(self, number: int, result: bytes) -> None:
        """Deliver a result."""
        self._calls.answered(number, result)

    def flush(self) -> None:
        """Nothing waits."""

    def sync(self) -> None:
        """Nothing is written."""
