"""Decodes a graph of objects: things that existed as the loop began keep their identity, others are made anew."""

import enum
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType, MappingProxyType, MethodType
from typing import Any, cast

import numpy as np
import torch

from regrow.core.errors import StateError
from regrow.hydration.codec import decode, dtype_of
from regrow.train.graphs.classes import Classes, make
from regrow.train.graphs.exchanges import Exchanges
from regrow.train.graphs.kinds import BITS, DICTS, ThingKind, is_key, kind_of, put_slots, slot_values
from regrow.train.graphs.memory import put_items, put_members, put_objects
from regrow.train.graphs.nested import fitted
from regrow.train.graphs.outside import Given, alike, built_alike, is_atom
from regrow.train.graphs.places import Count
from regrow.train.graphs.received import (
    count_of,
    kept_at,
    kept_tensor,
    lengths,
    part_of,
    plain_dtype,
    refuse_beyond,
    refuse_position,
    seed_of,
)
from regrow.train.graphs.walk import (
    GENERATORS,
    HOLDERS,
    MOST,
    Thing,
    array_bytes,
    base_of,
    own_state,
    put_generator,
    put_own_state,
    storage_bytes,
)

_DICTS = {kind.__name__: kind for kind in DICTS}
_OTHERS: dict[ThingKind, Callable[[], Any]] = {
    ThingKind.LEGACY: np.random.RandomState,
    ThingKind.PYTHON: random.Random,
    ThingKind.TORCH: torch.Generator,
}
_WITHOUT_IDENTITY = frozenset(
    {
        ThingKind.TUPLE,
        ThingKind.NAMED,
        ThingKind.FROZENSET,
        ThingKind.RANGE,
        ThingKind.DTYPE,
        ThingKind.ENUM,
        ThingKind.METHOD,
    }
)

LEFT = (-1,)
"""Sent instead of a thing that no other process can receive: the receiver keeps what its script has built there."""


class Originals:
    """Things that existed as the loop began, by path: all ranks have built them alike.

    Args:
        things: the things of the graph as the loop begins.
    """

    def __init__(self, things: Iterable[Thing]) -> None:
        self._things = {each.path: each for each in things if each.kind not in _WITHOUT_IDENTITY}
        self._paths = {id(each.value): each.path for each in self._things.values()}

    def path_of(self, value: object) -> str:
        """Path of a thing; empty if it did not exist as the loop began."""
        return self._paths.get(id(value), "")

    def at(self, path: str, kind: ThingKind) -> Any:
        """The thing at this path; None if there is none of this kind."""
        thing = self._things.get(path)
        return thing.value if thing is not None and thing.kind is kind else None

    def add(self, thing: Thing) -> None:
        """Add a thing that other ranks have at its path, and that was made here just now."""
        former = self._things.get(thing.path)
        if former is not None:
            del self._paths[id(former.value)]
        self._things[thing.path], self._paths[id(thing.value)] = thing, thing.path

    def classes(self) -> set[type]:
        """Classes among these things."""
        return {each.value for each in self._things.values() if isinstance(each.value, type)}


def decode_graph(encoded: dict[str, Any], originals: Originals, classes: Classes, exchanges: Exchanges) -> list[str]:
    """Write a received graph into the present one. Returns names of the sender's changes that were not sent.

    Raises `StateError` if it does not fit.
    """
    nodes = decode(np.ascontiguousarray(encoded["graph"]).tobytes())
    if not isinstance(nodes, list) or len(nodes) > MOST:
        raise StateError("the graph that was received is none")
    try:
        exchanged, names = cast(Any, decode(encoded["exchanged"])) if "exchanged" in encoded else ([], [])
        exchanges.built()
        with torch.no_grad():
            _Reader(nodes, encoded, originals, classes, exchanged).read(exchanges)
            return [str(each) for each in names]
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, RuntimeError) as error:
        raise StateError(f"a graph of objects that was received does not fit: {error!r}") from error


class _Reader:
    def __init__(
        self,
        nodes: list[Any],
        encoded: dict[str, Any],
        originals: Originals,
        classes: Classes,
        exchanged: list[list[Any]],
    ) -> None:
        self._nodes, self._originals, self._classes = nodes, originals, classes
        self._data, self._kept = torch.from_numpy(np.array(encoded["data"], np.uint8)), encoded["kept"]
        self._made: dict[int, Any] = {}
        self._storages: dict[tuple[int, int], torch.Tensor] = {}
        self._exchanged = exchanged
        self._apart = {number: [at for each, at, *_ in exchanged if each == number] for number, *_ in exchanged}

    def _given_here(self, value: Any, number: int) -> Given:
        return built_alike(value, self._apart.get(number, ()))

    def read(self, exchanges: Exchanges) -> None:
        self._adopt_all()
        for number in range(len(self._nodes)):
            self._thing(number)
        for number, (kind, _, _, content) in enumerate(self._nodes):
            self._fill(self._made[number], ThingKind(kind), content)
        for number, (kind, *_) in enumerate(self._nodes):
            if kind in HOLDERS:
                self._refuse_others(self._made[number], number)
        for number, at, *encoded in self._exchanged:
            value = Count(encoded[1]) if len(encoded) == 2 else self._value(encoded[0]) if encoded else None
            if encoded != [LEFT]:
                exchanges.take(self._made[number], at, value, gone=not encoded)

    def _adopt_all(self) -> None:
        waiting = [number for number, (kind, *_) in enumerate(self._nodes) if kind in HOLDERS]
        known = waiting
        while known:
            known = [each for each in waiting if each in self._made or self._nodes[each][1] or self._nodes[each][2]]
            waiting = [each for each in waiting if each not in known]
            for number in known:
                self._adopt(self._thing(number), number)

    def _adopt(self, value: Any, number: int) -> None:
        """Assign the sender's numbers to the values of a class or function here, as these cannot be replaced."""
        for (_, mine), encoded in zip(self._given_here(value, number), self._given(number), strict=True):
            if type(encoded) is tuple and encoded != LEFT and encoded[0] not in self._made:
                kind, name, path, content = self._nodes[encoded[0]]
                same = not path and kind not in _WITHOUT_IDENTITY and kind_of(mine, "") == kind
                if same and self._fits(mine, ThingKind(kind), name, content):
                    self._made[encoded[0]] = mine

    def _given(self, number: int) -> list[Any]:
        kind, _, _, content = self._nodes[number]
        return list(content[1:] if kind == ThingKind.ENUM else content)

    def _refuse_others(self, value: Any, number: int) -> None:
        """Raise `StateError` if a class or a function has other values here than at the sender."""
        built = self._nodes[number][2]
        for (at, mine), encoded in zip(self._given_here(value, number), self._given(number), strict=True):
            theirs = self._value(encoded)
            # Objects that all ranks build alike may still have names or times of their own.
            same = mine == theirs if isinstance(mine, MethodType) else alike(mine, theirs)
            if not same and encoded != LEFT and not (built and is_atom(mine) and is_atom(theirs)):
                raise StateError(f"{getattr(value, '__name__', value)}{at} is another thing here")

    def _thing(self, number: int) -> Any:
        """The thing with this number, which may still be empty."""
        if number not in self._made:
            kind, name, path, content = self._nodes[number]
            kind = ThingKind(kind)
            value = self._original(kind, name, path, content) if path else None
            if value is None:
                value = self._new(kind, name, path, content)
                if path:
                    self._originals.add(Thing(value, kind, path))
            self._made[number] = value
        return self._made[number]

    def _original(self, kind: ThingKind, name: str, path: str, content: Any) -> Any:
        value = self._originals.at(path, kind)
        return value if value is not None and self._fits(value, kind, name, content) else None

    def _fits(self, value: Any, kind: ThingKind, name: str, content: Any) -> bool:
        if kind is ThingKind.ARRAY:
            return self._same_array(value, content)
        if kind is ThingKind.TENSOR:
            return self._same_tensor(value, content)
        if kind in (ThingKind.DICT, ThingKind.BITS):
            return bool(type(value).__name__ == name)
        if kind is ThingKind.OBJECT:
            return not name or self._classes.name_of(type(value)) == name
        if kind is ThingKind.DEQUE:
            return bool(value.maxlen == content[0])
        return kind is not ThingKind.ITEMS or list(value.shape) == content[0]

    @staticmethod
    def _same_array(value: np.ndarray, content: list[Any]) -> bool:
        alike = value.dtype == plain_dtype(content[0]) and list(value.shape) == content[1]
        if base_of(value) is not value:
            return alike and len(content) == 6 and list(value.strides) == content[2]
        order = "C" if value.flags.c_contiguous else "F"
        return alike and len(content) == 5 and order == content[2] and value.flags.writeable == content[3]

    @staticmethod
    def _same_tensor(value: torch.Tensor, content: list[Any]) -> bool:
        dtype, shape, strides, first, place = content
        here = [
            str(value.dtype).removeprefix("torch."),
            list(value.shape),
            list(value.stride()),
            value.storage_offset(),
        ]
        nbytes = value.untyped_storage().nbytes()
        return here == [dtype, shape, strides, first] and (place[1] < 0 or nbytes == place[1])

    def _value(self, encoded: Any) -> Any:
        if encoded == LEFT:
            return None
        return self._thing(encoded[0]) if type(encoded) is tuple else encoded

    def _values(self, encoded: Iterable[Any]) -> list[Any]:
        return [self._value(each) for each in encoded]

    def _pairs(self, encoded: list[Any], here: Mapping[Any, Any] = MappingProxyType({})) -> dict[Any, Any]:
        """Items by key; one that was left out keeps its value in `here`."""
        values = self._values(encoded)
        if not all(map(is_key, values[::2])):
            raise StateError("a dictionary was received with a key that may be none")
        pairs = dict(zip(values[::2], values[1::2], strict=True))
        for key in [key for key, each in zip(values[::2], encoded[1::2], strict=True) if each == LEFT and key in here]:
            pairs[key] = here[key]
        return pairs

    def _new(self, kind: ThingKind, name: str, path: str, content: Any) -> Any:
        if kind is ThingKind.LIST:
            return []
        if kind is ThingKind.DEQUE:
            return deque(maxlen=content[0])
        if kind is ThingKind.BYTES:
            return bytearray()
        if kind is ThingKind.DICT:
            return _DICTS[name]()
        if kind is ThingKind.ITEMS:
            if count_of(content[0]) != len(content) - 1:
                raise StateError("an array of objects has another number of them than was received")
            return np.empty(content[0], object)
        if kind is ThingKind.ARRAY:
            return self._array(content)
        if kind is ThingKind.TENSOR:
            return self._tensor(content)
        if kind is ThingKind.OBJECT:
            return make(kind, self._classes.find(name))
        if kind in GENERATORS or kind is ThingKind.NUMPY:
            return self._generator(kind, name, content)
        if kind in (ThingKind.OWN_STATE, ThingKind.CONSTANT) and not (kind is ThingKind.CONSTANT and name and not path):
            raise StateError(f"{path or name} is not here", hint="the script must build the same on every worker")
        return self._fixed(kind, name, content)

    def _fixed(self, kind: ThingKind, name: str, content: Any) -> Any:
        if kind is ThingKind.TUPLE:
            return tuple(self._values(content))
        if kind is ThingKind.FROZENSET:
            members = self._values(content)
            if len(members) > 1:
                raise StateError("a frozenset was received without a known order")
            return frozenset(members)
        if kind is ThingKind.RANGE:
            return range(*content)
        if kind is ThingKind.DTYPE:
            return plain_dtype(content)
        if kind is ThingKind.METHOD:
            return method_of(self._value(content[0]), content[1])
        of = self._classes.find(name)
        if kind is ThingKind.ENUM and issubclass(of, enum.Enum):
            return of.__members__[content[0]]
        if kind is ThingKind.NAMED and issubclass(of, tuple) and hasattr(of, "_fields"):
            return tuple.__new__(of, self._values(content))
        if kind is ThingKind.CONSTANT:
            return of
        raise StateError(f"{name} is no class of a {kind}")

    def _array(self, content: list[Any]) -> np.ndarray:
        dtype, shape = plain_dtype(content[0]), lengths(content[1])
        if len(content) == 5:
            if count_of(shape) * dtype.itemsize != len(part_of(self._data, content[4])):
                raise StateError("an array has another number of bytes than was received for it")
            return np.empty(shape, dtype, order="F" if content[2] == "F" else "C")
        _, _, strides, _, first, encoded = content
        root = self._value(encoded)
        if type(root) is not np.ndarray or root.dtype.hasobject:
            raise StateError("an array would lie in the memory of what is no array of numbers")
        return np.ndarray(shape, dtype, root, first, strides)

    def _tensor(self, content: list[Any]) -> torch.Tensor:
        dtype, shape, strides, first, place = content
        key = place[0], place[1]
        if key not in self._storages:
            if place[1] < 0:
                self._storages[key] = kept_tensor(self._kept, place[0]).clone()
            else:
                self._storages[key] = part_of(self._data, place).clone()
        refuse_beyond(shape, strides, first, dtype_of(dtype), len(self._storages[key]))
        made = torch.empty(0, dtype=dtype_of(dtype), device=self._storages[key].device)
        return made.set_(self._storages[key].untyped_storage(), first, shape, strides)

    def _generator(self, kind: ThingKind, name: str, content: Any) -> Any:
        if kind is ThingKind.NUMPY:
            return np.random.Generator(self._value(content))
        if kind is ThingKind.BITS:
            return BITS[name](seed_of(content[1]))
        return _OTHERS[kind]()

    def _fill(self, value: Any, kind: ThingKind, content: Any) -> None:
        if kind is ThingKind.LIST:
            put_members(value, self._values(content))
        elif kind is ThingKind.DEQUE:
            put_members(value, self._values(content[1:]))
        elif kind is ThingKind.BYTES:
            if type(content) is not bytes:
                raise StateError("a bytearray has a content that is no bytes")
            value[:] = content
        elif kind is ThingKind.DICT:
            put_items(value, self._pairs(content[1:]))
            if isinstance(value, defaultdict):
                value.default_factory = self._value(content[0])
        elif kind is ThingKind.OBJECT:
            if hasattr(value, "__dict__"):
                put_items(vars(value), self._pairs(content[0], vars(value)))
            put_slots(value, self._pairs(content[1], slot_values(value)))
        elif kind is ThingKind.ITEMS:
            put_objects(value, self._values(content[1:]))
        elif kind in (ThingKind.ARRAY, ThingKind.TENSOR):
            self._fill_memory(value, kind, content)
        elif kind in GENERATORS:
            state = kept_at(self._kept, content[0])
            refuse_position(state)
            put_generator(value, kind, state)
        elif kind is ThingKind.OWN_STATE:
            put_own_state(value, fitted(own_state(value), kept_at(self._kept, content), in_place=False))

    def _fill_memory(self, value: Any, kind: ThingKind, content: list[Any]) -> None:
        place = content[4]
        if kind is ThingKind.TENSOR:
            there = storage_bytes(value)
            there.copy_(_of_length(kept_tensor(self._kept, place[0]) if place[1] < 0 else self._part(place), there))
        elif len(content) != 5:
            value.flags.writeable = content[3] and value.flags.writeable
        elif value.flags.writeable:
            there = array_bytes(value, "")
            there.copy_(_of_length(self._part(place), there))
            value.flags.writeable = bool(content[3])
        elif array_bytes(value, "").numpy().tobytes() != self._part(place).numpy().tobytes():
            raise StateError("an array that is read only has another content here")

    def _part(self, place: Any) -> torch.Tensor:
        return part_of(self._data, place)


def _of_length(received: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    if received.shape != there.shape:
        raise StateError(f"{len(received)} bytes were received for a memory of {len(there)}")
    return received


def method_of(thing: object, name: str) -> MethodType:
    """Method of a thing whose class has a function with this name. Raises `StateError` otherwise."""
    for kind in type(thing).__mro__:
        if isinstance(function := vars(kind).get(name), FunctionType):
            return MethodType(function, thing)
    raise StateError(f"{type(thing).__name__} has no method {name!r}")
