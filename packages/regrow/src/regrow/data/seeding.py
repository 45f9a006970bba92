"""Seeds random generators as a function of integers, so that a retried step draws the same numbers."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import numpy as np
import torch
import xxhash

from regrow.devices import accelerators

_PART_BITS = 128
_PART_MASK = (1 << _PART_BITS) - 1


class Draw(IntEnum):
    """Purpose of random numbers: the first part of a seed, so that no two purposes draw the same numbers."""

    SAMPLE = 1
    SAMPLER = 2
    STREAM = 3
    BODY = 4


def derive(*parts: int) -> int:
    """128 bits that depend on all `parts` and their order (xxh3). Each part is taken modulo 2**128."""
    text = b"".join((part & _PART_MASK).to_bytes(_PART_BITS // 8, "little") for part in parts)
    return xxhash.xxh3_128_intdigest(text)


def seed_everything(*parts: int) -> None:
    """Seed torch, numpy and `random` in this process from `parts`; takes tens of microseconds.

    An accelerator's generators are seeded too if this process has initialized it. `torch.manual_seed` is not used, as
    it visits every accelerator backend at each call.
    """
    bits = derive(*parts)
    seed = bits & 0xFFFF_FFFF_FFFF_FFFF
    torch.default_generator.manual_seed(seed)
    accelerators.seed(seed)
    random.seed(seed)
    np.random.seed(bits >> 96)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Save the state of the global generators, and restore it at the end of the block."""
    pythons, numpys, torchs = random.getstate(), np.random.get_state(), torch.get_rng_state()
    devices = accelerators.random_state()
    try:
        yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)
        torch.set_rng_state(torchs)
        if devices is not None:
            accelerators.put_random_state(devices)
