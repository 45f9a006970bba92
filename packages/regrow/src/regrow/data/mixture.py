"""Selects the samples that a step reads from several sources, by weight, as fast at step 10**9 as at step 0.

The samples of all steps form one sequence, which is cut into cycles. Each source has a whole number of places in a
cycle, its *quota*, by largest remainders of the weights; the places are shuffled anew for each cycle. So the number of
samples that a source has given before any place is quota times cycle plus a count within one cycle. A source gives its
samples in its own order, epoch after epoch, each once per epoch, also when the weights change. Pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from regrow.core.errors import UsageError
from regrow.data.shuffle import shuffled, split_seed

_CYCLE = 1 << 12
_LONGEST_CYCLE = 1 << 20
_LEAST_QUOTA = 32
"""Least quota of the source with the least weight, so that its share is exact within a few percent."""
_CYCLES_KEPT = 4
_SLOTS, _SAMPLES = 0, 1
"""Uses of the seed: shuffling the places of a cycle, and the samples of a source."""

MixedAddress = tuple[int, tuple[int, int]]
"""(epoch of the source, (source, index))."""
_Schedule = Sequence[tuple[int, Sequence[float]]]


@dataclass(frozen=True)
class Weighting:
    """A schedule of the sources' weights by first step. Made by `of`, which checks it."""

    schedule: tuple[tuple[int, tuple[float, ...]], ...]

    @classmethod
    def of(cls, names: Sequence[str], schedule: _Schedule) -> "Weighting":
        """Check a schedule of (first step, weights in the order of `names`). Raises `UsageError` if it is invalid."""
        if not names:
            raise UsageError("a mixture of no sources", hint="give it at least one data set")
        if not schedule or schedule[0][0] != 0:
            raise UsageError("a mixture has no weights for step 0", hint="let its schedule begin with (0, {...})")
        for (before, _), (after, _) in pairwise(schedule):
            if after <= before:
                raise UsageError(
                    f"the weights from step {after} on come after those from step {before} on",
                    hint="put the schedule in the order of steps, each step once",
                )
        for step, weights in schedule:
            _check_weights(names, step, weights)
        return cls(tuple((step, tuple(weights)) for step, weights in schedule))


def _check_weights(names: Sequence[str], step: int, weights: Sequence[float]) -> None:
    at = f" from step {step} on" if step else ""
    if len(weights) != len(names):
        raise UsageError(f"a mixture of {len(names)} sources has {len(weights)} weights{at}")
    for name, weight in zip(names, weights, strict=True):
        if not (math.isfinite(weight) and weight >= 0):
            raise UsageError(f"the weight of {name!r}{at} is {weight}", hint="weights are 0 or more, and finite")
    if not any(weights):
        raise UsageError(f"all weights of a mixture are 0{at}", hint="give one of its sources a weight")
    for name, weight, quota in zip(names, weights, _quotas_of(weights), strict=True):
        if weight > 0 and quota == 0:
            raise UsageError(
                f"the weight of {name!r}{at} is {weight / sum(weights):.1e} of all, which is next to nothing",
                hint=f"make it 0, or at least 1/{_LONGEST_CYCLE}",
            )


def _quotas_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Number of places that each source has in a cycle; their sum is the cycle's length."""
    total = math.fsum(weights)
    least = min(weight for weight in weights if weight > 0) / total
    length = _CYCLE
    while length < _LONGEST_CYCLE and least * length < _LEAST_QUOTA:
        length *= 2
    exact = [weight / total * length for weight in weights]
    quotas = [math.floor(part) for part in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (quotas[i] - exact[i], i))
    for i in by_remainder[: length - sum(quotas)]:
        quotas[i] += 1
    return tuple(quotas)


class _Cycle(NamedTuple):
    """For each place of a cycle: its source, and the number of that source's samples earlier in the cycle."""

    source: NDArray[np.int64]
    rank: NDArray[np.int64]


@lru_cache(maxsize=_CYCLES_KEPT)
def _cycle(quotas: tuple[int, ...], seed: int, number: int) -> _Cycle:
    length, counts = sum(quotas), np.array(quotas, dtype=np.int64)
    ends = np.cumsum(counts)
    slots = shuffled(np.arange(length, dtype=np.uint64), size=length, seed=seed, epoch=number)
    source = np.searchsorted(ends, slots.astype(np.int64), side="right").astype(np.int64)
    rank = np.empty_like(source)
    # A stable sort by source keeps the places of each in order: so the n-th of a source gets rank n.
    rank[np.argsort(source, kind="stable")] = np.arange(length) - np.repeat(ends - counts, counts)
    return _Cycle(source, rank)


class _Segment:
    """The part of the sequence of samples that has one set of weights.

    Args:
        first: its first place in the sequence.
        given: number of samples that each source has given before that place.
        weights: weights of the sources.
        seed: seed of the shuffles of its cycles.
    """

    def __init__(self, first: int, given: NDArray[np.int64], weights: Sequence[float], seed: int) -> None:
        self.first = first
        self._given = given
        self._seed = seed
        self._places = _quotas_of(weights)
        self._length = sum(self._places)
        self._quotas = np.array(self._places, dtype=np.int64)

    def given_before(self, place: int) -> NDArray[np.int64]:
        """Number of samples that each source has given before `place` of the sequence."""
        cycle, within = divmod(place - self.first, self._length)
        part = np.bincount(_cycle(self._places, self._seed, cycle).source[:within], minlength=len(self._quotas))
        return self._given + cycle * self._quotas + part

    def samples(self, place: int, count: int) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """For `count` places from `place` on, one pair per cycle: sources, and positions in each source's sequence."""
        parts = []
        while count > 0:
            cycle, within = divmod(place - self.first, self._length)
            one = _cycle(self._places, self._seed, cycle)
            taken = min(count, self._length - within)
            source = one.source[within : within + taken]
            number = self._given[source] + cycle * self._quotas[source] + one.rank[within : within + taken]
            parts.append((source, number))
            place, count = place + taken, count - taken
        return parts


class MixtureOrder:
    """The samples of every step of a mixture, independent of the world size.

    Args:
        sizes: number of samples in each source.
        weighting: the schedule of weights.
        global_batch: samples per step, of all shares together.
        seed: seed of all shuffles, modulo 2**64.
        shuffle: True: shuffle a source's samples in each of its epochs; False: keep the order of the source.

    Raises:
        UsageError: a source or the global batch is empty.
    """

    def __init__(
        self, sizes: Sequence[int], weighting: Weighting, global_batch: int, *, seed: int, shuffle: bool
    ) -> None:
        if global_batch < 1:
            raise UsageError(f"the global batch is {global_batch} samples", hint="make batch_size at least 1")
        for i, size in enumerate(sizes):
            if size < 1:
                raise UsageError(f"source {i} of a mixture is empty", hint="leave it out")
        self._sizes = list(sizes)
        self._weighting = weighting
        self._batch = global_batch
        self._shuffle = shuffle
        self._seeds = [split_seed(split_seed(seed, _SAMPLES), i) for i in range(len(sizes))]
        self._slots_seed = split_seed(seed, _SLOTS)
        self._segments: list[_Segment] = []

    def addresses(self, step: int) -> list[MixedAddress]:
        """(epoch of the source, (source, index)) of each sample of `step`, of all shares together, in order."""
        if step < 0:
            raise UsageError(f"there is no step {step}", hint="steps are numbered from 0")
        found: list[MixedAddress] = []
        for source, number in self._segment_of(step).samples(step * self._batch, self._batch):
            found += self._found(source, number)
        return found

    def _found(self, source: NDArray[np.int64], number: NDArray[np.int64]) -> list[MixedAddress]:
        epoch, index = np.empty_like(number), np.empty_like(number)
        for i in np.unique(source).tolist():
            size = self._sizes[i]
            mine = np.flatnonzero(source == i)
            epoch[mine], index[mine] = np.divmod(number[mine], size)
            if self._shuffle:
                for pass_ in np.unique(epoch[mine]).tolist():
                    these = mine[epoch[mine] == pass_]
                    order = shuffled(index[these].astype(np.uint64), size=size, seed=self._seeds[i], epoch=pass_)
                    index[these] = order.astype(np.int64)
        return list(zip(epoch.tolist(), zip(source.tolist(), index.tolist(), strict=True), strict=True))

    def _segment_of(self, step: int) -> _Segment:
        at = 0
        for i, (first, _) in enumerate(self._weighting.schedule):
            if first <= step:
                at = i
        # Assigned as a whole, as another thread may call this at the same time: it makes the same segments.
        segments = list(self._segments)
        for number in range(len(segments), at + 1):
            first, weights = self._weighting.schedule[number]
            place = first * self._batch
            given = segments[-1].given_before(place) if segments else np.zeros(len(self._sizes), dtype=np.int64)
            segments.append(_Segment(place, given, weights, split_seed(self._slots_seed, number)))
        self._segments = segments
        return segments[at]
