"""Parses a line of JSON Lines to a dict, or to an error with its location."""

import json
from typing import Any

import msgspec

from regrow.core.errors import DataError

_SHOWN = 60


def parse_record(line: bytes) -> dict[str, Any]:
    """Parse the object in a line. Raises `ValueError`, which describes the mistake.

    Beyond the standard it accepts NaN and Infinity, which Python's `json` writes.
    """
    if line.lstrip(b"\r\n\t ")[:1] == b"\0":
        raise ValueError("it has zero bytes in the place of text, as a file that was not written to its end has")
    try:
        try:
            record = msgspec.json.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at column {error.colno}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not UTF-8") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(record, dict):
        raise ValueError(f"it holds {kind_of(record)}, not an object")
    return record


_KINDS = {dict: "an object", list: "an array", str: "a string", bool: "true or false", type(None): "null"}


def kind_of(value: object) -> str:
    """JSON's name for the type of a value, with an article."""
    return _KINDS.get(type(value), "a number")


def malformed(name: str, line: int, text: bytes, why: str) -> DataError:
    """The error for a malformed line: file, line (from 1), its beginning, and the reason."""
    shown = text[:_SHOWN].rstrip(b"\r\n").decode("utf-8", "replace")
    more = " …" if len(text.rstrip()) > _SHOWN else ""
    hint = "correct or remove the line"
    if line == 1 and text.lstrip().startswith(b"["):
        hint = "the file looks like one JSON array; JSON Lines has one object a line: jq -c '.[]' makes it of an array"
    return DataError(f"{name}, line {line}: {why}; the line starts {shown}{more}", hint=hint)
