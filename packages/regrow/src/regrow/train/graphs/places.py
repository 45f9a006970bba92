"""Places of classes, functions and enumerations: attributes whose values a step may replace, for all their users."""

import ast
import enum
import itertools
import re
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any, NamedTuple

from regrow.core.errors import StateError
from regrow.train.graphs.outside import FIELDS, alike, followed_bases, given_to

_GONE = object()


class Count(NamedTuple):
    """Position of an `itertools.count`, which has no other state."""

    text: str


class Place(NamedTuple):
    """One value, and its owner: a class, or the dictionary of a function's or a member's attributes."""

    owner: Any
    name: str
    value: object


Places = dict[str, Place]
"""Places by the suffix of their path."""


def places(holder: object) -> Places:
    """Places of a class, a function, or an enumeration's member; none of others."""
    if isinstance(holder, type):
        return {} if issubclass(holder, enum.Enum) else _of_class(holder)
    if not isinstance(holder, FunctionType | enum.Enum):
        return {}
    own = vars(holder)
    return {f".{name}": Place(own, name, each) for name, each in own.items() if not name.startswith("_")}


def _of_class(kind: type) -> Places:
    found: Places = {}
    for at, base in followed_bases(kind).items():
        for name, value in vars(base).items():
            hidden = name.startswith(("__", "_abc_")) and not isinstance(
                value, FunctionType | staticmethod | classmethod
            )
            if not hidden and not isinstance(value, MemberDescriptorType | GetSetDescriptorType | FIELDS):
                counts = isinstance(value, itertools.count)
                found[f"{at}.{name}"] = Place(base, name, Count(repr(value)) if counts else value)
    return found


def exchanged_in(before: Places, now: Places) -> list[str]:
    """Places whose values differ between the two, are new, or are gone."""
    return [at for at in {**before, **now} if at not in before or at not in now or not _same(before[at], now[at])]


def _same(one: Place, other: Place) -> bool:
    equal = type(one.value) is type(other.value) is frozenset and one.value == other.value
    return equal or alike(one.value, other.value)


def is_code(place: Place | None) -> bool:
    """True for a value that is not sent: code, or a value that is not data."""
    return place is not None and (
        isinstance(place.value, type | frozenset)
        or hasattr(type(place.value), "__get__")
        or (isinstance(place.value, Count) and not re.fullmatch(r"count\([-\d., ]+\)", place.value.text))
    )


def is_plain_code(place: Place | None) -> bool:
    """True for a function without values besides its code."""
    return place is not None and isinstance(place.value, FunctionType) and not given_to(place.value)


def put(before: Places, now: Places) -> None:
    """Give places the values that they had before."""
    for at in exchanged_in(before, now):
        _set(before[at] if at in before else now[at]._replace(value=_GONE))


def receive(holder: object, at: str, value: object, *, gone: bool) -> None:
    """Put a received value into a place. Raises `StateError` for a place that must not change, such as a method's."""
    base, _, name = at.rpartition(".")
    owner: Any = None
    if isinstance(holder, type) and not issubclass(holder, enum.Enum):
        owner = followed_bases(holder).get(base)
    elif isinstance(holder, FunctionType | enum.Enum) and not base and not name.startswith("_"):
        owner = vars(holder)
    there = (owner if isinstance(owner, dict) else vars(owner)).get(name) if owner is not None else None
    place = Place(owner, name, _GONE if gone else value)
    if owner is None or not name.isidentifier() or name.startswith("__") or is_code(Place(owner, name, there)):
        raise StateError(f"{getattr(holder, '__name__', holder)}{at} is no place for a value that was received")
    if is_code(place):
        raise StateError(f"code was received for {getattr(holder, '__name__', holder)}{at}")
    _set(place)


def _set(place: Place) -> None:
    value = place.value
    if isinstance(value, Count):
        value = itertools.count(*ast.literal_eval(f"({value.text.removeprefix('count')[1:-1]},)"))
    if isinstance(place.owner, dict):
        place.owner.pop(place.name, None) if value is _GONE else place.owner.update({place.name: value})
    elif value is not _GONE:
        type.__setattr__(place.owner, place.name, value)
    elif place.name in vars(place.owner):
        type.__delattr__(place.owner, place.name)
