"""Columns of an output: values computed from a row's result, beside the columns of the input. Pure."""

import base64
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from regrow.core.errors import UsageError
from regrow_batch.answers import read_result
from regrow_batch.tables.making import Record, plain

_INPUT = "input."
"""Prefix of an input column's name where a result column has the same name."""


@dataclass(frozen=True)
class RowResult:
    """A decoded line of the output in OpenAI's format.

    Attributes:
        line: the whole line.
        body: of the worker's answer; empty: there is none.
    """

    line: Mapping[str, Any]
    body: Mapping[str, Any]

    @classmethod
    def read(cls, result: bytes) -> "RowResult":
        """Decode a line that this package has written."""
        line = read_result(result)
        body = (line.get("response") or {}).get("body")
        return cls(line, body if isinstance(body, dict) else {})

    def choices(self) -> list[Mapping[str, Any]]:
        """The choices of the answer, in the order of their indexes."""
        return _in_order(self.body.get("choices"))

    def said(self, *names: str) -> list[str | None]:
        """For each choice, the first of these message fields that has a text."""
        return [_text(choice, names) for choice in self.choices()]

    def usage(self, *path: str) -> int | None:
        """A token count."""
        found: Any = self.body.get("usage")
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        return found if _kind(found) == "int" else None

    def model(self) -> str | None:
        """The model's name."""
        found = self.body.get("model")
        return found if isinstance(found, str) else None

    def embedding(self) -> list[float] | None:
        """The first embedding of the answer; a base64 text contains little-endian float32 numbers."""
        data = _in_order(self.body.get("data"))
        found = data[0].get("embedding") if data else None
        if isinstance(found, str):
            return _unpacked(found)
        if isinstance(found, list) and all(isinstance(each, int | float) for each in found):
            return [float(each) for each in found]
        return None


def _in_order(found: Any) -> list[Mapping[str, Any]]:
    """Objects of a list, ordered by their indexes; objects without one keep their places."""
    parts: list[Mapping[str, Any]] = []
    if isinstance(found, list):
        parts = [each for each in found if isinstance(each, dict)]
    placed = all(isinstance(each.get("index"), int) for each in parts)
    return sorted(parts, key=lambda each: int(each["index"])) if placed else parts


def _text(choice: Mapping[str, Any], names: Sequence[str]) -> str | None:
    message = choice.get("message")
    places = (choice, message if isinstance(message, dict) else {})
    return next((place[name] for name in names for place in places if isinstance(place.get(name), str)), None)


def _unpacked(text: str) -> list[float] | None:
    try:
        return [number for (number,) in struct.iter_unpack("<f", base64.b64decode(text, validate=True))]
    except (ValueError, struct.error):
        return None


def _first(found: Sequence[str | None]) -> str | None:
    return found[0] if found else None


def _error(row: RowResult) -> str | None:
    error = row.line.get("error")
    return f"{error.get('code')}: {error.get('message')}" if isinstance(error, dict) else None


def _as_json(value: Any) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False)


TEXT, WHOLE, TEXTS, FLOATS = "text", "whole number", "texts", "floats"

RESULTS: Mapping[str, tuple[str, Callable[[RowResult], Any]]] = {
    "custom_id": (TEXT, lambda row: row.line.get("custom_id")),
    "answer": (TEXT, lambda row: _first(row.said("content", "text"))),
    "answers": (TEXTS, lambda row: row.said("content", "text")),
    "reasoning": (TEXT, lambda row: _first(row.said("reasoning", "reasoning_content"))),
    "finish_reason": (TEXT, lambda row: _first(row.said("finish_reason"))),
    "tool_calls": (TEXT, lambda row: next((_as_json(each) for each in map(_tool_calls, row.choices()) if each), None)),
    "embedding": (FLOATS, RowResult.embedding),
    "result": (TEXT, lambda row: _as_json(row.line.get("result"))),
    "status": (WHOLE, lambda row: (row.line.get("response") or {}).get("status_code")),
    "error": (TEXT, _error),
    "error_code": (TEXT, lambda row: (row.line.get("error") or {}).get("code")),
    "fault": (TEXT, lambda row: (row.line.get("error") or {}).get("fault")),
    "worker": (TEXT, lambda row: (row.line.get("served") or {}).get("worker")),
    "model": (TEXT, RowResult.model),
    "degenerate": (TEXT, lambda row: _as_json(row.line.get("degenerate"))),
    "prompt_tokens": (WHOLE, lambda row: row.usage("prompt_tokens")),
    "cached_tokens": (WHOLE, lambda row: row.usage("prompt_tokens_details", "cached_tokens")),
    "completion_tokens": (WHOLE, lambda row: row.usage("completion_tokens")),
    "reasoning_tokens": (WHOLE, lambda row: row.usage("completion_tokens_details", "reasoning_tokens")),
    "response": (TEXT, lambda row: _as_json(row.line.get("response"))),
    "line": (TEXT, lambda row: _as_json(row.line)),
}
"""Values that can be computed for a row: the type of each, and its function."""

USUAL = ("answer", "finish_reason", "error", "prompt_tokens", "completion_tokens")
USUAL_OF_EMBEDDINGS = ("embedding", "error", "prompt_tokens")


def _tool_calls(choice: Mapping[str, Any]) -> Any:
    message = choice.get("message")
    return message.get("tool_calls") if isinstance(message, dict) else None


@dataclass(frozen=True)
class Column:
    """A column of the output.

    Attributes:
        name: in the output.
        computed: name in `RESULTS`; empty: an input column.
        given: name in the input; empty: a computed column.
    """

    name: str
    computed: str = ""
    given: str = ""

    def value(self, row: RowResult, record: Record) -> Any:
        """The value of a row in this column."""
        return RESULTS[self.computed][1](row) if self.computed else record.get(self.given)


def chosen(text: str, given: Sequence[str], *, embeddings: bool) -> list[Column]:
    """The selected columns. Raises `UsageError`.

    Args:
        text: `NAME` or `NAME=COLUMN`, separated by commas; empty: all columns of the input, and the usual results.
        given: columns of the input.
        embeddings: whether the rows ask for embeddings.
    """
    if not text:
        usual = USUAL_OF_EMBEDDINGS if embeddings else USUAL
        computed = [*([] if "custom_id" in given else ["custom_id"]), *usual]
        if both := sorted(set(computed) & set(given)):
            raise UsageError(
                f"the input has a column {both[0]!r}, and so would the results",
                hint=f"choose by --columns, with another name: --columns '{_INPUT}{both[0]},my_{both[0]}={both[0]},…'",
            )
        return [Column(name, given=name) for name in given] + [Column(name, computed=name) for name in computed]
    found = [_column(word.strip(), given) for word in text.split(",") if word.strip()]
    names = [column.name for column in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"--columns has {twice[0]!r} twice")
    return found


def _column(word: str, given: Sequence[str]) -> Column:
    name, _, meant = word.partition("=")
    meant = meant or name
    forced = meant.removeprefix(_INPUT)
    if forced != meant and forced in given:
        return Column(name.removeprefix(_INPUT), given=forced)
    if meant in RESULTS:
        return Column(name, computed=meant)
    if meant in given:
        return Column(name, given=meant)
    of_input = f", of the input {', '.join(given)}" if given else ""
    raise UsageError(f"--columns: there is no column {meant!r}", hint=f"there are {', '.join(RESULTS)}{of_input}")


class Kinds:
    """Infers a type for each column of a table without types."""

    def __init__(self) -> None:
        self._seen: dict[str, set[str]] = {}

    def take(self, record: Record) -> None:
        """Update the types from a record."""
        for name, value in record.items():
            seen = self._seen.setdefault(str(name), set())
            if value is not None:
                seen.add(_kind(value))

    @property
    def names(self) -> list[str]:
        """The columns, in the order of their appearance."""
        return list(self._seen)

    def of(self, name: str) -> str:
        """`bool`, `int`, `float`, `str`; or `json`: a text with the value's JSON, for all other values."""
        kinds = self._seen.get(name) or {"str"}
        if kinds == {"int", "float"}:
            return "float"
        return next(iter(kinds)) if len(kinds) == 1 else "json"


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int" if -(1 << 63) <= value < 1 << 63 else "json"
    return "float" if isinstance(value, float) else "str" if isinstance(value, str) else "json"


def as_kind(value: Any, kind: str) -> Any:
    """Convert a value to its column's type."""
    if value is None:
        return None
    return _as_json(plain(value)) if kind == "json" else float(value) if kind == "float" else value
