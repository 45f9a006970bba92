"""A worker's answer, as far as this package reads it: texts, token counts, errors. Pure."""

import json
import re
from codecs import BOM_UTF8
from typing import Any

import msgspec


class Answer(msgspec.Struct):
    """Fields of a worker's JSON that are needed here."""

    id: str = ""
    model: str = ""
    system_fingerprint: str | None = None
    choices: list["AnswerChoice"] = []
    data: Any = None
    status: Any = None
    usage: "Usage | None" = None

    @property
    def tokens(self) -> "Tokens":
        """Token counts of the answer, if it has any."""
        return self.usage.tokens if self.usage is not None else Tokens()


class AnswerText(msgspec.Struct):
    """The message of a chat choice."""

    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    refusal: Any = None
    tool_calls: Any = None
    function_call: Any = None
    audio: Any = None


class AnswerChoice(msgspec.Struct):
    """One of the answers to a row."""

    index: Any = None
    finish_reason: str | None = None
    text: str | None = None
    message: AnswerText | None = None
    error: Any = None

    @property
    def texts(self) -> list[str]:
        """All texts, the reasoning included."""
        said = self.message
        parts = [self.text] if said is None else [said.content, said.reasoning or said.reasoning_content, said.refusal]
        return [part for part in parts if isinstance(part, str) and part]

    @property
    def says_something(self) -> bool:
        """True if it contains anything that a row may have asked for."""
        said = self.message
        more = () if said is None else (said.tool_calls, said.function_call, said.audio, said.content)
        return bool(self.texts) or any(more)


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Thought(msgspec.Struct):
    reasoning_tokens: int | None = None


class Tokens(msgspec.Struct):
    """Token counts: `prompt`, of which `cached`; `answer`, of which `reasoning`."""

    prompt: int = 0
    cached: int = 0
    answer: int = 0
    reasoning: int = 0

    def add(self, more: "Tokens") -> None:
        """Add other counts."""
        self.prompt += more.prompt
        self.cached += more.cached
        self.answer += more.answer
        self.reasoning += more.reasoning


class Usage(msgspec.Struct):
    """Token counts of a row."""

    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None
    completion_tokens_details: _Thought | None = None

    @property
    def tokens(self) -> Tokens:
        """The counts in one structure."""
        cached = self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details is not None else 0
        details = self.completion_tokens_details
        thought = details.reasoning_tokens if details is not None else 0
        counts = (self.prompt_tokens, cached, self.completion_tokens, thought)
        return Tokens(*(max(0, count or 0) for count in counts))


NOT_READ = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of decoding bytes that are not JSON, or JSON that is nested thousands of levels deep."""
_LONGEST_CODE = 6
_LONGEST_INT = 4000
_HALF = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_ESCAPES = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|" + _HALF.pattern + rb"|\\.")
"""JSON escapes: a surrogate pair, half of one, or any other escape."""
_DEPTH = 100
"""Deepest nesting of an answer, which is decoded again as a part of other JSON."""
_AROUND = b"[" * _DEPTH, b"]" * _DEPTH


class _Complaint(msgspec.Struct):
    error: Any = None
    object: Any = None
    message: Any = None
    detail: Any = None
    code: Any = None


def said_wrong(body: bytes) -> tuple[int, str] | None:
    """The code and the message of a JSON error; None: the body reports no error."""
    try:
        complaint = msgspec.json.decode(body, type=_Complaint)
    except NOT_READ:
        return None
    found = (
        complaint.error if complaint.error else complaint if complaint.object == "error" or complaint.detail else None
    )
    if found is None:
        return None
    if isinstance(found, dict):
        code, message = found.get("code"), found.get("message")
    else:
        code, message = complaint.code, found if isinstance(found, str) else complaint.message or complaint.detail
    if isinstance(code, str) and code.isdecimal() and len(code) <= _LONGEST_CODE:
        code = int(code)
    number = code if isinstance(code, int) else 0
    text = message if isinstance(message, str) else msgspec.json.encode(message).decode() if message else ""
    return number, text.partition("\n")[0][:300]


def read_answer(body: bytes | msgspec.Raw) -> Answer | None:
    """An answer that is a JSON object; None: it is something else, for example an HTML page."""
    try:
        answer = msgspec.json.decode(body, type=Answer)
    except msgspec.ValidationError:
        return _read_in_part(bytes(body))
    except NOT_READ:
        return None
    return answer if _is_text(bytes(body)) else None


def _is_text(body: bytes) -> bool:
    """True if all of it, skipped fields too, is UTF-8 and not nested too deep: a result line contains all of it."""
    try:
        body.decode()
        if body.count(b"[") + body.count(b"{") > _DEPTH:
            msgspec.json.decode(body.join(_AROUND), type=list[msgspec.Raw])
    except NOT_READ:
        return False
    return True


def _read_in_part(body: bytes) -> Answer | None:
    """Read the known fields of valid JSON in another shape, from an endpoint whose answers are not checked."""
    try:
        fields = msgspec.json.decode(body)
    except NOT_READ:
        return None
    if not isinstance(fields, dict) or not _is_text(body):
        return None
    kept = {}
    for name, value in fields.items():
        try:
            msgspec.convert({name: value}, Answer)
            kept[name] = value
        except (msgspec.ValidationError, TypeError):
            continue  # that field has another type; the other fields remain usable
    return msgspec.convert(kept, Answer)


def readable(body: bytes) -> bytes:
    """An answer without a byte order mark, and with U+FFFD for an escape that is half a surrogate pair."""
    body = body.removeprefix(BOM_UTF8)
    if not _HALF.search(body):
        return body
    return _ESCAPES.sub(lambda found: b"\\ufffd" if _HALF.fullmatch(found[0]) else found[0], body)


def read_result(line: bytes) -> Any:
    """Decode a line that this package has written."""
    try:
        return msgspec.json.decode(line)
    except msgspec.ValidationError:
        # Huge integers, in other fields of a worker's answer, become floats, since Python's `int` refuses long ones.
        return json.loads(line, parse_int=lambda text: int(text) if len(text) <= _LONGEST_INT else float(text))


def is_sound(body: bytes) -> bool:
    """True if it is valid JSON."""
    try:
        msgspec.json.decode(body)
    except NOT_READ:
        return False
    return _is_text(body)
