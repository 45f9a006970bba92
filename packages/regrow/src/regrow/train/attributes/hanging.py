"""Attributes of objects around protected modules, as they were when a body began, and the way back to them.

A body that is cut off leaves flags, sets, counters and gradients of its own making where it stood: `queued` is true
though nothing is queued, half of a bucket is counted. A whole body may leave them as it found them, so that they cannot
be learnt from what steps change: all of them are remembered, by reference, at each begin.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import cast

import torch

from regrow.train.attributes.holders import MOST_ITEMS, AttributeHolder, holders
from regrow.train.values.plain import MAPPINGS, PlainCopy, refill

_WALKED_AT_FIRST, _WALKED_EVERY = 4, 100
"""Takes after which what there is is looked for anew."""
_ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None)})
_CONTAINERS = frozenset({*MAPPINGS, list, deque, set})
_DEEP = 4
_ABSENT = object()


class HangingAttributes:
    """Values that bodies leave in objects around protected modules.

    Args:
        find: finds the objects.
        known: tensors that are looked after elsewhere.
    """

    def __init__(self, find: Callable[[], list[AttributeHolder]], known: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._find, self._known = find, known
        self._holders: list[AttributeHolder] = []
        self._kept: list[dict[str, object]] = []
        self._tensors: dict[int, _Hanging] = {}
        self._takes = 0

    def take(self) -> None:
        """Remember now."""
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
        """Make everything what it was."""
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
    """Those of what hangs on protected things and parameters; `buffers` are protected themselves."""
    return HangingAttributes(lambda: holders(things, parameters), lambda: [*parameters.values(), *buffers()])


# --- values ---------------------------------------------------------------------------------------------------------


def _keep(value: object, depth: int) -> object:
    """Copy of a value from which `_again` restores it; `_ABSENT`: the value is left alone."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if isinstance(value, torch.Tensor):
        return weakref.ref(value)  # an output that is kept for a look at it holds a whole graph
    if kind is tuple:
        return _ABSENT if any(isinstance(each, torch.Tensor) for each in cast(tuple[object, ...], value)) else value
    if kind not in _CONTAINERS or depth >= _DEEP or len(cast(list[object], value)) > MOST_ITEMS:
        return value
    try:
        keys = list(cast(dict[object, object], value)) if kind in MAPPINGS else []
        items = list(cast(dict[object, object], value).values()) if keys else list(cast(list[object], value))
    except RuntimeError:  # another thread changes it right now: it is not the body's
        return _ABSENT
    return PlainCopy(value, keys, [item if type(item) in _ATOMS else _keep(item, depth + 1) for item in items])


def _again(kept: object) -> object:
    """The value, containers with what was in them; `_ABSENT`: it is no more."""
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
    """A tensor that hangs on something: `parameter.main_grad`, a bucket. Copied only once bodies were seen to write it.

    Most are zero when a body begins, so that no copy is needed; that is looked at in the first steps, and now and then.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.of = weakref.ref(tensor)
        self._version = tensor._version
        self._written = self._zero = False
        self._takes = 0
        self._copy: torch.Tensor | None = None

    def take(self) -> None:
        """Remember now."""
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
        """Make its values what they were."""
        tensor = self.of()
        if tensor is None or tensor._version == self._version:
            return
        if self._zero:
            tensor.detach().zero_()
        elif self._copy is not None:
            tensor.detach().copy_(self._copy)
