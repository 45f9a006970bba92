"""The shuffle of an epoch: a keyed bijection of `range(size)`, evaluated only at the requested positions.

It is a Feistel network over pairs (left, right) of a domain a x b >= size, with a = ceil(sqrt(size)), whose rounds add
alternately to the left half (mod a) and to the right half (mod b); a result outside `range(size)` goes through the
network again until it falls inside ("cycle walking"). See Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
CT-RSA 2002. It is not meant to be cryptographically secure.

The mapping from (size, seed, epoch) to an order is part of the package's contract: it never changes, as a job may be
resumed by a later version. A golden test checks this. Pure.
"""

import math

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
MAX_SIZE = 1 << 62


def shuffled(positions: NDArray[np.uint64], *, size: int, seed: int, epoch: int) -> NDArray[np.uint64]:
    """The samples at `positions` of an epoch's shuffled order.

    For fixed (size, seed, epoch) a bijection of `range(size)`. `positions`: one-dimensional, each below `size`; `size`
    is at most 2**62. The seed is taken modulo 2**64.
    """
    keys = _round_keys(seed & _WORD, epoch)
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    values = _encipher(positions, keys, rows, columns)
    outside = np.flatnonzero(values >= size)
    while outside.size:
        # This terminates: the cycle contains its start, which lies inside range(size).
        values[outside] = _encipher(values[outside], keys, rows, columns)
        outside = outside[values[outside] >= size]
    return values


def split_seed(seed: int, part: int) -> int:
    """A 64-bit seed for shuffle number `part`, derived from a seed that several shuffles share."""
    return _mix((_mix((seed + _GOLDEN) & _WORD) ^ _mix((part + 1) * _GOLDEN & _WORD)) & _WORD)


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
