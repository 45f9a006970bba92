"""Finds out if an item was taken from an iterator that a script keeps for itself.

Python does not show the position of an iterator. So the objects that it holds are compared by identity: the variables
of a generator, the attributes of an object, the iterators within it. Taking an item binds one of them anew.
"""

import gc
import io
import itertools
import operator
from collections.abc import Iterator
from types import GeneratorType

from regrow.core.process.own_code import is_own_name

_PLAIN = (int, float, str, bytes, type(None))
_MOST = 500


def is_iterator(thing: object) -> bool:
    """True for an iterator, from which an item can be taken once; files do not count."""
    if isinstance(thing, GeneratorType):
        # A running generator is the one that gives the loop its steps: the script's wrapper of `session.steps`.
        return thing.gi_frame is not None and not thing.gi_running and not _is_ours(thing)
    kind = type(thing)
    return hasattr(kind, "__next__") and not is_own_name(kind.__module__) and not isinstance(thing, io.IOBase)


def is_scripts_own(thing: object) -> bool:
    """True for an iterator that does not get its items from regrow, unlike the loop's."""
    return is_iterator(thing) and not any(
        isinstance(each, GeneratorType) and _is_ours(each) for each in position(thing)
    )


def _is_ours(generator: "GeneratorType[object, object, object]") -> bool:
    frame = generator.gi_frame
    return frame is not None and is_own_name(str(frame.f_globals.get("__name__")))


def position(iterator: object) -> list[object]:
    """Objects that an iterator holds now, which change when an item is taken. The caller keeps them alive."""
    found: list[object] = []
    near, seen = [iterator], set[int]()
    while near and len(found) < _MOST:
        each = near.pop(0)
        if id(each) in seen:
            continue
        seen.add(id(each))
        held = list(_held(each))
        found += held
        near += [inner for inner in held if isinstance(inner, tuple) or is_iterator(inner)]
    return found


def advanced(before: list[object], after: list[object]) -> bool:
    """True if an item was taken between two positions of an iterator."""
    return len(before) != len(after) or not all(map(_same, before, after))


def _same(one: object, other: object) -> bool:
    return one is other or (isinstance(one, _PLAIN) and type(one) is type(other) and one == other)


def _held(thing: object) -> Iterator[object]:
    if isinstance(thing, GeneratorType):
        yield thing.gi_frame.f_lasti if thing.gi_frame is not None else None
    if isinstance(thing, itertools.count):
        yield repr(thing)
    elif type(thing).__module__ in ("builtins", "itertools"):
        yield operator.length_hint(thing, -1) if not isinstance(thing, tuple) else None
        for each in gc.get_referents(thing):
            yield each
            if isinstance(each, list):
                yield len(each)
    elif hasattr(thing, "__dict__"):
        yield from list(vars(thing).values())
