"""Encodes a graph of objects: as a list of its things, and one piece of memory for all arrays and tensors."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch

from regrow.core.errors import NotCarried
from regrow.hydration.codec import dtype_name, encode
from regrow.train.graphs.classes import Classes
from regrow.train.graphs.decode import LEFT, Originals, method_of
from regrow.train.graphs.exchanges import Exchanges
from regrow.train.graphs.kinds import ThingKind, raise_all, slot_values
from regrow.train.graphs.outside import Given, built_alike
from regrow.train.graphs.places import Count, places
from regrow.train.graphs.walk import (
    GENERATORS,
    HOLDERS,
    Key,
    Piece,
    Thing,
    array_key,
    base_of,
    generator_state,
    own_state,
    pieces,
    storage_key,
)

_NAMED = frozenset(
    {ThingKind.NAMED, ThingKind.ENUM, ThingKind.OBJECT, ThingKind.BITS, ThingKind.DICT, ThingKind.CONSTANT}
)

_OF_ONE = frozenset({ThingKind.METHOD, ThingKind.NUMPY, ThingKind.ARRAY})
"""Kinds that cannot exist without the thing to which they belong."""
Left = Mapping[int, tuple[object, str]]
"""Things that are left out, by id: the value, and its path."""


def encode_graph(
    things: list[Thing], originals: Originals, classes: Classes, exchanges: Exchanges, left: Left
) -> dict[str, object]:
    """Encode the things, in their order. Raises `NotCarried` for one that a step added and no newcomer could make."""
    return _Encoder(things, originals, classes, exchanges, left).encoded()


def try_to_encode(
    things: list[Thing], originals: Originals, classes: Classes, exchanges: Exchanges, left: Left
) -> dict[str, object]:
    """Raise `NotCarried` as `encode_graph` would, without copying arrays. Returns an empty dict."""
    _Encoder(things, originals, classes, exchanges, left).nodes()
    return {}


class _Encoder:
    def __init__(
        self, things: list[Thing], originals: Originals, classes: Classes, exchanges: Exchanges, left: Left
    ) -> None:
        self._things, self._originals, self._classes, self._exchanges = things, originals, classes, exchanges
        self._left, self._names = left, list[str]()
        self._numbers = {id(thing.value): at for at, thing in enumerate(things)}
        self._given = {id(each) for thing in things if thing.kind in HOLDERS for _, each in self._built(thing.value)}
        self._kept: list[object] = []
        self._blob: list[np.ndarray] = []
        self._length = 0
        self._places: dict[Key, list[object]] = {}

    def _built(self, code: object) -> Given:
        return built_alike(code, self._exchanges.encoded.get(id(code), ()))

    def nodes(self) -> list[list[object]]:
        with torch.no_grad():
            for key, piece in pieces(self._things).items():
                self._places[key] = self._place(piece)
        found: list[list[object]] = []
        refused: list[NotCarried] = []
        for thing in self._things:
            try:
                found.append(self._node(thing))
            except NotCarried as error:
                refused.append(error)
        raise_all(refused)
        return found

    def encoded(self) -> dict[str, object]:
        nodes = self.nodes()
        exchanged = [each for thing in self._things for each in self._exchanged(thing)]
        path = self._things[0].path
        graph = np.frombuffer(encode(nodes, path=path), np.uint8)
        data = np.concatenate(self._blob) if self._blob else np.empty(0, np.uint8)
        encoded: dict[str, object] = {"graph": graph, "data": data, "kept": self._kept}
        if exchanged or self._left:
            names = [*self._names, *(path for _, path in self._left.values())]
            encoded["exchanged"] = encode([exchanged, names], path=path)
        return encoded

    def _place(self, piece: Piece) -> list[object]:
        """Place of a piece's bytes: start and length in the common memory, or its number in `kept` and -1."""
        if piece.memory.device.type != "cpu":
            return [self._keep(piece.memory), -1]
        start, self._length = self._length, self._length + piece.memory.numel()
        self._blob.append(piece.memory.numpy())
        return [start, piece.memory.numel()]

    def _keep(self, value: object) -> int:
        self._kept.append(value)
        return len(self._kept) - 1

    def _exchanged(self, thing: Thing) -> Iterator[list[object]]:
        """Yield [holder's number, place, value]; for a count None and its text, for a place that is gone no value."""
        for at, is_data in sorted(self._exchanges.encoded.get(id(thing.value), {}).items()):
            encoded: list[object] = []
            if not is_data:
                encoded = [LEFT]
                self._names.append(f"{getattr(thing.value, '__name__', thing.path)}{at}")
            elif (place := places(thing.value).get(at)) is not None:
                value = place.value
                encoded = [None, value.text] if isinstance(value, Count) else [self._ref(value)]
            yield [self._numbers[id(thing.value)], at, *encoded]

    def _ref(self, value: object) -> object:
        number = self._numbers.get(id(value))
        if number is None:
            return LEFT if id(value) in self._left else value
        return (number,)

    def _refs(self, values: Iterable[object]) -> list[object]:
        return [self._ref(each) for each in values]

    def _node(self, thing: Thing) -> list[object]:
        kind = thing.kind
        original = self._originals.path_of(thing.value)
        name = self._class_of(thing, original) if kind in _NAMED else ""
        content = self._content(thing)
        if kind in _OF_ONE and (content == LEFT or LEFT in cast(list[object], content)):
            raise NotCarried(thing.path, thing.value, "it is of a thing that is left out")
        return [str(kind), name, original, content]

    def _class_of(self, thing: Thing, original: str) -> str:
        of = thing.value if thing.kind is ThingKind.CONSTANT and isinstance(thing.value, type) else type(thing.value)
        if thing.kind is ThingKind.BITS:
            return str(of.__name__)
        if thing.kind is ThingKind.DICT:
            return str(of.__name__)
        name = self._classes.name_of(of)
        constant = thing.kind is ThingKind.CONSTANT
        if original and (constant or thing.kind is ThingKind.OBJECT):
            return name
        if constant and id(thing.value) in self._given:
            return name if isinstance(thing.value, type) else ""
        if not name or (constant and not isinstance(thing.value, type)):
            raise NotCarried(thing.path, thing.value, "a step has put it there, and a newcomer could not make one")
        return name

    def _content(self, thing: Thing) -> object:
        value: Any = thing.value
        kind = thing.kind
        if kind in (ThingKind.TUPLE, ThingKind.NAMED, ThingKind.LIST, ThingKind.FROZENSET):
            return self._refs(value)
        if kind is ThingKind.DEQUE:
            return [value.maxlen, *self._refs(value)]
        if kind is ThingKind.DICT:
            factory = self._ref(getattr(value, "default_factory", None))
            return [factory, *self._pairs(value)]
        if kind is ThingKind.OBJECT:
            return [self._pairs(getattr(value, "__dict__", {})), self._pairs(slot_values(value))]
        if kind is ThingKind.ARRAY:
            return self._array(value)
        if kind is ThingKind.ITEMS:
            return [list(value.shape), *self._refs(value.flat)]
        if kind is ThingKind.TENSOR:
            place = self._places[storage_key(value)]
            return [dtype_name(value.dtype), list(value.shape), list(value.stride()), value.storage_offset(), place]
        if kind in GENERATORS:
            return [self._keep(generator_state(thing)), self._seed_of(thing)]
        if kind is ThingKind.NUMPY:
            return self._ref(value.bit_generator)
        if kind is ThingKind.METHOD:
            return [self._ref(value.__self__), self._method(thing)]
        if kind is ThingKind.OWN_STATE:
            return self._keep(own_state(value))
        return self._fixed(value, kind)

    @staticmethod
    def _method(thing: Thing) -> str:
        name = str(getattr(thing.value.__func__, "__name__", ""))
        if method_of(thing.value.__self__, name) != thing.value:
            raise NotCarried(thing.path, thing.value, "it is a method under another name")
        return name

    def _fixed(self, value: Any, kind: ThingKind) -> object:
        if kind is ThingKind.BYTES:
            return bytes(value)
        if kind is ThingKind.DTYPE:
            return np.lib.format.dtype_to_descr(value)
        if kind is ThingKind.RANGE:
            return [value.start, value.stop, value.step]
        given = self._refs(each for _, each in self._built(value))
        return [value.name, *given] if kind is ThingKind.ENUM else given

    def _pairs(self, items: dict[Any, Any]) -> list[object]:
        return [self._ref(each) for pair in items.items() for each in pair]

    def _array(self, array: np.ndarray) -> list[object]:
        descr = np.lib.format.dtype_to_descr(array.dtype)
        root = base_of(array)
        writable = bool(array.flags.writeable)
        if root is array:
            order = "C" if array.flags.c_contiguous else "F"
            return [descr, list(array.shape), order, writable, self._places[array_key(array)]]
        first = array.__array_interface__["data"][0] - root.__array_interface__["data"][0]
        return [descr, list(array.shape), list(array.strides), writable, first, self._ref(root)]

    @staticmethod
    def _seed_of(thing: Thing) -> list[object] | None:
        """Seed from which a bit generator would spawn others."""
        sequence = thing.value.seed_seq if thing.kind is ThingKind.BITS else None
        if not isinstance(sequence, np.random.SeedSequence):
            return None
        entropy = cast(object, sequence.entropy)
        pool, spawned = sequence.pool_size, sequence.n_children_spawned
        return [entropy, list(sequence.spawn_key), pool, spawned]
