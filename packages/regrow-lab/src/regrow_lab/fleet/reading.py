"""Reads a scenario from TOML, and reports all errors at once, each with its field and a cure. Pure."""

import difflib
import typing
from collections.abc import Mapping
from typing import Any

import msgspec

from regrow.core.config import duration
from regrow.core.errors import UsageError
from regrow_lab.fleet.scenario import CostRow, Count, FleetScenario, Span, contradictions

Table = dict[str, Any]

_KINDS: Mapping[object, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string in quotes",
    Span: 'a time, a number of seconds or a string such as "30d", "10min" or "500ms"',
}
_PLURALS: Mapping[object, str] = {
    str: "a list of strings in quotes",
    Span: "a list of times",
    tuple[Span, Count]: "a list, each of [a time, a number of nodes]",
}


class _CostsFile(msgspec.Struct, frozen=True):
    """A file that contains only costs; the other results of a calibration are not used."""

    costs: list[CostRow]
    measured: dict[str, Any] = {}


def decode_scenario(table: Table, *, place: str, costs: typing.Sequence[CostRow] = ()) -> FleetScenario:
    """The scenario of a file.

    Args:
        table: its content.
        place: its name, for errors.
        costs: rows of the files that it names in `costs_from`.

    Raises:
        UsageError: names all errors.
    """
    wrong: list[str] = []
    scenario = _struct(FleetScenario, table, "", wrong)
    if isinstance(scenario, FleetScenario) and not wrong:
        scenario = msgspec.structs.replace(scenario, costs=[*scenario.costs, *costs])
        wrong = list(contradictions(scenario))
        if not wrong:
            return scenario
    raise _error(place, wrong)


def decode_costs(table: Table, *, place: str) -> list[CostRow]:
    """The costs of a file. Raises `UsageError`."""
    wrong: list[str] = []
    found = _struct(_CostsFile, table, "", wrong)
    if isinstance(found, _CostsFile) and not wrong:
        return found.costs
    raise _error(place, wrong)


def _error(place: str, wrong: list[str]) -> UsageError:
    if len(wrong) == 1:
        return UsageError(f"{place}: {wrong[0]}")
    return UsageError(f"{place} has {len(wrong)} errors:\n" + "\n".join(f"  {sentence}" for sentence in wrong))


def _struct(kind: type, given: object, path: str, wrong: list[str]) -> object:
    if not isinstance(given, dict):
        wrong.append(f"{path} = {_shown(given)}: it must be a table")
        return None
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    values: Table = {}
    for name, value in given.items():
        where = f"{path}.{name}" if path else name
        if name not in fields:
            near = difflib.get_close_matches(name, list(fields), n=1)
            did = f"did you mean {near[0]}? " if near else ""
            wrong.append(f"{where} is not a key: {did}there are {', '.join(fields)}")
            continue
        values[name] = _value(fields[name].type, value, where, wrong)
    missing = [field.name for field in fields.values() if field.required and field.name not in given]
    for name in missing:
        hint = _expected(fields[name].type)
        wrong.append(f"{path}.{name} is missing: give {hint}" if path else f"{name} is missing: give {hint}")
    return None if wrong else kind(**values)


def _value(hint: Any, given: object, path: str, wrong: list[str]) -> object:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return _struct(hint, given, path, wrong)
    inner = typing.get_args(hint)[0] if typing.get_origin(hint) is list else None
    if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
        if not isinstance(given, list):
            wrong.append(f"{path} = {_shown(given)}: it must be a list of tables, so write [[{path}]]")
            return []
        return [_struct(inner, each, f"{path}[{number}]", wrong) for number, each in enumerate(given, 1)]
    try:
        return msgspec.convert(given, hint, dec_hook=_custom)
    except msgspec.ValidationError:
        wrong.append(f"{path} = {_shown(given)}: give {_expected(hint)}")
        return None


def _custom(kind: type, given: object) -> object:
    if kind is not Span:
        raise NotImplementedError
    if isinstance(given, bool):
        raise ValueError("a time")
    if isinstance(given, int | float) and given >= 0:
        return Span(given)
    if isinstance(given, str):
        try:
            return Span(duration(given))
        except UsageError as error:
            raise ValueError(str(error)) from error
    raise ValueError("a time")


def _expected(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        bounds = next((each for each in inner[1:] if isinstance(each, msgspec.Meta)), None)
        return _expected(inner[0]) + (_range(bounds) if bounds is not None else "")
    if origin is typing.Literal:
        return "one of " + ", ".join(f'"{word}"' for word in inner if word)
    if origin is list:
        return _PLURALS.get(inner[0], "a list of whole numbers from 1")
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return "a table"
    return _KINDS[hint]


def _range(meta: msgspec.Meta) -> str:
    bounds = (("from", meta.ge), ("above", meta.gt), ("to", meta.le), ("below", meta.lt))
    words = [f"{word} {bound:g}" for word, bound in bounds if bound is not None]
    return " " + ", ".join(words) if words else ""


def _shown(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
