"""Places of classes, functions and enumerations, whose values a step may exchange for others, for all who have them.

They are put back with a step. Data travels with the state; code does not, and neither do global variables.
"""

import ast
import enum
import itertools
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any, NamedTuple

from regrow.core.errors import StateError
from regrow.train.graphs.kinds import NotCarried, ThingKind, kind_of
from regrow.train.graphs.outside import FIELDS, Given, alike, apart, given_to, is_followed

GLOBAL = " global "
_GONE = object()


class Count(NamedTuple):
    """Place of an `itertools.count`, which has no other state."""

    text: str


class Place(NamedTuple):
    """One value, and what has it: a class, or the dictionary of a function's or a member's attributes."""

    owner: Any
    name: str
    value: object


Places = dict[str, Place]


def places(holder: object) -> Places:
    """Places of a holder, by what their path has in addition."""
    if isinstance(holder, type):
        return {} if issubclass(holder, enum.Enum) else _of_class(holder)
    if isinstance(holder, enum.Enum):
        own = vars(holder)
        return {f".{name}": Place(own, name, each) for name, each in own.items() if not name.startswith("_")}
    if not isinstance(holder, FunctionType):
        return {}
    found = {f".{name}": Place(vars(holder), name, each) for name, each in vars(holder).items()}
    for at, each in given_to(holder):
        if at.startswith(GLOBAL):
            found[at] = Place(holder.__globals__, at.removeprefix(GLOBAL), each)
    return found


def _of_class(kind: type) -> Places:
    found: Places = {}
    for base in kind.__mro__:
        at = "" if base is kind else f".{base.__name__}"
        for name, value in vars(base).items() if is_followed(base) else ():
            hidden = name.startswith(("__", "_abc_")) and not isinstance(
                value, FunctionType | staticmethod | classmethod
            )
            if not hidden and not isinstance(value, MemberDescriptorType | GetSetDescriptorType | FIELDS):
                counts = isinstance(value, itertools.count)
                found[f"{at}.{name}"] = Place(base, name, Count(repr(value)) if counts else value)
    return found


def others(holder: object) -> Given:
    """Values of a holder that have no place: variables of a function around, defaults."""
    return [] if isinstance(holder, type) else apart(given_to(holder), places(holder))


def exchanged_in(before: Places, now: Places) -> list[str]:
    """Places that have another value, that are new, or gone."""
    if before.keys() == now.keys() and all(each.value is now[at].value for at, each in before.items()):
        return []
    return [at for at in {**before, **now} if at not in before or at not in now or not _same(before[at], now[at])]


def _same(one: Place, other: Place) -> bool:
    equal = type(one.value) is type(other.value) is frozenset and one.value == other.value
    return equal or alike(one.value, other.value)


def is_plain_code(place: Place | None) -> bool:
    """True for a function that has nothing but its code."""
    return place is not None and isinstance(place.value, FunctionType) and not given_to(place.value)


def travels(at: str, place: Place | None) -> bool:
    """True if a value that was put into this place can be told to another process. None: it is gone."""
    if at.startswith(GLOBAL):
        return False
    if place is None:
        return True
    if isinstance(place.value, Count):
        return _counter(place.value) is not None
    if isinstance(place.value, frozenset):
        return False
    try:
        return kind_of(place.value, at) not in (ThingKind.CONSTANT, ThingKind.METHOD)
    except NotCarried:
        return False


def put(before: Places, now: Places) -> None:
    """Give places the values that they had before."""
    for at in exchanged_in(before, now):
        if at in before:
            _set(before[at])
        elif not at.startswith(GLOBAL):
            _set(now[at]._replace(value=_GONE))


def receive(holder: object, at: str, value: object, *, gone: bool) -> None:
    """Put a received value into a place. Raises `StateError` for one that may have none, such as a method's."""
    owner, name = _place_of(holder, at)
    if not name.isidentifier() or name.startswith("__") or _is_code(vars_of(owner).get(name)) or _is_code(value):
        raise StateError(f"{getattr(holder, '__name__', holder)}{at} is no place for a value that was received")
    _set(Place(owner, name, _GONE if gone else value))


def vars_of(owner: Any) -> dict[str, object]:
    """Values by name."""
    return owner if isinstance(owner, dict) else dict(vars(owner))


def _place_of(holder: object, at: str) -> tuple[Any, str]:
    path = at.split(".")
    if path[0] == "" and isinstance(holder, type) and not issubclass(holder, enum.Enum):
        bases = [base for base in holder.__mro__ if len(path) == 2 or base.__name__ == path[1]]
        if len(path) <= 3 and bases and is_followed(bases[0]):
            return bases[0], path[-1]
    elif path[0] == "" and len(path) == 2 and isinstance(holder, FunctionType | enum.Enum):
        return vars(holder), "" if isinstance(holder, enum.Enum) and path[1].startswith("_") else path[1]
    raise StateError(f"{getattr(holder, '__name__', holder)}{at} is no place for a value that was received")


def _is_code(value: object) -> bool:
    return isinstance(value, type) or hasattr(type(value), "__get__")


def _set(place: Place) -> None:
    value = _counter(place.value) if isinstance(place.value, Count) else place.value
    if isinstance(place.owner, dict):
        if value is _GONE:
            place.owner.pop(place.name, None)
        else:
            place.owner[place.name] = value
    elif value is not _GONE:
        type.__setattr__(place.owner, place.name, value)
    elif place.name in vars(place.owner):
        type.__delattr__(place.owner, place.name)


def _counter(count: Count) -> "itertools.count[Any] | None":
    """A counter that goes on as told; None where that does not say how."""
    try:
        arguments = ast.literal_eval(f"({count.text.removeprefix('count')[1:-1]},)")
    except (ValueError, SyntaxError):
        return None
    if not 1 <= len(arguments) <= 2 or not all(type(each) in (int, float) for each in arguments):
        return None
    return itertools.count(*arguments)
