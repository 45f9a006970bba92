"""Makes rows from records: a record of a table becomes a line of OpenAI's batch format. Pure.

A prompt column gives one user message, a messages column a whole chat, a template a body whose texts have `{column}`
in place of a value. The rows have the numbers of the records, and are named by a column or by their number.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from regrow.core.errors import UsageError

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
NAME_COLUMNS = ("custom_id", "id")
"""Columns that name rows unless another is chosen; the first that exists is used."""
_FIELD = re.compile(r"\{\{|\}\}|\{([^{}]+)\}")
_UNMADE = "regrow_unmade"
_GUESSED = {"prompt": "prompt", "messages": "messages"}

Record = Mapping[str, Any]


@dataclass(frozen=True)
class RowMaking:
    """Parameters of making a row from a record. One of the first three gives the request.

    Attributes:
        prompt: the column of a text.
        messages: the column of a list of messages, or of such a list in JSON.
        template: a body, whose texts may contain column names in braces.
        name: the column of names; empty: one of `NAME_COLUMNS`, else `row-` and the record's number.
        url: where rows are sent.
    """

    prompt: str = ""
    messages: str = ""
    template: Any = None
    name: str = ""
    url: str = CHAT

    @property
    def asks(self) -> bool:
        """True if it gives the request; if not, the input contains rows, or columns with the usual names."""
        return bool(self.prompt or self.messages or self.template is not None)

    def description(self) -> dict[str, str]:
        """Settings on which the results depend, by the names that the user knows; empty if no rows are made."""
        template = "" if self.template is None else json.dumps(self.template, sort_keys=True)
        found = {"--prompt-column": self.prompt, "--messages-column": self.messages, "--template": template}
        return {name: value for name, value in (found | {"--id-column": self.name}).items() if value}


def guessed(columns: list[str], url: str, name: str) -> RowMaking:
    """The `RowMaking` of a table for which no column options are given. Raises `UsageError`."""
    for column, word in _GUESSED.items():
        if column in columns:
            return RowMaking(**{word: column}, url=url, name=name)
    raise UsageError(
        f"no flag names which of the columns {', '.join(columns)} has the prompts",
        hint="give --prompt-column, --messages-column or --template",
    )


def read_template(text: str) -> Any:
    """A body, from JSON; any other text becomes the user message of a chat."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"messages": [{"role": "user", "content": text.rstrip("\n")}]}


def name_of_record(record: Record, number: int, making: RowMaking) -> str:
    """The row's name. Raises `ValueError` if its column has no value."""
    column = making.name or next((each for each in NAME_COLUMNS if each in record), "")
    if not column:
        return f"row-{number}"
    value = record.get(column)
    if value is None or value == "":
        raise ValueError(f"has nothing in the column {column!r}, which names the rows")
    return value if isinstance(value, str) else json.dumps(plain(value), sort_keys=True)


def row_line(record: Record, number: int, making: RowMaking) -> bytes:
    """The line of a record. If no row can be made from it, the line has no body and gives the reason."""
    name = ""
    try:
        name = name_of_record(record, number, making)
        body = body_of(record, making)
    except ValueError as error:
        return unmade_line(name, str(error))
    return msgspec.json.encode({"custom_id": name, "method": "POST", "url": making.url, "body": body})


def unmade_line(name: str, why: str) -> bytes:
    """The line of a record from which no row can be made."""
    return msgspec.json.encode(({"custom_id": name} if name else {}) | {_UNMADE: why})


def unmade(line: bytes) -> str:
    """Reason why a line of `row_line` cannot be sent; empty: it gives none."""
    if _UNMADE.encode() not in line:
        return ""
    try:
        found = msgspec.json.decode(line, type=dict[str, Any]).get(_UNMADE, "")
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    return found if isinstance(found, str) else ""


def body_of(record: Record, making: RowMaking) -> Any:
    """The request body. Raises `ValueError` if the record lacks a part of it."""
    if making.template is not None:
        return filled(making.template, record)
    if making.messages:
        return {"messages": _messages(_value(record, making.messages), making.messages)}
    prompt = _value(record, making.prompt)
    if making.url == EMBEDDINGS:
        return {"input": plain(prompt)}
    if making.url == COMPLETIONS:
        return {"prompt": plain(prompt)}
    return {"messages": [{"role": "user", "content": prompt if isinstance(prompt, str) else _as_text(prompt)}]}


def _value(record: Record, column: str) -> Any:
    value = record.get(column)
    if value is None:
        raise ValueError(f"has nothing in the column {column!r}")
    return value


def _messages(value: Any, column: str) -> Any:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"has no JSON in the column {column!r}: {error}") from None
    made = plain(value)
    if not isinstance(made, list) or not made or not all(isinstance(each, dict) for each in made):
        raise ValueError(f"has no list of messages in the column {column!r}")
    # A table gives each message the fields of all messages; fields without a value were not in the record.
    return [{name: part for name, part in each.items() if part is not None} for each in made]


def filled(template: Any, record: Record) -> Any:
    """A template with its fields filled in. A text that is only one field takes the value unchanged."""
    if isinstance(template, dict):
        return {name: filled(part, record) for name, part in template.items()}
    if isinstance(template, list):
        return [filled(part, record) for part in template]
    if not isinstance(template, str):
        return template
    whole = _FIELD.fullmatch(template)
    if whole is not None and whole.group(1):
        return plain(_value(record, whole.group(1)))

    def put(found: re.Match[str]) -> str:
        return _as_text(_value(record, found.group(1))) if found.group(1) else found.group()[0]

    return _FIELD.sub(put, template)


def fields_of(template: Any) -> set[str]:
    """The columns that a template names."""
    if isinstance(template, str):
        return {name for name in _FIELD.findall(template) if name}
    parts = template.values() if isinstance(template, dict) else template if isinstance(template, list) else ()
    return {name for part in parts for name in fields_of(part)}


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False)


def plain(value: Any) -> Any:
    """A table's value in a form that JSON has: times and the like as texts, numbers of other types as plain numbers."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(part) for part in value]
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    for method in ("tolist", "isoformat"):
        if hasattr(value, method):
            return plain(getattr(value, method)())
    return str(value)
