"""Which samples a step reads: a pure function of the seed and the step, computed in time of the batch, not of the data.

The shuffle of an epoch is a keyed bijection of `range(size)` that is evaluated at the wanted places only. It is a
Feistel network over pairs (left, right) of a domain a x b >= size, with a = ceil(sqrt(size)), whose rounds add
alternately to the left half (mod a) and to the right half (mod b); what falls outside `range(size)` is put through the
network again until it falls inside, "cycle walking". See Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
CT-RSA 2002. It shuffles; it keeps no secrets.

The mapping from (size, seed, epoch) to an order is part of the package's contract: it never changes, as a job may be
resumed by a later version. A golden test holds this.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from regrow.core.errors import UsageError

_ROUNDS = 8
_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MAX_SIZE = 1 << 62


def _mix(word: int) -> int:
    """The finalizer of splitmix64: a bijection of 64-bit words."""
    word = ((word ^ (word >> 30)) * _MIX_1) & _WORD
    word = ((word ^ (word >> 27)) * _MIX_2) & _WORD
    return word ^ (word >> 31)


def _mix_all(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_MIX_1)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_MIX_2)
    return words ^ (words >> np.uint64(31))


def _round_keys(seed: int, epoch: int) -> list[np.uint64]:
    state = _mix((_mix((seed + _GOLDEN) & _WORD) + epoch * _GOLDEN) & _WORD)
    return [np.uint64(_mix((state + (i + 1) * _GOLDEN) & _WORD)) for i in range(_ROUNDS)]


def shuffled(positions: NDArray[np.uint64], *, size: int, seed: int, epoch: int) -> NDArray[np.uint64]:
    """The samples at `positions` of an epoch's shuffled order.

    For fixed (size, seed, epoch) a bijection of `range(size)`. `positions`: one dimension, each below `size`, and
    `size` at most 2**62. The seed counts modulo 2**64.
    """
    keys = _round_keys(seed & _WORD, epoch)
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    values = _encipher(positions, keys, rows, columns)
    outside = np.flatnonzero(values >= size)
    while outside.size:
        # Ends: the cycle that led out of range(size) has its start, which lies inside, on it.
        values[outside] = _encipher(values[outside], keys, rows, columns)
        outside = outside[values[outside] >= size]
    return values


def _encipher(values: NDArray[np.uint64], keys: list[np.uint64], rows: int, columns: int) -> NDArray[np.uint64]:
    a, b = np.uint64(rows), np.uint64(columns)
    left, right = values // b, values % b
    for i, key in enumerate(keys):
        if i % 2 == 0:
            left = (left + _mix_all(right ^ key) % a) % a
        else:
            right = (right + _mix_all(left ^ key) % b) % b
    result: NDArray[np.uint64] = left * b + right
    return result


def slice_for(indices: Sequence[int], rank: int, world: int) -> list[int]:
    """The samples of `indices` that `rank` of `world` takes: every world-th one from its rank on.

    The slices of all ranks are disjoint and cover `indices`. The same that torch's `DistributedSampler` takes.
    """
    _check_place(rank, world)
    return list(indices[rank::world])


def padded(indices: Sequence[int], world: int) -> list[int]:
    """`indices`, and as many of their first again that `world` ranks have equal shares and none has nothing.

    Needed by the last batch of an epoch only: data-parallel training weights all ranks' gradients the same, and a rank
    without a sample could not take part in the reduction. Raises `UsageError` where there is no index to repeat.
    """
    if not indices:
        raise UsageError("a global batch is empty", hint="the sampler must give at least one sample an epoch")
    missing = -len(indices) % world
    return [*indices, *(indices[i % len(indices)] for i in range(missing))]


@dataclass(frozen=True)
class GlobalOrder:
    """The samples of every step, whatever the world.

    size: samples in the data set. global_batch: samples a step, of all ranks together. An epoch is one pass over the
    data set, each sample once; its last batch is shorter where `global_batch` does not divide `size`, or is left out
    (`drop_last`). Raises `UsageError` where no batch can be made.
    """

    size: int
    global_batch: int
    seed: int
    shuffle: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        """Checks that there is a batch."""
        if not 0 < self.size <= _MAX_SIZE:
            raise UsageError(
                f"an order over {self.size} samples was asked for",
                hint="give session.steps a data set with a len() from 1 to 2**62",
            )
        if self.global_batch < 1:
            raise UsageError(f"the global batch is {self.global_batch} samples", hint="make batch_size at least 1")
        if self.drop_last and self.size < self.global_batch:
            raise UsageError(
                f"the data set has {self.size} samples, less than one global batch of {self.global_batch}, "
                "and drop_last leaves that batch out",
                hint="set drop_last=False, or make batch_size smaller",
            )

    @property
    def steps_per_epoch(self) -> int:
        """Steps in one pass over the data set."""
        if self.drop_last:
            return self.size // self.global_batch
        return -(-self.size // self.global_batch)

    def epoch_of(self, step: int) -> int:
        """The pass over the data set that `step` belongs to, from 0."""
        return step // self.steps_per_epoch

    def indices(self, step: int) -> list[int]:
        """The samples of `step`, of all ranks together, in order. Costs time of the batch only."""
        if step < 0:
            raise UsageError(f"there is no step {step}", hint="steps are numbered from 0")
        epoch, place = divmod(step, self.steps_per_epoch)
        first = place * self.global_batch
        last = min(first + self.global_batch, self.size)
        if not self.shuffle:
            return list(range(first, last))
        order: list[int] = shuffled(
            np.arange(first, last, dtype=np.uint64), size=self.size, seed=self.seed, epoch=epoch
        ).tolist()
        return order


def _check_place(rank: int, world: int) -> None:
    if not 0 <= rank < world:
        raise UsageError(f"rank {rank} is no place in a world of {world}", hint="ranks go from 0 to world - 1")
