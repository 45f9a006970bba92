"""Prints recipes: every key with its default, range and description, and files to edit. *Pure*."""

import json
import typing
from collections.abc import Iterator
from typing import Any

import msgspec

from regrow.core.errors import UsageError
from regrow_recipes.recipes.reading import METHODS, SECTIONS, expected, method_text, method_values


def lines(method: str) -> Iterator[str]:
    """All keys, one a line."""
    values = method_values(_known(method))
    yield method_text(method).splitlines()[0]
    for section, kind in SECTIONS.items():
        yield ""
        yield f"[{section}]  # {(kind.__doc__ or '').splitlines()[0]}"
        hints = typing.get_type_hints(kind, include_extras=True)
        for field in msgspec.structs.fields(kind):
            value = getattr(values[section], field.name)
            meaning = _meaning(hints[field.name])
            yield f"{field.name} = {_toml(value)}  # {meaning}; {expected(hints[field.name])}"


def template(method: str) -> str:
    """A recipe file that extends a method, with the values to fill in."""
    first = method_text(_known(method)).splitlines()[0]
    needs = '[model]\npath = ""  # folder of the model\n\n[data]\ntrain = []  # files\n\n[output]\ndir = ""\n'
    return f'{first}\n# `regrow recipes show {method}` lists all keys.\nextends = "{method}"\n\n{needs}'


def _known(method: str) -> str:
    if method not in METHODS:
        raise UsageError(f"there is no method {method}", hint=f"there are {', '.join(METHODS)}")
    return method


def _meaning(hint: Any) -> str:
    metas = (meta for meta in typing.get_args(hint)[1:] if isinstance(meta, msgspec.Meta))
    return next((meta.description for meta in metas if meta.description), "")


def _toml(value: Any) -> str:
    return "{}" if value == {} else json.dumps(list(value) if isinstance(value, tuple) else value)
