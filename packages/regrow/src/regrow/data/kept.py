"""Keeps the batch of the step in progress, to give it again if the step is retried."""

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
    """Result of a second request to a loader for the same step."""

    FRESH = auto()
    """A batch made anew, independent of the first one."""
    STORED = auto()
    """Possibly the same tensors again, so that a write into them would show."""
    ONCE = auto()
    """Nothing: each batch can be read only once."""


class KeptBatch(Protocol):
    """A batch that was given out and may be needed again."""

    def again(self) -> Any:
        """The batch, unchanged since it was given out."""
        ...

    def intact(self) -> bool:
        """True if `again` is certain to return the batch unchanged."""
        ...


class CopiedBatch:
    """Keeps a copy of a batch that cannot be made anew, so that the training code may change the batch itself."""

    def __init__(self, batch: Any) -> None:
        self._copy = rebuilt(batch, _copied)

    def again(self) -> Any:
        """A copy of the kept copy, since there may be a further retry."""
        return rebuilt(self._copy, _copied)

    def intact(self) -> bool:
        """True: the training code cannot reach the copy."""
        return True


class WatchedBatch:
    """Keeps the tensors themselves, without a copy, of a batch that can be made anew if it was changed.

    Training code may change the lists and dicts of its batch, since `again` makes new ones. A write into a tensor is
    detected by torch's `_version` counter. Other objects always count as changed, as a write cannot be detected.
    """

    def __init__(self, batch: Any) -> None:
        self._seen: list[_Seen] = []
        self._unknown = False
        self._snapshot = rebuilt(batch, self._look_at)

    def again(self) -> Any:
        """The batch in new containers, with the same tensors."""
        return rebuilt(self._snapshot, _same)

    def intact(self) -> bool:
        """True if nothing in the batch was written to since it was given out."""
        return not self._unknown and all(seen.unchanged() for seen in self._seen)

    def _look_at(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.is_inference():
            self._unknown = True
        else:
            self._seen.append(_Seen(leaf, leaf._version, leaf.requires_grad))
        return leaf


@dataclass(frozen=True)
class _Seen:
    """A tensor with its state at the time when it was given out."""

    tensor: torch.Tensor
    version: int
    requires_grad: bool

    def unchanged(self) -> bool:
        tensor = self.tensor
        has_grad = tensor.is_leaf and tensor.grad is not None
        return tensor._version == self.version and tensor.requires_grad == self.requires_grad and not has_grad


def rebuilt(item: Any, leaf: Leaf) -> Any:
    """Copy the lists, tuples and mappings of `item`, keep plain values, and replace anything else by `leaf(x)`."""
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
        # Such as a tokenizer's output: a mapping of a special type, which a shallow copy preserves.
        fresh = copy.copy(item)
        for key, part in item.items():
            fresh[key] = rebuilt(part, leaf)
        return fresh
    return leaf(item)


def holds_data(item: Any) -> bool:
    """True if a batch contains a tensor, an array, text or bytes."""
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
        # Such as an open file, which cannot be copied. A step that changes it cannot be retried.
        return leaf
