"""Copies plain Python values at one moment, and restores them.

Plain are None, bool, int, float, complex, numpy's numbers, decimals, fractions, dates, str, bytes, and lists, tuples,
dictionaries, sets and deques of plain values; and arrays, if the caller asks for them (`Keep`).
"""

import contextlib
import enum
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any, cast

import numpy as np
import torch

from regrow.core.errors import NotPlain, TooLarge
from regrow.hydration.codec import EXACT_KINDS, by_name
from regrow.train.attributes.hanging import MAPPINGS, identical, refill
from regrow.train.attributes.hanging import PlainCopy as PlainCopy
from regrow.train.values.arrays import (
    ARRAYS,
    Array,
    ArrayCopy,
    Keep,
    Shared,
    fill,
    is_elsewhere,
    is_small,
    is_view,
    leaves_of,
    write,
)

LEAVES = 1_000
"""A value with more leaves is not followed; text and bytes count as one leaf for each 64 characters."""
_MOST_GROWN = 200_000
"""Most leaves of a list that is only added to, when it is sent to a newcomer."""
_DEEP = 8
_COPIES, _OF_NUMPY = ARRAYS | {ArrayCopy}, frozenset(np.dtype(code).type for code in "?bhilqBHILQefdFD")
_NUMBERS = frozenset({type(None), bool, int, float, complex}) | _OF_NUMPY
_NAMES = frozenset({int, str})
ATOMS = _NUMBERS | {str, bytes, enum.Enum, torch.dtype} | EXACT_KINDS
_SEQUENCES = frozenset({list, deque, tuple})
_SETS = frozenset({set, frozenset})
PLAIN = ATOMS | MAPPINGS | _SEQUENCES | _SETS
"""Exact types: none of their values runs the script's code."""


def plain_kind(kind: type) -> type:
    """The type as which values of `kind` are treated: tuple for named tuples, Enum for enums, else `kind`."""
    if kind in PLAIN or (type(kind) is type and not issubclass(kind, tuple)) or not by_name(kind):
        return kind
    return tuple if issubclass(kind, tuple) else enum.Enum


@dataclass(frozen=True, slots=True, eq=False)
class GrownCopy:
    """A list that the script only adds to, kept by its length: it holds other things, or too many to copy.

    Attributes:
        thing: the list itself.
        size: its length when it was kept.
        last: the id of its last item at that time.
        arrays: treatment of arrays in it.
    """

    thing: list[object]
    size: int
    last: int
    arrays: Keep = Keep.ITSELF

    @classmethod
    def of(cls, thing: object, arrays: Keep) -> "GrownCopy":
        """Keep a list as it is now."""
        items = cast(list[object], thing)
        return cls(items, len(items), id(items[-1]) if items else 0, arrays)

    def cut(self) -> object:
        """Remove the items added since the list was kept, if nothing else was done to it. Returns the list."""
        if self.size == 0 or (len(self.thing) > self.size and id(self.thing[self.size - 1]) == self.last):
            del self.thing[self.size :]
        return self.thing

    def values(self, tail: int | None = None) -> object:
        """Copy of the list's items at that time, or of the last `tail` of them. Raises `NotPlain` or `TooLarge`."""
        begin = 0 if tail is None else max(0, self.size - tail)
        return _Looker(self.arrays, _MOST_GROWN).keep(self.thing[begin : self.size], 0)


def has_grown(kept: object) -> bool:
    """True if a kept value contains a list of which only the length is kept."""
    return any(isinstance(each, GrownCopy) for each in atoms(kept))


def keep(value: object, arrays: Keep = Keep.NOT) -> object:
    """Copy of a value from which `put_back` restores it. Raises `NotPlain` or `TooLarge`."""
    looker = _Looker(arrays)
    kept = looker.keep(value, 0)
    fill(looker.found)
    return kept


def keep_near(value: object, most: int) -> object:
    """As `keep` with `Keep.CONTENT`. Raises `TooLarge` for arrays on a device, or of more than `most` bytes in all."""
    looker = _Looker(Keep.CONTENT)
    kept = looker.keep(value, 0)
    if sum(thing.nbytes for _, thing in looker.found) > most or any(is_elsewhere(thing) for _, thing in looker.found):
        raise TooLarge
    fill(looker.found)
    return kept


def is_near(kept: object, most: int) -> bool:
    """True if no array in a kept value is on a device, and all together have at most `most` bytes."""
    leaves = (each.content if isinstance(each, ArrayCopy) else each for each in atoms(kept))
    arrays = [each for each in leaves if isinstance(each, Array)]
    return not any(map(is_elsewhere, arrays)) and sum(each.nbytes for each in arrays) <= most


def is_refused(value: object, arrays: Keep = Keep.NOT) -> bool:
    """True if `keep` would raise. Copies no array."""
    try:
        _Looker(arrays).keep(value, 0)
    except (NotPlain, TooLarge):
        return True
    return False


class _Looker:
    """Walks through one value. `found`: copies of arrays that are yet to be filled, with their arrays."""

    def __init__(self, arrays: Keep, room: int = LEAVES) -> None:
        self._arrays, self._room, self._most = arrays, room, room
        self.found: list[tuple[ArrayCopy, Array]] = []

    def keep(self, value: object, depth: int) -> object:
        kind = plain_kind(type(value))
        if kind in ATOMS:
            self._takes(1 + (len(cast(str, value)) // 64 if kind is str or kind is bytes else 0))
            return value
        if kind in ARRAYS and self._arrays is Keep.ITSELF:
            self._takes(1)
            return value
        if kind in ARRAYS and self._arrays in (Keep.CONTENT, Keep.HERE):
            array, stays = cast(Array, value), self._arrays is Keep.HERE
            if stays and not is_small(array):
                raise NotPlain
            self._takes(leaves_of(array))
            self.found.append((ArrayCopy(array, stays=stays), array))
            return self.found[-1][0]
        if kind not in PLAIN or depth >= _DEEP:
            raise NotPlain
        if kind is not list or self._arrays is Keep.NOT or self._most > LEAVES:
            return self._container(value, kind, depth)
        room = self._room
        if self._arrays is Keep.ITSELF and not ARRAYS.isdisjoint(map(type, cast(list[object], value))):
            self._takes(1)
            return GrownCopy.of(value, self._arrays)
        try:
            return self._container(value, kind, depth)
        except (NotPlain, TooLarge) as error:
            large = isinstance(error, TooLarge) and self._arrays is not Keep.ITSELF
            ends = cast(list[object], value)[:8] + cast(list[object], value)[-8:]  # not all: each step looks here
            if self._arrays is Keep.CONTENT and not (large and ARRAYS.isdisjoint(map(type, ends))):
                raise
            self._room = room - 1
            return GrownCopy.of(value, Keep.NOT if large else self._arrays)

    def _container(self, value: object, kind: type, depth: int) -> PlainCopy:
        container = cast(list[object], value)
        self._takes(1)
        if len(container) > self._room:
            raise TooLarge
        keys: list[object] = []
        items: list[object] = []
        try:
            if (flat := self._flat(container, kind)) is not None:
                self._room -= len(container)
                return PlainCopy(value, *flat)
            if kind in MAPPINGS:
                for key, item in cast(dict[object, object], value).items():
                    if not _COPIES.isdisjoint(map(type, atoms(self.keep(key, _DEEP - 1)))):
                        raise NotPlain
                    keys.append(key)  # not copied, since even a tuple never changes
                    items.append(self.keep(item, depth + 1))
            else:
                items.extend(self.keep(item, depth + 1) for item in container)
        except RuntimeError as error:  # another thread is changing it
            raise NotPlain from error
        return PlainCopy(value, keys, items)

    def _takes(self, leaves: int) -> None:
        self._room -= leaves
        if self._room < 0:
            raise TooLarge

    def _flat(self, container: list[object], kind: type) -> tuple[list[object], list[object]] | None:
        """Keys and items of a container that holds only leaves; None if it may hold anything else."""
        leaves = _NUMBERS | ARRAYS if self._arrays is Keep.ITSELF else _NUMBERS
        if kind in MAPPINGS:
            mapping = cast(dict[object, object], container)
            if _NAMES.issuperset(map(type, mapping)) and leaves.issuperset(map(type, mapping.values())):
                return list(mapping), list(mapping.values())
            return None
        return ([], list(container)) if leaves.issuperset(map(type, container)) else None


def put_back(kept: object, shared: Shared = set) -> object:
    """Restore containers and arrays in place, so that all other holders of them see it.

    Returns the value. `shared`: returns addresses of memory that must not be written.
    """
    if isinstance(kept, ArrayCopy):
        return kept.put_back(shared)
    if isinstance(kept, GrownCopy):
        return kept.cut()
    if not isinstance(kept, PlainCopy):
        return kept
    items = [put_back(item, shared) for item in kept.items]
    refill(kept.thing, kept.keys, items)
    return kept.thing


def copied(kept: object) -> object:
    """A new copy of a kept value, with containers and arrays of its own; a `defaultdict` becomes a dictionary."""
    if isinstance(kept, ArrayCopy):
        return kept.copied()
    if not isinstance(kept, PlainCopy):
        return kept
    items = [copied(item) for item in kept.items]
    kind = type(kept.thing)
    if kind in MAPPINGS:
        pairs: dict[Any, Any] = dict(zip(kept.keys, items, strict=True))
        return OrderedDict(pairs) if kind is OrderedDict else Counter(pairs) if kind is Counter else pairs
    if isinstance(kept.thing, deque):
        return deque(items, maxlen=kept.thing.maxlen)
    if plain_kind(kind) is tuple:
        return tuple.__new__(cast(type[tuple[object, ...]], kind), items)
    return items if kind is list else (set if kind is set else frozenset)(items)


def still(kept: object, value: object) -> bool:
    """True if `value` is the object that was kept, and its content is still the same."""
    if isinstance(kept, ArrayCopy):
        return kept.still(value)
    if isinstance(kept, GrownCopy):
        return kept.thing is value and len(kept.thing) == kept.size
    if not isinstance(kept, PlainCopy):
        return kept is value
    if kept.thing is not value:
        return False
    try:
        if type(value) in MAPPINGS:
            mapping = cast(dict[object, object], value)
            keys, items = list(mapping), list(mapping.values())
        else:
            keys, items = [], list(cast(list[object], value))
    except RuntimeError:  # another thread is changing it
        return False
    if not identical(keys, kept.keys) or len(items) != len(kept.items):
        return False
    return identical(items, kept.items) or all(map(still, kept.items, items))


def take_over(present: object, value: object, *, in_place: bool, shared: Shared = set) -> object:
    """Local form of a received value: the present container with the received content, or the value itself.

    Args:
        present: the value here; a `defaultdict` converts a dictionary to its own type.
        in_place: keep the present container or array, which may also be known under other names.
        shared: returns addresses of memory that must not be written.
    """
    value = _with_views(present, value, shared)
    if type(present) in ARRAYS and type(value) in ARRAYS:
        if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor):
            value = value.to(present.device)
        return present if in_place and write(cast(Array, present), cast(Array, value), shared) else value
    value = _typed(present, value)
    if not in_place or type(present) is not type(value) or type(value) in ATOMS:
        return value
    if type(value) in MAPPINGS:
        mapping = cast(dict[object, object], value)
        refill(present, list(mapping), list(mapping.values()))
    elif isinstance(value, tuple | frozenset):
        return value
    else:
        refill(present, [], list(cast(list[object], value)))
    return present


def _with_views(present: object, value: object, shared: Shared) -> object:
    """A received value in which views of protected memory, where `present` has some, take the arrays' places."""
    if type(value) in ARRAYS:
        return present if is_view(present, shared) else value
    if type(value) is dict and type(present) in MAPPINGS:
        here = cast(dict[object, object], present)
        return {key: _with_views(here.get(key), item, shared) for key, item in value.items()}
    if isinstance(value, list | tuple | deque) and type(value) is type(present):
        pairs = zip_longest(cast(list[object], present), value)
        items = [_with_views(mine, item, shared) for mine, item in islice(pairs, len(value))]
        if isinstance(value, deque):
            return deque(items, maxlen=value.maxlen)
        return items if isinstance(value, list) else tuple.__new__(type(value), items)
    return value


def _typed(like: object, value: object) -> object:
    """A received value with each dictionary as a `defaultdict` if the one in its place here is one."""
    if type(value) is not dict or type(like) not in MAPPINGS:
        return value
    here = cast(dict[object, object], like)
    # A value without a counterpart here is treated like the others.
    another = next(iter(here.values()), None) if type(like) is defaultdict else None
    if type(like) is defaultdict and another is None and dict in map(type, value.values()):
        with contextlib.suppress(Exception):  # of the script's code
            another = cast(Any, like).default_factory()
    items = {key: _typed(here.get(key, another), item) for key, item in value.items()}
    return defaultdict(like.default_factory, items) if type(like) is defaultdict else items


def same(one: object, other: object) -> bool:
    """True if two kept values are equal in types and content, even if other containers hold them."""
    if isinstance(one, ArrayCopy) and isinstance(other, ArrayCopy):
        return one.equals(other)
    if isinstance(one, PlainCopy) and isinstance(other, PlainCopy):
        if identical(one.items, other.items) and identical(one.keys, other.keys):
            return type(one.thing) is type(other.thing)
        return (
            type(one.thing) is type(other.thing)
            and len(one.items) == len(other.items)
            and all(map(same, one.keys, other.keys))
            and all(map(same, one.items, other.items))
        )
    if isinstance(one, GrownCopy) and isinstance(other, GrownCopy):
        return one.thing is other.thing and one.size == other.size
    if type(one) in ARRAYS:
        return one is other
    return type(one) is type(other) and bool(one is other or one == other or (one != one and other != other))


def stays_here(kept: object) -> bool:
    """True for a kept value that is never sent to other processes."""
    if isinstance(kept, GrownCopy):
        return kept.arrays is Keep.HERE
    return any(isinstance(each, ArrayCopy) and each.stays for each in atoms(kept))


def atoms(kept: object) -> Iterator[object]:
    """The leaves of a kept value, without keys."""
    if isinstance(kept, PlainCopy):
        for item in kept.items:
            yield from atoms(item)
    else:
        yield kept
