"""Computes a product with a known answer on each usable CPU core, because silent errors affect single cores.

P. H. Hochschild et al., Cores that don't count, HotOS 2021, https://doi.org/10.1145/3458336.3465297
"""

import os
import time
from collections.abc import Iterator

import numpy as np

from regrow.core.ids import Seconds
from regrow.health.probes import known_answer
from regrow.health.readings import ProbeAt, ProbeSettings, ProductReading, Reading

_BUDGET_S: Seconds = 0.3
"""Time after which the remaining cores are left for a later examination, which starts at another core."""


def read(settings: ProbeSettings) -> Iterator[ProbeAt | Reading]:
    """Yield one reading for all cores."""
    yield ProbeAt("processor", "cpu")
    left, right = known_answer.factors(known_answer.BOUNDS["float32"], seed=0)
    want = known_answer.product(left, right)
    a, b = left.astype(np.float32), right.astype(np.float32)
    allowed = sorted(os.sched_getaffinity(0))
    start = time.time_ns() % len(allowed)
    count, wrong, first = 0, 0, ""
    deadline = time.monotonic() + _BUDGET_S
    for core in [*allowed[start:], *allowed[:start]]:
        if count and time.monotonic() > deadline:
            break
        os.sched_setaffinity(0, {core})
        missed, where = known_answer.differences(a @ b, want)
        count, wrong = count + 1, wrong + missed
        first = first or (f"on core {core} {where}" if missed else "")
    os.sched_setaffinity(0, allowed)
    yield ProductReading("cpu", "float32", count, wrong, first)
