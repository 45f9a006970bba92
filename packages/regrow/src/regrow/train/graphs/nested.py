"""Copies nested state, as `state_dict()` returns it, so that later changes do not affect it, and restores it."""

from collections import defaultdict
from collections.abc import Iterator
from typing import cast

import numpy as np
import torch

HELD_BYTES = 1 << 20
"""Tensors and arrays inside an object's state up to this size are copied at every step; larger ones (an average of the
weights, a queue) only if they are known to change."""


_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})


class Marks:
    """Large tensors that were left uncopied, with the versions that show whether they have changed since."""

    def __init__(self) -> None:
        self._tensors: list[tuple[torch.Tensor, int]] = []

    def add(self, tensor: torch.Tensor) -> None:
        """Note a tensor as it is now."""
        self._tensors.append((tensor, tensor._version))

    @property
    def changed(self) -> bool:
        """True if any of the tensors was written to since it was noted."""
        return any(tensor._version != version for tensor, version in self._tensors)


def held(value: object, left: Marks | None) -> object:
    """A copy of nested state that later changes do not affect.

    Args:
        value: nested containers, tensors, arrays and plain values.
        left: notes tensors that are too large to be copied each time, and are returned themselves; None: copy all.
    """
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is dict:
        return {
            key: item if type(item) in _ATOMS else held(item, left)
            for key, item in cast(dict[object, object], value).items()
        }
    if kind is list:
        return [held(item, left) for item in cast(list[object], value)]
    if kind is tuple:
        return tuple(held(item, left) for item in cast(tuple[object, ...], value))
    if isinstance(value, torch.Tensor):
        if left is not None and value.nbytes > HELD_BYTES:
            left.add(value)
            return value
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value if left is not None and value.nbytes > HELD_BYTES else value.copy()
    if isinstance(value, dict | set | bytearray):
        # OrderedDict, Counter, defaultdict: their own copy keeps the type.
        copy = value.copy()
        if isinstance(copy, dict):
            for key, item in copy.items():
                copy[key] = held(item, left)
        return copy
    return value


def large_tensors(value: object) -> list[torch.Tensor]:
    """The tensors that `held` does not copy."""
    return [leaf for leaf in _leaves(value) if isinstance(leaf, torch.Tensor) and leaf.nbytes > HELD_BYTES]


def large_arrays(value: object) -> list[np.ndarray]:
    """The arrays that `held` does not copy."""
    return [leaf for leaf in _leaves(value) if isinstance(leaf, np.ndarray) and leaf.nbytes > HELD_BYTES]


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    else:
        yield value


def fitted(present: object, saved: object, *, in_place: bool) -> object:
    """`saved` in the types of `present`: a dictionary, for example, becomes a `defaultdict` again.

    Args:
        present: the state as it is now.
        saved: the wanted state, which is not changed.
        in_place: write into the present tensors and arrays, so that others that hold them see the change.
    """
    if isinstance(saved, dict):
        return _fitted_dict(present, saved, in_place)
    if type(saved) is list or type(saved) is tuple:
        here = present if isinstance(present, list | tuple) and len(present) == len(saved) else [None] * len(saved)
        items = [fitted(mine, item, in_place=in_place) for mine, item in zip(here, saved, strict=True)]
        return items if type(saved) is list else tuple(items)
    if not in_place or present is saved:
        return saved
    if isinstance(saved, torch.Tensor):
        if isinstance(present, torch.Tensor) and _alike(present, saved):
            present.detach().copy_(saved)
            return present
        return saved.clone()
    if isinstance(saved, np.ndarray):
        if isinstance(present, np.ndarray) and present.flags.writeable and _alike(present, saved):
            np.copyto(present, saved)
            return present
        return saved.copy()
    return saved.copy() if isinstance(saved, set | bytearray) else saved


def _alike(one: torch.Tensor | np.ndarray, other: torch.Tensor | np.ndarray) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def _fitted_dict(present: object, saved: dict[object, object], in_place: bool) -> dict[object, object]:
    here = cast(dict[object, object], present) if isinstance(present, dict) else {}
    # A value without a present one is treated like the others.
    another = next(iter(here.values()), None) if isinstance(present, defaultdict) else None
    items = {
        key: fitted(here.get(key, another if isinstance(another, dict) else None), item, in_place=in_place)
        for key, item in saved.items()
    }
    if type(saved) is dict:
        return defaultdict(present.default_factory, items) if isinstance(present, defaultdict) else items
    copy = saved.copy()
    for key, item in items.items():  # not `update`, which adds in a Counter
        copy[key] = item
    return copy
