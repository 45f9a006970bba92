"""Randomness as a function of integers: what makes a retried step draw the same numbers."""

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
    """Use of random numbers; the first part of a seed, so that no two uses draw the same."""

    SAMPLE = 1
    SAMPLER = 2
    STREAM = 3
    BODY = 4


def derive(*parts: int) -> int:
    """128 bits that depend on all `parts` and their order (xxh3). Each part counts modulo 2**128."""
    text = b"".join((part & _PART_MASK).to_bytes(_PART_BITS // 8, "little") for part in parts)
    return xxhash.xxh3_128_intdigest(text)


def seed_everything(*parts: int) -> None:
    """Seeds torch, numpy and `random` in this process from `parts`; costs tens of microseconds.

    Generators of an accelerator are seeded where this process has taken it into use. `torch.manual_seed` is not used,
    as it visits every accelerator backend at each call.
    """
    bits = derive(*parts)
    seed = bits & 0xFFFF_FFFF_FFFF_FFFF
    torch.default_generator.manual_seed(seed)
    accelerators.seed(seed)
    random.seed(seed)
    np.random.seed(bits >> 96)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Within this, numbers may be drawn from the global generators, which are put back at the end."""
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
