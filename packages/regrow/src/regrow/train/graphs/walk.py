"""Walks over all things that an object holds: each once, with the first path that leads to it."""

import random
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from regrow.core.errors import NotCarried
from regrow.train.graphs.kinds import ThingKind, is_key, kind_of, raise_all, slot_values
from regrow.train.graphs.nested import held
from regrow.train.graphs.outside import Given, given_to, is_followed

Key = tuple[str, int]
MOST = 2_000_000
"""Bound for the number of things of one object, as each step walks over them."""
_SEQUENCES = frozenset({ThingKind.TUPLE, ThingKind.NAMED, ThingKind.LIST, ThingKind.DEQUE, ThingKind.FROZENSET})
_ATOMIC = frozenset({type(None), bool, int, float, complex, str, bytes})


class Thing(NamedTuple):
    """One node of an object graph: any value but an atom, such as a number or text."""

    value: Any
    kind: ThingKind
    path: str


class Piece(NamedTuple):
    """Memory of arrays or tensors, as bytes."""

    memory: torch.Tensor
    path: str
    of: object = None


def walk(roots: Mapping[str, object], left: Collection[int] = (), met: set[int] | None = None) -> list[Thing]:
    """Things in an order that depends on the graph only. Raises `NotCarried` for a thing that cannot be sent.

    The error has the errors for all other such things in `more`.

    Args:
        roots: where to begin.
        left: ids of things that are not followed.
        met: receives the ids in `left` that were met.
    """
    found: list[Thing] = []
    seen: set[int] = set()
    refused: list[NotCarried] = []
    near: list[tuple[str, object]] = list(roots.items())[::-1]
    while near:
        path, value = near.pop()
        if type(value) in _ATOMIC or id(value) in seen:
            continue
        if id(value) in left:
            if met is not None:
                met.add(id(value))
            continue
        try:
            thing = Thing(value, kind_of(value, path), path)
            if thing.kind is ThingKind.ATOM:
                continue
            inside = [(path + at, each) for at, each in children(thing) if type(each) not in _ATOMIC]
        except NotCarried as error:
            refused.append(error)
            inside = []
        else:
            if len(found) >= MOST:
                reason = f"more than {MOST:,} things are held; keep them in arrays"
                raise NotCarried(path, value, reason, of=roots)  # leaving out this one thing would not help
            found.append(thing)
        seen.add(id(value))
        near += reversed(inside)
    raise_all(refused)
    return found


def children(thing: Thing) -> Iterable[tuple[str, object]]:
    """Values that a thing holds, each with the suffix of its path."""
    value, kind = thing.value, thing.kind
    if kind in _SEQUENCES:
        of = _class_of(value) if kind is ThingKind.NAMED else []
        return (
            of if _ATOMIC.issuperset(map(type, value)) else [*((f"[{at}]", each) for at, each in enumerate(value)), *of]
        )
    if kind is ThingKind.DICT:
        return list(_of_dict(cast(dict[object, object], value), thing.path))
    if kind is ThingKind.OBJECT:
        held_here = {**getattr(value, "__dict__", {}), **slot_values(value)}
        return [*((f".{key}", each) for key, each in held_here.items()), *_class_of(value)]
    if kind is ThingKind.ITEMS:
        return [(f"[{at}]", each) for at, each in enumerate(value.flat)]
    if kind is ThingKind.ARRAY:
        return [] if (root := base_of(value)) is value else [(".base", root)]
    if kind is ThingKind.NUMPY:
        return [(".bit_generator", value.bit_generator)]
    if kind is ThingKind.METHOD:
        return [(".__self__", value.__self__)]
    return given_to(value)


def _class_of(value: object) -> Given:
    return [(".__class__", type(value))] if is_followed(type(value)) else []


def _of_dict(value: dict[object, object], path: str) -> Iterator[tuple[str, object]]:
    if (factory := getattr(value, "default_factory", None)) is not None:
        yield ".default_factory", factory
    for key, each in value.items():
        if type(key) not in _ATOMIC and not is_key(key):
            raise NotCarried(path, key, "a key must be a number, text, an enum, None, or a tuple of these", of=value)
        at = f"[{key!r:.40}]"
        yield f" key {at}", key
        yield at, each


def base_of(array: np.ndarray) -> np.ndarray:
    """The array whose memory this one uses; itself if it is no view of an array."""
    while isinstance(array.base, np.ndarray) and type(array.base) is np.ndarray:
        array = array.base
    return array


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor, not a copy."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def array_bytes(array: np.ndarray, path: str) -> torch.Tensor:
    """The whole memory of an array, as a copy if it is read-only. Raises `NotCarried` if it has gaps."""
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        raise NotCarried(path, array, "its memory is another object's, with gaps")
    flat = array.reshape(-1, order="A").view(np.uint8) if array.nbytes else np.empty(0, np.uint8)
    return torch.from_numpy(flat if flat.flags.writeable else flat.copy())


def pieces(things: Iterable[Thing]) -> dict[Key, Piece]:
    """Memory of arrays and tensors, each piece once.

    Raises `NotCarried` if a tensor is not plain data, or an array and a tensor share memory.
    """
    found: dict[Key, Piece] = {}
    for value, kind, path in things:
        if kind is ThingKind.ARRAY and base_of(value) is value:
            found[array_key(value)] = Piece(array_bytes(value, path), path, value)
        elif kind is ThingKind.TENSOR:
            if value.requires_grad or value.layout is not torch.strided or value.is_meta:
                raise NotCarried(path, value, "it has a gradient, or no plain memory")
            found.setdefault(storage_key(value), Piece(storage_bytes(value), path, value))
    _refuse_shared(found.values())
    return found


def array_key(array: np.ndarray) -> Key:
    """Key of the memory of an array that is not a view."""
    return "array", id(array)


def storage_key(tensor: torch.Tensor) -> Key:
    """Key of the memory of a tensor, the same for tensors that share it."""
    return str(tensor.device), tensor.untyped_storage().data_ptr()


def _refuse_shared(found: Iterable[Piece]) -> None:
    end, before = 0, ""
    for memory, path, of in sorted(found, key=lambda piece: piece.memory.data_ptr()):
        if memory.numel() and memory.data_ptr() < end:
            raise NotCarried(path, memory, f"it shares its memory with {before}", of=of)
        end, before = max(end, memory.data_ptr() + memory.numel()), path


def generator_state(thing: Thing) -> object:
    """State of a random generator, in its own format."""
    value, kind = thing.value, thing.kind
    if kind is ThingKind.BITS:
        return held(value.state, None)
    if kind is ThingKind.LEGACY:
        return held(value.get_state(legacy=False), None)
    return value.getstate() if isinstance(value, random.Random) else value.get_state()


def put_generator(value: Any, kind: ThingKind, state: Any) -> None:
    """Set a random generator's state."""
    if kind is ThingKind.BITS:
        value.state = state
    elif kind is ThingKind.PYTHON:
        value.setstate(state)
    else:
        value.set_state(state)


HOLDERS = frozenset({ThingKind.CONSTANT, ThingKind.ENUM})
"""Kinds whose values all their users share: classes, functions and enumerations."""
GENERATORS = frozenset({ThingKind.BITS, ThingKind.LEGACY, ThingKind.PYTHON, ThingKind.TORCH})


def own_state(value: Any) -> object:
    """State of an object, by its own `state_dict` or `get_state`."""
    return value.state_dict() if hasattr(type(value), "state_dict") else value.get_state()


def put_own_state(value: Any, state: object) -> None:
    """Set the state of an object, by its own `load_state_dict` or `set_state`."""
    if hasattr(type(value), "load_state_dict"):
        value.load_state_dict(state)
    else:
        value.set_state(state)
