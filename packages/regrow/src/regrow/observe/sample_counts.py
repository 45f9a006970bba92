"""Counts how often each sample of each epoch was read, step by step. Pure.

It keeps a bit per sample for the epochs in progress; each source's last epoch is still open at the end.
"""

from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regrow.core.messages.data import OrderSpec
from regrow.data.order import DROP, KEEP, Address, steps_per_epoch


class Complaint(NamedTuple):
    """Samples that were wrongly read again, or not read at all."""

    cause: str
    text: str
    times: int


class _Epoch:
    """One pass over a source."""

    def __init__(self, size: int, *, whole: bool) -> None:
        self._size = size
        self._bits = np.zeros(-(-size // 8), dtype=np.uint8)
        self.whole = whole
        """True if the epoch's steps were counted from the beginning, so that unread samples are an error."""

    def mark(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Mark distinct samples as read; returns the samples among them that had been read before."""
        at, bit = indices >> 3, np.left_shift(1, indices & 7).astype(np.uint8)
        again = (self._bits[at] & bit) != 0
        np.bitwise_or.at(self._bits, at, bit)
        found: NDArray[np.int64] = indices[again]
        return found

    @property
    def left(self) -> int:
        """Number of samples that were not read."""
        return self._size - int(np.unpackbits(self._bits).sum())

    def first_left(self) -> int:
        """The sample with the lowest index that was not read."""
        return int(np.flatnonzero(np.unpackbits(self._bits, bitorder="little")[: self._size] == 0)[0])


class SampleCounts:
    """Counts the reads of consecutive steps under one order.

    Args:
        spec: the order.
        shares: number of shares of a step; needed if the batch size is given per share.
        whole: True if the first step counted here is step 0; else the epochs in progress at the first step need not be
            complete.

    Attributes:
        read: number of samples, including padding.
        padding: number of samples that were read a second time in the short last batch of an epoch (`keep`).
        dropped: number of samples that the order leaves out at the end of epochs (`drop`).
        epochs: number of complete passes over a source.
    """

    REPEATED: ClassVar = "sample repeated"
    SKIPPED: ClassVar = "sample skipped"

    def __init__(self, spec: OrderSpec, shares: int, *, whole: bool) -> None:
        self._whole = whole
        self._sizes = [source.size for source in spec.sources]
        self._open: list[dict[int, _Epoch]] = [{} for _ in spec.sources]
        self._newest = [-1 for _ in spec.sources]
        self.go_on(spec, shares)
        self.read = self.padding = self.dropped = self.epochs = 0

    def go_on(self, spec: OrderSpec, shares: int) -> None:
        """From the next step on, count under another order of the same sources."""
        self._spec = spec
        steps = steps_per_epoch(spec, shares)
        batch = spec.global_batch or spec.batch_size * shares
        self._drops = self._sizes[0] - steps * batch if spec.remainder == DROP and steps else 0
        """Number of samples that each epoch leaves out."""

    def add(self, known: Sequence[Address], unknown: Sequence[Address] = ()) -> list[Complaint]:
        """Count the samples of the next step, of all shares together.

        Args:
            known: the addresses that were read, (epoch, index) or (epoch, (source, index)).
            unknown: addresses that should have been read, without evidence: neither counted nor reported as missing.
        """
        found: list[Complaint] = []
        for epoch, source, indices in _by_epoch(known):
            found.extend(self._add(source, epoch, indices))
        for epoch, source, indices in _by_epoch(unknown):
            if epoch >= self._newest[source] or epoch in self._open[source]:
                self._page(source, epoch).mark(np.unique(indices))
        for source, newest in enumerate(self._newest):
            for epoch in [number for number in self._open[source] if number < newest]:
                found.extend(self._close(source, epoch))
        return found

    def end(self) -> list[Complaint]:
        """Count the epochs that are complete after the last step; other epochs are left open."""
        found: list[Complaint] = []
        for source, epochs in enumerate(self._open):
            for number, epoch in list(epochs.items()):
                if epoch.whole and epoch.left == self._drops:
                    found.extend(self._close(source, number))
        return found

    def _page(self, source: int, epoch: int) -> _Epoch:
        pages = self._open[source]
        if epoch not in pages:
            pages[epoch] = _Epoch(self._sizes[source], whole=self._whole or self._newest[source] >= 0)
            self._newest[source] = max(self._newest[source], epoch)
        return pages[epoch]

    def _add(self, source: int, epoch: int, indices: NDArray[np.int64]) -> list[Complaint]:
        self.read += len(indices)
        if epoch < self._newest[source] and epoch not in self._open[source]:
            text = f"epoch {epoch} of {self._name(source)} was over, and {len(indices)} of its samples are read again"
            return [Complaint(self.REPEATED, text, len(indices))]
        unique = np.unique(indices)
        again = self._page(source, epoch).mark(unique)
        twice = len(indices) - len(unique)
        if twice and self._spec.remainder == KEEP:
            self.padding += twice
        elif twice:
            text = f"{twice} samples of epoch {epoch} of {self._name(source)} come twice in it"
            return [Complaint(self.REPEATED, text, twice)]
        if again.size == 0:
            return []
        text = f"sample {again[0]} of {self._name(source)} was read before in epoch {epoch}{_others(len(again))}"
        return [Complaint(self.REPEATED, text, len(again))]

    def _close(self, source: int, number: int) -> list[Complaint]:
        epoch = self._open[source].pop(number)
        if not epoch.whole:
            return []
        left = epoch.left
        if left == self._drops:
            self.epochs += 1
            self.dropped += left
            return []
        if left < self._drops:
            text = f"epoch {number} of {self._name(source)} has {self._drops - left} samples that its order leaves out"
            return [Complaint(self.REPEATED, text, self._drops - left)]
        text = f"epoch {number} of {self._name(source)} ended without sample {epoch.first_left()}{_others(left)}"
        return [Complaint(self.SKIPPED, text, left - self._drops)]

    def _name(self, source: int) -> str:
        return self._spec.sources[source].name or f"source {source}"


def _by_epoch(addresses: Sequence[Address]) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
    """For each epoch of each source: the epoch, the source, and the indices of its samples."""
    epochs = np.fromiter((epoch for epoch, _ in addresses), dtype=np.int64, count=len(addresses))
    rows = [index if isinstance(index, tuple) else (0, index) for _, index in addresses]
    sources, indices = np.array(rows, dtype=np.int64).reshape(-1, 2).T
    for source in np.unique(sources).tolist():
        for epoch in np.unique(epochs[sources == source]).tolist():
            yield epoch, source, indices[(sources == source) & (epochs == epoch)]


def _others(count: int) -> str:
    return f" and {count - 1} others" if count > 1 else ""
