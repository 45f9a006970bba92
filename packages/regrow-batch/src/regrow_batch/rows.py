"""A row of the input, and its result line: OpenAI's batch format. Pure."""

import re
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from regrow_batch.answers import is_sound, said_wrong

ANSWER_TOKENS = 256
"""Estimated length of an answer if the row sets no limit."""
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
    model: Any = None
    vllm_xargs: Any = None
    custom_params: Any = None
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class RowError(msgspec.Struct, omit_defaults=True):
    """Error of a row. `fault`: the side at fault, of `retries.Fault`; empty in lines of older versions."""

    code: str
    message: str
    fault: str = ""

    @property
    def is_its_own(self) -> bool:
        """True if the row is known to be at fault itself: no worker would have answered it."""
        return self.fault == "row" or (not self.fault and self.code == "invalid_row")


class Served(msgspec.Struct, omit_defaults=True):
    """Worker that answered a row.

    Attributes:
        worker: its address.
        model: its name in the answer.
        version: of the server, as the answer or the server says.
        penalty: how it treats the row's LZ penalty: "heeded", "missing", "unknown"; empty: the row asks for none.
    """

    worker: str
    model: str = ""
    version: str = ""
    penalty: str = ""


class _Result(msgspec.Struct, omit_defaults=True):
    id: str
    custom_id: str
    response: _Response | None
    error: RowError | None
    degenerate: dict[str, str | int] | None = None
    served: Served | None = None


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A row to be sent.

    Attributes:
        number: its place in the input, from 0; blank lines are no rows.
        custom_id: the name that the user gave it.
        url: the path at the worker, for example `/v1/chat/completions`.
        body: the request, in JSON.
        tokens: estimated cost: prompt and answer.
        streams: whether its answer is requested as a stream, to be ended where it loops.
        prefix: the beginning of the prompt, for affinity.
        model: the one that it asks for; empty: it names none.
        penalized: whether it asks for the LZ penalty.
        answers: number of choices, or embeddings, that it asks for.
    """

    number: int
    custom_id: str
    url: str
    body: bytes
    tokens: int
    streams: bool = False
    prefix: bytes = b""
    model: str = ""
    penalized: bool = False
    answers: int = 1

    @property
    def page(self) -> str:
        """The path without its query."""
        return page_of(self.url)

    @property
    def kind(self) -> tuple[str, str]:
        """The page and the model: a worker that answers one row of a kind should answer another."""
        return self.url, self.model

    @property
    def whole(self) -> "BatchRow":
        """The same row without streaming, since not every server can stream."""
        return replace(self, body=_unstreamed(self.body), streams=False) if self.streams else self

    def with_fields(self, fields: dict[str, object]) -> "BatchRow":
        """The same row without streaming, with these values for the fields that it has."""
        body: dict[str, object] = dict(msgspec.json.decode(self.whole.body, type=dict[str, msgspec.Raw]))
        asked = {name: value for name, value in fields.items() if name in body or name == "max_tokens"}
        return replace(self, body=msgspec.json.encode(body | asked), streams=False)


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row with a name that cannot be sent to a worker."""

    number: int
    custom_id: str
    message: str


@dataclass(frozen=True)
class RowReading:
    """Parameters of reading rows. They change the results, so they belong to the job's fingerprint.

    Attributes:
        model: replaces each row's own; empty: the row's own.
        url: replaces each row's own; empty: the row's own.
        ends_loops: whether answers are streamed and ended when they loop.
        prefix_bytes: length of the prompt's prefix that decides about affinity; 0: none. Not part of the fingerprint.
    """

    model: str = ""
    url: str = ""
    ends_loops: bool = False
    prefix_bytes: int = 0


class _Prompts(msgspec.Struct):
    messages: Any = None
    prompt: Any = None
    input: Any = None


def page_of(url: str) -> str:
    """The path of a URL without its query, in which Azure puts the API's version."""
    return url.partition("?")[0].rstrip("/")


def name_of(line: bytes) -> str:
    """The `custom_id` of a line, even if the row cannot be sent. Raises `ValueError` that names the error."""
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
    """The first `custom_id` of a line of invalid JSON; empty if it cannot be read either."""
    found = _NAME.search(line)
    try:
        return msgspec.json.decode(found.group(1), type=str) if found is not None else ""
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""


def read_row(line: bytes, number: int, reading: RowReading) -> BatchRow | BadRow:
    """Read a row from its line, which has a `custom_id`."""
    try:
        found = msgspec.json.decode(line, type=_Line)
        msgspec.json.decode(
            found.body
        )  # decodes all of it: fields that are skipped below are not checked, and would reach a worker
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
    choices = _count(asked.n) or 1
    tokens = len(body) // BYTES_A_TOKEN + answer * choices
    answers = choices * (_prompts(asked.input) if page_of(url).endswith("/embeddings") else _prompts(asked.prompt))
    model = reading.model or (asked.model if isinstance(asked.model, str) else "")
    penalized = any(_asks_for_lz(each) for each in (asked.vllm_xargs, asked.custom_params))
    prefix = _prompt(body, reading.prefix_bytes)
    return BatchRow(number, found.custom_id, url, body, tokens, streams, prefix, model, penalized, answers)


def _asks_for_lz(extra: object) -> bool:
    return isinstance(extra, dict) and any(str(name).startswith("lz_") for name in extra)


def _count(value: float | None) -> int:
    """A number of tokens or choices as an estimate; 0: the row sets none. The worker checks the real value."""
    return max(int(value), 1) if value else 0


def _prompts(asked: msgspec.Raw) -> int:
    """Number of prompts in a field, which may be one prompt or a list of texts or token lists."""
    text = bytes(asked).lstrip()
    if text[:1] != b"[" or text[1:].lstrip()[:1] not in (b'"', b"["):
        return 1
    return len(msgspec.json.decode(text, type=list[msgspec.Raw]))


def _said(error: Exception) -> str:
    return f"is no row of a batch: {error}"


def _is_plain(asked: _Asked) -> bool:
    """True if a streamed answer can be joined again: it must have one choice, of text alone."""
    return asked.n in (None, 1) and not asked.tools and not asked.logprobs


def _changed(body: bytes, model: str, streams: bool) -> bytes:
    fields: dict[str, object] = dict(msgspec.json.decode(body, type=dict[str, msgspec.Raw]))
    if model:
        fields["model"] = model
    if streams:
        # vLLM and SGLang then count an answer that is ended early. Servers that refuse this are asked without a stream.
        fields |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    return msgspec.json.encode(fields)


def _unstreamed(body: bytes) -> bytes:
    fields: dict[str, object] = dict(msgspec.json.decode(body, type=dict[str, msgspec.Raw]))
    return msgspec.json.encode({name: value for name, value in fields.items() if not name.startswith("stream")})


def _prompt(body: bytes, count: int) -> bytes:
    """The first bytes of the prompt: the texts of all messages, joined, without JSON syntax."""
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


def answered(
    row: BatchRow,
    status: int,
    body: bytes,
    request_id: str,
    degenerate: dict[str, str | int] | None = None,
    served: Served | None = None,
) -> bytes:
    """The result line of an answered row. `body`: JSON."""
    return _line(row, _Response(status, request_id, _on_one_line(body)), None, degenerate, served)


def refused(
    row: BatchRow, status: int, body: bytes, *, fault: str, code: str = "", request_id: str = "", worker: str = ""
) -> bytes:
    """The result line of a refused row. `body`: as received, maybe not JSON. `code`: empty: by its status."""
    wrong = said_wrong(body)
    reason = f": {wrong[1]}" if wrong is not None and wrong[1] else ""
    error = RowError(code or f"http_{status}", f"the worker refuses the row with status {status}{reason}", fault)
    sound = body.strip() and is_sound(body)
    shown = _on_one_line(body) if sound else msgspec.Raw(msgspec.json.encode(body[:1000].decode(errors="replace")))
    return _line(row, _Response(status, request_id, shown), error, served=Served(worker) if worker else None)


def failed(row: BatchRow | BadRow, code: str, message: str, fault: str) -> bytes:
    """The result line of a row that got no answer."""
    return _line(row, None, RowError(code, message, fault))


def _on_one_line(body: bytes) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.format(body, indent=-1) if b"\n" in body or b"\r" in body else body)


def _line(
    row: BatchRow | BadRow,
    response: _Response | None,
    error: RowError | None,
    degenerate: dict[str, str | int] | None = None,
    served: Served | None = None,
) -> bytes:
    name = f"batch_req_{row.number}"
    return msgspec.json.encode(_Result(name, row.custom_id, response, error, degenerate, served))
