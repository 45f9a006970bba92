"""Measures the speed of the node's memory on one core, beside other work."""

import time
from collections.abc import Iterator

import numpy as np

from regrow.health.readings import BandwidthReading, ProbeAt, ProbeSettings, Reading

_BYTES = 32 << 20
_ROUNDS = 3


def read(settings: ProbeSettings) -> Iterator[ProbeAt | Reading]:
    """Yield the best of a few copies, since other work only makes a copy slower."""
    yield ProbeAt("memory-bandwidth", "cpu")
    source = np.ones(_BYTES, dtype=np.uint8)
    target = np.empty_like(source)
    np.copyto(target, source)  # this write makes the kernel allocate the pages
    best = float("inf")
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - start)
    yield BandwidthReading("cpu", 2 * _BYTES / best)
