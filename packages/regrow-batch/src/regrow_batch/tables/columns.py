"""Columns of an output: what can be told of a row's result, and which of it is wanted beside the input's own. Pure."""

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
"""Before the name of a column that is the input's, where a result has one of that name."""


@dataclass(frozen=True)
class RowResult:
    """A line of the output in OpenAI's format, read.

    Attributes:
        line: all of it.
        body: of the worker's answer; empty: there is none.
    """

    line: Mapping[str, Any]
    body: Mapping[str, Any]

    @classmethod
    def read(cls, result: bytes) -> "RowResult":
        """From the bytes, which this package has written."""
        line = read_result(result)
        body = (line.get("response") or {}).get("body")
        return cls(line, body if isinstance(body, dict) else {})

    def choices(self) -> list[Mapping[str, Any]]:
        """The answers, where there are any, by their places."""
        return _in_order(self.body.get("choices"))

    def said(self, *names: str) -> list[str | None]:
        """Of each answer the first of these fields of its message that has a text."""
        return [_text(choice, names) for choice in self.choices()]

    def usage(self, *path: str) -> int | None:
        """A count of tokens."""
        found: Any = self.body.get("usage")
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        return found if _kind(found) == "int" else None

    def model(self) -> str | None:
        """The model's name."""
        found = self.body.get("model")
        return found if isinstance(found, str) else None

    def embedding(self) -> list[float] | None:
        """The first of the answer's embeddings; a text of base64 has numbers of four bytes, the lowest first."""
        data = _in_order(self.body.get("data"))
        found = data[0].get("embedding") if data else None
        if isinstance(found, str):
            return _unpacked(found)
        if isinstance(found, list) and all(isinstance(each, int | float) for each in found):
            return [float(each) for each in found]
        return None


def _in_order(found: Any) -> list[Mapping[str, Any]]:
    """Objects of a list by the place that each says it has; those that say none are where they are."""
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
"""Facts about a row: the kind of each value, and a function that finds it."""

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
        computed: in `RESULTS`; empty: the input's.
        given: in the input; empty: of the result.
    """

    name: str
    computed: str = ""
    given: str = ""

    def value(self, row: RowResult, record: Record) -> Any:
        """Value of a row in this column."""
        return RESULTS[self.computed][1](row) if self.computed else record.get(self.given)


def chosen(text: str, given: Sequence[str], *, embeddings: bool) -> list[Column]:
    """The columns that are wanted. Raises `UsageError`.

    Args:
        text: `NAME` or `NAME=COLUMN`, with commas between them; empty: all of the input, and the usual ones.
        given: columns of the input.
        embeddings: whether the rows ask for them.
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
    """Finds out what the values of a table without types have in common, column by column."""

    def __init__(self) -> None:
        self._seen: dict[str, set[str]] = {}

    def take(self, record: Record) -> None:
        """Look at a record."""
        for name, value in record.items():
            seen = self._seen.setdefault(str(name), set())
            if value is not None:
                seen.add(_kind(value))

    @property
    def names(self) -> list[str]:
        """The columns, as they came."""
        return list(self._seen)

    def of(self, name: str) -> str:
        """`bool`, `int`, `float`, `str`; or `json`: a text with the JSON of whatever stands there."""
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
    """A value as its column has it."""
    if value is None:
        return None
    return _as_json(plain(value)) if kind == "json" else float(value) if kind == "float" else value
