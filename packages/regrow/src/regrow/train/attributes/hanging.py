"""Remembers the attributes of objects around protected modules when a body begins, and restores them if it fails.

A body that is cut off leaves flags, sets, counters and gradients half-way: `queued` is true though nothing is queued,
half of a bucket is counted. A complete body may leave all of them as it found them, so the changes that steps make do
not show which ones matter: all are remembered, by reference, whenever a body begins.
"""

import operator
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

import torch

from regrow.train.attributes.holders import MOST_ITEMS, AttributeHolder, holders

_WALKED_AT_FIRST, _WALKED_EVERY = 4, 100
"""`take` searches for objects anew in the first 4 calls, and then in every 100th."""
_ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None)})
MAPPINGS = frozenset({dict, defaultdict, OrderedDict, Counter})
_CONTAINERS = frozenset({*MAPPINGS, list, deque, set})
_DEEP = 4
_ABSENT = object()


class HangingAttributes:
    """Remembers and restores the values of objects around protected modules.

    Args:
        find: finds the objects.
        known: returns the tensors that are restored by other means.
    """

    def __init__(self, find: Callable[[], list[AttributeHolder]], known: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._find, self._known = find, known
        self._holders: list[AttributeHolder] = []
        self._kept: list[dict[str, object]] = []
        self._tensors: dict[int, _Hanging] = {}
        self._takes = 0

    def take(self) -> None:
        """Remember all attributes and tensors as they are now."""
        if self._takes < _WALKED_AT_FIRST or self._takes % _WALKED_EVERY == 0:
            self._holders = self._find()
            self._look_for_tensors()
        self._takes += 1
        self._kept = [
            {
                key: value if type(value) in _ATOMS else _keep(value, 0)
                for key, value in holder.values.items()
                if key not in holder.own
            }
            for holder in self._holders
        ]
        for tensor in self._tensors.values():
            tensor.take()

    def put_back(self) -> None:
        """Restore all attributes and tensors as they were at the last `take`."""
        for holder, kept in zip(self._holders, self._kept, strict=True):
            values = holder.values
            for key in [key for key in values if key not in holder.own and key not in kept]:
                del values[key]
            for key, each in kept.items():
                value = _again(each)
                if value is not _ABSENT and values.get(key, _ABSENT) is not value:
                    values[key] = value
        with torch.no_grad():
            for tensor in self._tensors.values():
                tensor.put_back()

    def _look_for_tensors(self) -> None:
        known = {id(each) for each in self._known()}
        found: dict[int, _Hanging] = {}
        for holder in self._holders:
            for key, value in holder.values.items():
                for tensor in _tensors(value, 0) if key not in holder.own else ():
                    if id(tensor) not in known and id(tensor) not in found and tensor.layout is torch.strided:
                        former = self._tensors.get(id(tensor))
                        same = former is not None and former.of() is tensor
                        found[id(tensor)] = former if former is not None and same else _Hanging(tensor)
        self._tensors = found


def of_modules(
    things: dict[str, object], parameters: dict[str, torch.Tensor], buffers: Callable[[], Iterable[torch.Tensor]]
) -> HangingAttributes:
    """`HangingAttributes` of objects around these things and parameters; `buffers` are restored by other means."""
    return HangingAttributes(lambda: holders(things, parameters), lambda: [*parameters.values(), *buffers()])


# --- values ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class PlainCopy:
    """A container, and its contents at one moment.

    Attributes:
        thing: the container itself.
        keys: keys of a mapping; empty for other containers.
        items: values or members; containers among them as `PlainCopy`.
    """

    thing: object
    keys: list[object]
    items: list[object]


def refill(thing: object, keys: list[object], items: list[object]) -> None:
    """Give a container these contents, in place, unless it has them already."""
    kind = type(thing)
    if kind in MAPPINGS:
        mapping = cast(dict[object, object], thing)
        if not (identical(list(mapping), keys) and identical(list(mapping.values()), items)):
            mapping.clear()
            for key, item in zip(keys, items, strict=True):
                mapping[key] = item
    elif kind is set:
        members = cast(set[object], thing)
        if members != set(items):
            members.clear()
            members.update(items)
    elif kind is list or kind is deque:
        sequence = cast(list[object], thing)
        if not identical(list(sequence), items):
            sequence.clear()
            sequence.extend(items)


def identical(one: list[object], other: list[object]) -> bool:
    """True if these are the same objects, in the same order."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _keep(value: object, depth: int) -> object:
    """Copy of a value from which `_again` restores it; `_ABSENT` if the value is not to be restored."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if isinstance(value, torch.Tensor):
        return weakref.ref(value)  # a strong reference would keep an output's whole graph alive
    if kind is tuple:
        return _ABSENT if any(isinstance(each, torch.Tensor) for each in cast(tuple[object, ...], value)) else value
    if kind not in _CONTAINERS or depth >= _DEEP or len(cast(list[object], value)) > MOST_ITEMS:
        return value
    try:
        keys = list(cast(dict[object, object], value)) if kind in MAPPINGS else []
        items = list(cast(dict[object, object], value).values()) if keys else list(cast(list[object], value))
    except RuntimeError:  # another thread is changing it, so it does not belong to the body
        return _ABSENT
    return PlainCopy(value, keys, [item if type(item) in _ATOMS else _keep(item, depth + 1) for item in items])


def _again(kept: object) -> object:
    """The remembered value, with the contents of containers restored; `_ABSENT` if it no longer exists."""
    if isinstance(kept, weakref.ref):
        value: object = kept()
        return _ABSENT if value is None else value
    if not isinstance(kept, PlainCopy):
        return kept
    items = [_again(item) for item in kept.items]
    if any(item is _ABSENT for item in items):
        return kept.thing
    refill(kept.thing, kept.keys, items)
    return kept.thing


# --- tensors --------------------------------------------------------------------------------------------------------


def _tensors(value: object, depth: int) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.grad_fn is None and not value.is_meta:
            yield value
    elif depth < _DEEP and type(value) in _CONTAINERS | {tuple} and len(cast(list[object], value)) <= MOST_ITEMS:
        items = cast(dict[object, object], value).values() if type(value) in MAPPINGS else cast(list[object], value)
        for item in items:
            yield from _tensors(item, depth + 1)


class _Hanging:
    """A tensor held by an object around modules, as `parameter.main_grad` or in a bucket; copied once bodies write it.

    Most of them are zero when a body begins, and need no copy; this is checked in the first steps, and now and then.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.of = weakref.ref(tensor)
        self._version = tensor._version
        self._written = self._zero = False
        self._takes = 0
        self._copy: torch.Tensor | None = None

    def take(self) -> None:
        """Remember the tensor's values as they are now."""
        tensor = self.of()
        if tensor is None:
            return
        written, self._version = tensor._version != self._version, tensor._version
        self._written |= written
        if not self._written or not (written or self._takes == 0):
            return
        here = tensor.detach()
        if self._takes < _WALKED_AT_FIRST or self._takes % _WALKED_EVERY == 0:
            self._zero = (self._zero or self._takes == 0) and not bool(here.any())
        self._takes += 1
        if self._zero:
            return
        if self._copy is None or self._copy.shape != here.shape:
            self._copy = torch.empty_like(here)
        self._copy.copy_(here)

    def put_back(self) -> None:
        """Restore the tensor's values as they were at the last `take`."""
        tensor = self.of()
        if tensor is None or tensor._version == self._version:
            return
        if self._zero:
            tensor.detach().zero_()
        elif self._copy is not None:
            tensor.detach().copy_(self._copy)
