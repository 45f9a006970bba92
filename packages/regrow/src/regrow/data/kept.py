"""The batch of the step in progress, kept to be given again when the step runs again."""

import copy
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

import numpy as np
import torch

_PLAIN = (str, bytes, int, float, complex, bool, type(None))

Leaf = Callable[[Any], Any]


class Giving(Enum):
    """Kind of batch that a loader gives when it is asked for a step once more."""

    FRESH = auto()
    """A batch made anew, whatever was done to the first."""
    STORED = auto()
    """Perhaps the same tensors again: a write into them would show."""
    ONCE = auto()
    """Nothing: each batch can be had once."""


class KeptBatch(Protocol):
    """A batch that was given out and may be wanted again."""

    def again(self) -> Any:
        """The batch as it was when it was given out."""
        ...

    def intact(self) -> bool:
        """True if `again` certainly gives the batch as it was."""
        ...


class CopiedBatch:
    """Keeps a copy: for a batch that cannot be made anew. The body may do to the batch itself what it likes."""

    def __init__(self, batch: Any) -> None:
        self._copy = rebuilt(batch, _copied)

    def again(self) -> Any:
        """A copy of the copy, as this attempt may not be the last."""
        return rebuilt(self._copy, _copied)

    def intact(self) -> bool:
        """Always."""
        return True


class WatchedBatch:
    """Keeps the tensors themselves, which costs nothing: for a batch that can be made anew if it was changed.

    A body may put other things into the lists and dicts of its batch: each giving is in fresh ones. A write into a
    tensor itself is noticed: torch counts them in `_version`. Other objects count as changed, as no one can say.
    """

    def __init__(self, batch: Any) -> None:
        self._seen: list[_Seen] = []
        self._unknown = False
        self._snapshot = rebuilt(batch, self._look_at)

    def again(self) -> Any:
        """The batch in fresh containers, with the same tensors."""
        return rebuilt(self._snapshot, _same)

    def intact(self) -> bool:
        """True if nothing in the batch was written to since."""
        return not self._unknown and all(seen.unchanged() for seen in self._seen)

    def _look_at(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.is_inference():
            self._unknown = True
        else:
            self._seen.append(_Seen(leaf, leaf._version, leaf.requires_grad))
        return leaf


@dataclass(frozen=True)
class _Seen:
    """A tensor as it was when it was given out."""

    tensor: torch.Tensor
    version: int
    requires_grad: bool

    def unchanged(self) -> bool:
        tensor = self.tensor
        has_grad = tensor.is_leaf and tensor.grad is not None
        return tensor._version == self.version and tensor.requires_grad == self.requires_grad and not has_grad


def rebuilt(item: Any, leaf: Leaf) -> Any:
    """`item` with fresh lists, tuples and mappings, plain values as they are, and `leaf(x)` for anything else in it."""
    if isinstance(item, _PLAIN):
        return item
    if isinstance(item, tuple):
        parts = [rebuilt(part, leaf) for part in item]
        return type(item)(*parts) if hasattr(item, "_fields") else tuple(parts)
    if isinstance(item, list):
        return [rebuilt(part, leaf) for part in item]
    if type(item) is dict:
        return {key: rebuilt(part, leaf) for key, part in item.items()}
    if isinstance(item, MutableMapping):
        # A tokenizer's output, for one: a mapping of its own type, which a shallow copy keeps.
        fresh = copy.copy(item)
        for key, part in item.items():
            fresh[key] = rebuilt(part, leaf)
        return fresh
    return leaf(item)


def holds_data(item: Any) -> bool:
    """True if a batch contains a tensor, an array or a text."""
    if isinstance(item, torch.Tensor | np.ndarray | str | bytes):
        return True
    parts = item.values() if isinstance(item, Mapping) else item if isinstance(item, list | tuple) else ()
    return any(map(holds_data, parts))


def _same(leaf: Any) -> Any:
    return leaf


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    try:
        return copy.deepcopy(leaf)
    except (TypeError, RuntimeError):
        # Such as an open file: it has no second self. A step that changes it is not one that can run again.
        return leaf
