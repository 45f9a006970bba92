"""Checks of a received graph: data types, lengths, offsets and places.

Data that does not fit raises `StateError` before memory is allocated or read.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from regrow.core.errors import StateError

_PLAIN = frozenset("biufcMmSU")
_POOL = 1024
_POSITIONS = {"MT19937": ("pos", 624), "Philox": ("buffer_pos", 4)}
"""Bit generators whose state has a position in a buffer, which numpy does not check: its name, and its maximum."""


def is_plain(dtype: np.dtype[Any]) -> bool:
    """True for numbers, dates, strings and bytes of fixed length, and structs of these: no objects, no raw memory."""
    if dtype.hasobject:
        return False
    if dtype.subdtype is not None:
        return is_plain(dtype.subdtype[0])
    if dtype.names is not None:
        fields = cast(Mapping[str, Any], dtype.fields)
        return all(is_plain(fields[name][0]) for name in dtype.names)
    return dtype.kind in _PLAIN


def plain_dtype(descr: Any) -> np.dtype[Any]:
    """The dtype of a description. Raises `StateError` for one with objects or raw memory."""
    dtype = np.lib.format.descr_to_dtype(descr)
    if not is_plain(dtype):
        raise StateError(f"{descr!r:.80} is no type of numbers or text that a received array may have")
    return dtype


def lengths(received: Any) -> list[int]:
    """A list of integers that are not negative, such as a shape. Raises `StateError`."""
    if type(received) is not list or not all(type(each) is int and each >= 0 for each in received):
        raise StateError(f"{received!r:.80} is no list of lengths")
    return cast(list[int], received)


def count_of(shape: Any) -> int:
    """Number of items of a received shape. Raises `StateError`."""
    return math.prod(lengths(shape))


def part_of(data: torch.Tensor, place: Any) -> torch.Tensor:
    """Bytes of a place, which is a start and a length. Raises `StateError` if they are not within the data."""
    first, length = lengths(place)
    if first + length > len(data):
        raise StateError(f"{length} bytes from {first} on were announced, of {len(data)} that were received")
    return data[first : first + length]


def kept_tensor(kept: Any, number: Any) -> torch.Tensor:
    """The kept tensor with this number. Raises `StateError` if it is none."""
    found = kept_at(kept, number)
    if not isinstance(found, torch.Tensor) or found.dtype is not torch.uint8 or found.dim() != 1:
        raise StateError(f"what was kept under {number} is no memory")
    return found


def kept_at(kept: Any, number: Any) -> Any:
    """The kept value with this number. Raises `StateError` if there is none."""
    if type(number) is not int or not isinstance(kept, Sequence) or not 0 <= number < len(kept):
        raise StateError(f"nothing was kept under {number!r:.80}")
    return kept[number]


def refuse_beyond(shape: Any, strides: Any, first: Any, dtype: torch.dtype, nbytes: int) -> None:
    """Raise `StateError` if a tensor would exceed its memory, which torch would enlarge."""
    sizes, steps, (start,) = lengths(shape), lengths(strides), lengths([first])
    if len(sizes) != len(steps):
        raise StateError(f"a tensor has {len(sizes)} sizes and {len(steps)} strides")
    if 0 in sizes:
        return
    last = start + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
    if (last + 1) * dtype.itemsize > nbytes:
        raise StateError("a tensor would lie outside its memory")


def seed_of(received: Any) -> np.random.SeedSequence | None:
    """Seed from which a bit generator spawns others. Raises `StateError`."""
    if received is None:
        return None
    entropy, key, pool, spawned = received
    lengths([pool, spawned])
    if pool > _POOL:
        raise StateError(f"a seed has a pool of {pool}")
    return np.random.SeedSequence(entropy, spawn_key=lengths(key), pool_size=pool, n_children_spawned=spawned)


def refuse_position(state: Any) -> None:
    """Raise `StateError` for a state of a numpy generator whose position is outside its buffer."""
    if not isinstance(state, Mapping):
        return
    name, most = _POSITIONS.get(str(state.get("bit_generator")), ("", 0))
    if name:
        inner = state["state"] if name == "pos" else state
        if not 0 <= int(inner[name]) <= most:
            raise StateError(f"the state of a {state['bit_generator']} points outside it")
