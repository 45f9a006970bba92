"""Matrices of small integers whose product is exact in any order of summation, in float32 and bfloat16.

Elements have at most the magnitude `bound` and `SIZE` products are added, so every partial sum is an integer of at most
`SIZE * bound**2`. float32 represents all integers up to 2**24 (and TF32, with 10 bits of mantissa, all factors);
bfloat16, with 8 bits, all up to 256. So a single wrong bit in a factor, a product or a sum gives a wrong integer.
"""

from typing import Any

import numpy as np

SIZE = 256
BOUNDS = {"float32": 15, "bfloat16": 1}
"""The largest element for each type: 256 * 15**2 < 2**24, 256 * 1**2 = 2**8."""

Matrix = np.ndarray[Any, Any]


def factors(bound: int, seed: int) -> tuple[Matrix, Matrix]:
    """Two pseudorandom matrices of integers from `-bound` to `bound`, the same on every machine."""
    at = np.arange(2 * SIZE * SIZE, dtype=np.uint64) + np.uint64(seed * 2_654_435_761 + 1)
    mixed = (at * np.uint64(6_364_136_223_846_793_005)) >> np.uint64(33)
    values = (mixed % np.uint64(2 * bound + 1)).astype(np.int64) - bound
    left, right = values.reshape(2, SIZE, SIZE)
    return left, right


def product(left: Matrix, right: Matrix) -> Matrix:
    """The expected product, in integers: computed by another unit of the processor than the tested one."""
    return left @ right


def differences(got: Matrix, want: Matrix) -> tuple[int, str]:
    """Number of wrong elements, and a description of the first."""
    wrong = np.argwhere(~(got == want))
    if len(wrong) == 0:
        return 0, ""
    row, column = (int(each) for each in wrong[0])
    return len(wrong), f"element ({row}, {column}) is {float(got[row, column]):g} instead of {int(want[row, column])}"
