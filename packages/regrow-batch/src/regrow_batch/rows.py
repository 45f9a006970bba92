"""A row of the input, and the line that becomes of it: OpenAI's batch format. Pure."""

import re
from dataclasses import dataclass
from typing import Any

import msgspec

ANSWER_TOKENS = 256
"""What an answer is taken to cost where the row sets no limit."""
BYTES_A_TOKEN = 4
_NAME = re.compile(rb'"custom_id"\s*:\s*("(?:[^"\\]|\\.)*")')
_PLAIN = {"/v1/chat/completions", "/v1/completions"}


class _Named(msgspec.Struct):
    custom_id: str


class _Line(msgspec.Struct):
    custom_id: str
    body: msgspec.Raw
    url: str
    method: str = "POST"


class _Asked(msgspec.Struct):
    max_tokens: int | float | None = None
    max_completion_tokens: int | float | None = None
    n: int | float | None = None
    stream: bool | None = None
    tools: Any = None
    logprobs: Any = None


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class RowError(msgspec.Struct):
    """Why a row has no answer."""

    code: str
    message: str


class _Result(msgspec.Struct, omit_defaults=True):
    id: str
    custom_id: str
    response: _Response | None
    error: RowError | None
    degenerate: dict[str, str | int] | None = None


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A row to be sent.

    Attributes:
        number: its place in the input, from 0; blank lines are no rows.
        custom_id: what the user calls it.
        url: the path at the worker, `/v1/chat/completions` for example.
        body: the request, in JSON.
        tokens: what it is taken to cost: prompt and answer.
        streams: whether its answer is asked for as a stream, to be ended where it loops.
        prefix: the beginning of the prompt, for affinity.
    """

    number: int
    custom_id: str
    url: str
    body: bytes
    tokens: int
    streams: bool = False
    prefix: bytes = b""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row with a name that cannot be sent."""

    number: int
    custom_id: str
    message: str


@dataclass(frozen=True)
class RowReading:
    """How rows are read: parameters that make results others, so they are part of the job's fingerprint.

    Attributes:
        model: asked for instead of each row's own; empty: the row's own.
        url: sent to instead of each row's own; empty: the row's own.
        ends_loops: whether answers are streamed and ended where they loop.
        prefix_bytes: how much of a prompt decides about affinity; 0: none. No part of the fingerprint.
    """

    model: str = ""
    url: str = ""
    ends_loops: bool = False
    prefix_bytes: int = 0


class _Prompts(msgspec.Struct):
    messages: Any = None
    prompt: Any = None
    input: Any = None


def name_of(line: bytes) -> str:
    """The `custom_id` of a line, also of one that cannot be sent. Raises `ValueError`, which says what is wrong."""
    try:
        name = msgspec.json.decode(line, type=_Named).custom_id
    except msgspec.ValidationError as error:
        raise ValueError(_said(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        name = _readable_name(line)
        if not name:
            raise ValueError(f"is not JSON: {error}") from None
    if not name:
        raise ValueError("has an empty custom_id")
    return name


def _readable_name(line: bytes) -> str:
    """The first `custom_id` of a line that is no sound JSON; empty where that cannot be read either."""
    found = _NAME.search(line)
    try:
        return msgspec.json.decode(found.group(1), type=str) if found is not None else ""
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""


def read_row(line: bytes, number: int, reading: RowReading) -> BatchRow | BadRow:
    """A row from its line, which has a `custom_id`."""
    try:
        found = msgspec.json.decode(line, type=_Line)
        msgspec.json.decode(
            found.body
        )  # all of it: what is passed over is not looked at, and a worker would choke on it
        asked = msgspec.json.decode(found.body, type=_Asked)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return BadRow(number, name_of(line), _said(error))
    url = reading.url or found.url
    if found.method != "POST":
        return BadRow(number, found.custom_id, f"has the method {found.method!r}, and only POST is sent")
    if not url.startswith("/") or url.startswith("//"):
        return BadRow(number, found.custom_id, f"has the url {url!r}, which is no path such as /v1/chat/completions")
    if asked.stream:
        return BadRow(number, found.custom_id, "asks for a stream, which a batch has none of (leave out `stream`)")
    streams = reading.ends_loops and url in _PLAIN and _is_plain(asked)
    body = bytes(found.body)
    if reading.model or streams:
        body = _changed(body, reading.model, streams)
    answer = _count(asked.max_completion_tokens) or _count(asked.max_tokens) or ANSWER_TOKENS
    tokens = len(body) // BYTES_A_TOKEN + answer * (_count(asked.n) or 1)
    return BatchRow(number, found.custom_id, url, body, tokens, streams, _prompt(body, reading.prefix_bytes))


def _count(value: float | None) -> int:
    """A number of tokens or of choices, as an estimate; 0: none is said. The worker judges what it is given."""
    return max(int(value), 1) if value else 0


def _said(error: Exception) -> str:
    return f"is no row of a batch: {error}"


def _is_plain(asked: _Asked) -> bool:
    """Whether an answer's pieces can be put together again: one choice of text alone."""
    return asked.n in (None, 1) and not asked.tools and not asked.logprobs


def _changed(body: bytes, model: str, streams: bool) -> bytes:
    fields: dict[str, object] = dict(msgspec.json.decode(body, type=dict[str, msgspec.Raw]))
    if model:
        fields["model"] = model
    if streams:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return msgspec.json.encode(fields)


def _prompt(body: bytes, count: int) -> bytes:
    """The first bytes of the prompt: of all messages, one behind the other, without what JSON has around them."""
    if not count:
        return b""
    asked = msgspec.json.decode(body, type=_Prompts)
    messages = asked.messages if isinstance(asked.messages, list) else [asked.prompt or asked.input]
    parts: list[bytes] = []
    for message in messages:
        said = message.get("content") if isinstance(message, dict) else message
        parts.append(said.encode() if isinstance(said, str) else msgspec.json.encode(said))
        if sum(map(len, parts)) >= count:
            break
    return b"".join(parts)[:count]


# --- results -----------------------------------------------------------------------------------------------------


class Answer(msgspec.Struct):
    """What a worker's JSON says of itself, as far as it is needed here."""

    id: str = ""
    choices: list["AnswerChoice"] = []
    usage: "Usage | None" = None

    @property
    def tokens(self) -> int:
        """Of the answer, if it says."""
        return (self.usage.completion_tokens or 0) if self.usage is not None else 0


class AnswerText(msgspec.Struct):
    """A message of a chat."""

    content: str | None = None


class AnswerChoice(msgspec.Struct):
    """One of the answers to a row."""

    finish_reason: str | None = None
    text: str | None = None
    message: AnswerText | None = None

    @property
    def words(self) -> str:
        """The text, of a chat or of a completion."""
        return self.text or (self.message.content if self.message is not None else None) or ""


class Usage(msgspec.Struct):
    """What a row has cost, in tokens."""

    completion_tokens: int | None = None
    prompt_tokens: int | None = None


def read_answer(body: bytes | msgspec.Raw) -> Answer | None:
    """An answer that is a JSON object; None: it is something else, an HTML page for example."""
    try:
        return msgspec.json.decode(body, type=Answer)
    except msgspec.ValidationError:
        # Sound JSON in another shape: an endpoint whose answers are not looked into.
        return Answer() if bytes(body).lstrip()[:1] == b"{" and _is_sound(bytes(body)) else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _is_sound(body: bytes) -> bool:
    try:
        msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True


def answered(
    row: BatchRow, status: int, body: bytes, request_id: str, degenerate: dict[str, str | int] | None = None
) -> bytes:
    """The line of a row that was answered. `body`: JSON."""
    return _line(row, _Response(status, request_id, _on_one_line(body)), None, degenerate)


def refused(row: BatchRow, status: int, body: bytes) -> bytes:
    """The line of a row that a worker refuses. `body`: as it came, maybe no JSON."""
    error = RowError(f"http_{status}", f"the worker refuses the row with status {status}")
    sound = body.strip() and _is_sound(body)
    told = _on_one_line(body) if sound else msgspec.Raw(msgspec.json.encode(body[:1000].decode(errors="replace")))
    return _line(row, _Response(status, "", told), error)


def failed(row: BatchRow | BadRow, code: str, message: str) -> bytes:
    """The line of a row that has no answer."""
    return _line(row, None, RowError(code, message))


def _on_one_line(body: bytes) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.format(body, indent=-1) if b"\n" in body or b"\r" in body else body)


def _line(
    row: BatchRow | BadRow,
    response: _Response | None,
    error: RowError | None,
    degenerate: dict[str, str | int] | None = None,
) -> bytes:
    name = f"batch_req_{row.number}"
    return msgspec.json.encode(_Result(name, row.custom_id, response, error, degenerate))
