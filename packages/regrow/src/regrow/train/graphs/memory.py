"""Remembers a graph of objects at one moment and restores it: every thing keeps its identity.

A value that a step has put in place of a thing is not written to, as the script may use it elsewhere.
"""

import contextlib
import warnings
from collections import defaultdict, deque
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from regrow.core.errors import NotCarried
from regrow.train.graphs.exchanges import Held
from regrow.train.graphs.kinds import ThingKind, put_slots, slot_values
from regrow.train.graphs.nested import fitted, held
from regrow.train.graphs.walk import (
    GENERATORS,
    Key,
    Piece,
    Thing,
    generator_state,
    own_state,
    pieces,
    put_generator,
    put_own_state,
)


class Memory(NamedTuple):
    """Contents of things at one moment.

    Attributes:
        things: all things that can change.
        contents: the content of each of them.
        copies: by key, each piece of memory and a copy of it.
        held: values of classes and functions.
    """

    things: list[Thing]
    contents: list[Any]
    copies: dict[Key, tuple[Piece, torch.Tensor]]
    held: Held = {}


_CHANGES = frozenset(
    {
        ThingKind.LIST,
        ThingKind.DEQUE,
        ThingKind.DICT,
        ThingKind.BYTES,
        ThingKind.ARRAY,
        ThingKind.ITEMS,
        ThingKind.TENSOR,
        ThingKind.OWN_STATE,
        ThingKind.OBJECT,
    }
)


def remember(things: list[Thing], former: Memory | None = None) -> Memory:
    """Remember the things as they are now, in the memory of `former`, which is not needed any more."""
    copies: dict[Key, tuple[Piece, torch.Tensor]] = {}
    with torch.no_grad():
        for key, piece in pieces(things).items():
            known = former.copies.get(key) if former is not None else None
            if known is not None and known[1].shape == piece.memory.shape and known[1].device == piece.memory.device:
                copies[key] = piece, known[1].copy_(piece.memory)
            else:
                copies[key] = piece, piece.memory.clone()
    kept = [thing for thing in things if thing.kind in _CHANGES or thing.kind in GENERATORS]
    return Memory(kept, [_content(thing) for thing in kept], copies)


def go_back(memory: Memory) -> None:
    """Restore every thing. The memory can be used again.

    Raises `NotCarried` if an array has been given other memory since, as its former memory may be gone.
    """
    for thing, content in zip(memory.things, memory.contents, strict=True):
        if thing.kind in (ThingKind.ARRAY, ThingKind.ITEMS):
            put_form(thing, content[0])
    with torch.no_grad():
        for piece, copy in memory.copies.values():
            if not torch.equal(piece.memory, copy):
                piece.memory.copy_(copy)
    for thing, content in zip(memory.things, memory.contents, strict=True):
        _put(thing, content)


def _content(thing: Thing) -> Any:
    value, kind = thing.value, thing.kind
    if kind is ThingKind.OBJECT:
        return dict(getattr(value, "__dict__", {})), slot_values(value)
    if kind is ThingKind.OWN_STATE:
        return held(own_state(value), None)
    if kind is ThingKind.TENSOR:
        return value.detach()
    if kind is ThingKind.DICT:
        return dict(value), getattr(value, "default_factory", None)
    if kind in GENERATORS:
        return generator_state(thing)
    if kind in (ThingKind.ARRAY, ThingKind.ITEMS):
        return form_of(value), list(value.flat) if kind is ThingKind.ITEMS else None
    return list(value)


def _put(thing: Thing, content: Any) -> None:
    value, kind = thing.value, thing.kind
    if kind is ThingKind.OBJECT:
        attributes, slots = content
        if hasattr(value, "__dict__"):
            put_items(vars(value), attributes)
        put_slots(value, slots)
    elif kind is ThingKind.OWN_STATE:
        put_own_state(value, fitted(own_state(value), content, in_place=True))
    elif kind is ThingKind.TENSOR:
        put_tensor(value, content)
    elif kind is ThingKind.DICT:
        items, factory = content
        put_items(value, items)
        if isinstance(value, defaultdict):
            value.default_factory = factory
    elif kind in GENERATORS:
        put_generator(value, kind, content)
    elif kind is ThingKind.ITEMS:
        put_objects(value, content[1])
    elif kind is not ThingKind.ARRAY:
        put_members(value, content)


def put_items(there: dict[Any, Any], items: dict[Any, Any]) -> None:
    """Give a dictionary these items, in this order, unless it has them."""
    same = len(there) == len(items) and all(
        one is other and a is b for (one, a), (other, b) in zip(there.items(), items.items(), strict=True)
    )
    if not same:
        there.clear()
        for key, value in items.items():  # not `update`, which adds in a Counter
            there[key] = value


def put_members(there: Any, members: list[Any]) -> None:
    """Give a list, a deque or a `bytearray` these members."""
    if isinstance(there, bytearray):
        there[:] = bytes(members)
    else:
        sequence = cast("list[Any] | deque[Any]", there)
        sequence.clear()
        sequence.extend(members)


def put_objects(there: np.ndarray, members: list[Any]) -> None:
    """Fill an array of objects."""
    for at, each in zip(np.ndindex(there.shape), members, strict=True):
        there[at] = each


def put_tensor(there: torch.Tensor, was: torch.Tensor) -> None:
    """Give a tensor the memory, shape and strides of another."""
    same = (there.data_ptr(), there.shape, there.stride(), there.dtype)
    if same != (was.data_ptr(), was.shape, was.stride(), was.dtype):
        there.data = was


def form_of(array: np.ndarray) -> tuple[object, ...]:
    """Address, length, dtype, strides and shape of an array, and whether it can be written."""
    address, _ = array.__array_interface__["data"]
    return address, array.nbytes, array.dtype, array.strides, array.shape, array.flags.writeable


def put_form(thing: Thing, was: tuple[object, ...]) -> None:
    """Give an array the shape that it had. Raises `NotCarried` if its memory or its dtype is another one now."""
    array = thing.value
    if form_of(array) == was:
        return
    *_, shape, writable = was
    if form_of(array)[:3] == was[:3]:
        with warnings.catch_warnings(), contextlib.suppress(AttributeError, ValueError):
            warnings.simplefilter("ignore", DeprecationWarning)
            array.shape = cast("tuple[int, ...]", shape)
            array.flags.writeable = bool(writable)
    if form_of(array) != was:
        raise NotCarried(thing.path, array, "a step has given it other memory, or another type, in place")
