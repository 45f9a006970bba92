"""The state of sequences that come, go and wait: windows, match lengths and parameters, a slot for each sequence.

All changes between two steps are written at once, so an arrival costs the width of a window. Slots have no gaps: when
one ends, the last takes its place. So a step works only on present sequences, and the memory shrinks again after a
burst.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from lz_penalty.matches import NOTHING, Matches
from lz_penalty.parameters import LZParameters, Mode
from lz_penalty.rows import RowParameters

LEAST_SLOTS = 8
"""Least number of slots, however few sequences there are."""


@dataclass(frozen=True)
class Joining:
    """A sequence that starts, or starts again, in a slot.

    Attributes:
        parameters: of the penalty.
        tokens: its tokens so far; only the last ones are read.
    """

    parameters: LZParameters
    tokens: Sequence[int] = ()


class Slots:
    """The state of the present sequences. Not thread-safe.

    Args:
        device: where the logits are.
        width: tokens of a window.
    """

    def __init__(self, device: torch.device | str, width: int) -> None:
        self.device, self.width = torch.device(device), width
        self.count = 0
        """Slots in use: those from 0 on."""
        self._parameters: list[LZParameters] = []
        self._known = ParameterCount()
        # Buffers have twice the window's width, as a window moves by one a step: this copies tokens once in a width.
        self._windows = torch.empty((0, 2 * width), dtype=torch.int64, device=self.device)
        self._lengths = torch.empty((0, width), dtype=torch.int32, device=self.device)
        self._columns = RowParameters.of([], self.device, width)
        self._end = width
        self._rows: RowParameters | None = None

    @property
    def capacity(self) -> int:
        """Number of slots with allocated memory."""
        return len(self._windows)

    @property
    def rows(self) -> RowParameters:
        """The parameters of the slots in use."""
        if self._rows is None:
            self._rows = self._columns.first(self.count, *self._known.said())
        return self._rows

    @property
    def matches(self) -> Matches:
        """Windows and match lengths of the slots in use."""
        window = self._windows[: self.count, self._end - self.width : self._end]
        return Matches(window, self._lengths[: self.count])

    def leave(self, slots: Sequence[int]) -> list[tuple[int, int]]:
        """End the sequences of some slots. Returns the moves that fill the gaps: pairs of old and new slot."""
        gone = set(slots)
        if not gone:
            return []
        for slot in gone:
            self._known.forget(self._parameters[slot])
        left = self.count - len(gone)
        holes = sorted(slot for slot in gone if slot < left)
        movers = [slot for slot in range(left, self.count) if slot not in gone]
        if holes:
            at, source = self._index(holes), self._index(movers)
            for tensor in (self._windows, self._lengths, *self._columns.tensors()):
                tensor[at] = tensor[source]
            for hole, mover in zip(holes, movers, strict=True):
                self._parameters[hole] = self._parameters[mover]
        del self._parameters[left:]
        self.count, self._rows = left, None
        if self.capacity > LEAST_SLOTS and 4 * left <= self.capacity:
            self._resize(max(LEAST_SLOTS, 2 * left))
        return list(zip(movers, holes, strict=True))

    def join(self, sequences: Sequence[Joining]) -> range:
        """Add sequences; returns their slots, in order."""
        begin = self.count
        wanted = begin + len(sequences)
        if wanted > self.capacity:
            self._resize(max(LEAST_SLOTS, wanted, min(2 * self.capacity, 2 * wanted)))
        self._parameters += [each.parameters for each in sequences]
        for each in sequences:
            self._known.remember(each.parameters)
        self.count, self._rows = wanted, None
        self._write(range(begin, wanted), sequences)
        return range(begin, wanted)

    def renew(self, slots: Sequence[int], sequences: Sequence[Joining]) -> None:
        """Start some slots again, with the same parameters."""
        self._write(slots, sequences)

    def push(self, tokens: Sequence[int], waiting: Sequence[int] = ()) -> None:
        """Append one token to each slot in use; the slots in `waiting` do not change."""
        wait = self._index(waiting) if waiting else None
        before = (self.matches.window[wait], self._lengths[wait]) if wait is not None else None
        new = torch.tensor(tokens).to(self.device, non_blocking=True)
        rows, lengths, window = self.rows, self._lengths[: self.count], self.matches.window
        torch.minimum(lengths.add_(rows.one), rows.longest, out=lengths).mul_(window == new.unsqueeze(1))
        if self._end == self._windows.shape[1]:
            self._windows[: self.count, : self.width] = window.clone()
            self._end = self.width
        self._windows[: self.count].select(1, self._end).copy_(new)
        self._end += 1
        if before is not None:
            self._windows[wait, self._end - self.width : self._end], self._lengths[wait] = before

    def _write(self, slots: Sequence[int], sequences: Sequence[Joining]) -> None:
        """Write windows, lengths and parameters of all these into their slots at once."""
        if not sequences:
            return
        at: Tensor | slice = self._index(slots)
        if isinstance(slots, range):
            at = slice(slots.start, slots.stop)  # a slice makes no copy of the values
        # Sequences with equal parameters, as in a burst, are written as one row that is broadcast.
        kinds = {each.parameters for each in sequences}
        written = [next(iter(kinds))] if len(kinds) == 1 else [each.parameters for each in sequences]
        rows = RowParameters.of(written, self.device, self.width)
        for column, new in zip(self._columns.tensors(), rows.tensors(), strict=True):
            column[at] = new
        begin = self._end - self.width
        self._windows[at, begin : self._end] = NOTHING
        self._lengths[at] = 0
        late = [number for number, each in enumerate(sequences) if len(each.tokens)]
        if late:
            windows = numpy.full((len(late), self.width), NOTHING, dtype=numpy.int64)
            for row, number in enumerate(late):
                put_last(windows[row], sequences[number].tokens)
            found = Matches.found(
                torch.from_numpy(windows).to(self.device),
                RowParameters.of([sequences[number].parameters for number in late], self.device, self.width),
            )
            there = self._index([slots[number] for number in late])
            self._windows[there, begin : self._end] = found.window
            self._lengths[there] = found.lengths

    def _index(self, slots: Sequence[int]) -> Tensor:
        return torch.tensor(list(slots), dtype=torch.int64).to(self.device, non_blocking=True)

    def _resize(self, capacity: int) -> None:
        """Allocate `capacity` slots; the contents of those in use are kept."""
        kept = min(self.count, len(self._windows))

        def moved(tensor: Tensor) -> Tensor:
            new = tensor.new_empty((capacity, *tensor.shape[1:]))
            new[:kept] = tensor[:kept]
            return new

        self._windows, self._lengths = moved(self._windows), moved(self._lengths)
        self._columns = self._columns.each(moved)
        self._rows = None


class ParameterCount:
    """Counts the parameter values of sequences that come and go."""

    def __init__(self) -> None:
        self._modes: Counter[Mode] = Counter()
        self._lookbacks: Counter[int] = Counter()
        self._by_match = 0

    def remember(self, parameters: LZParameters, count: int = 1) -> None:
        """Count `count` more sequences with these parameters."""
        if parameters.strength > 0:
            self._modes[parameters.mode] += count
        self._lookbacks[parameters.lookback] += count
        self._by_match += count * parameters.by_match

    def forget(self, parameters: LZParameters) -> None:
        """Count one sequence fewer with these parameters."""
        self.remember(parameters, -1)

    def said(self) -> tuple[frozenset[Mode], int, bool]:
        """Modes in use, the longest look-back, and whether any needs the longest match of each token."""
        lookback = max((lookback for lookback, count in self._lookbacks.items() if count), default=1)
        return frozenset(mode for mode, count in self._modes.items() if count), lookback, self._by_match > 0


def put_last(row: "numpy.ndarray[tuple[int], numpy.dtype[numpy.int64]]", tokens: Sequence[int]) -> None:
    """Put the last tokens at the right end of a row. An array's memory is read directly, without Python integers."""
    found = last_tokens(tokens, len(row))
    if len(found):
        row[len(row) - len(found) :] = found


def last_tokens(tokens: Sequence[int], width: int) -> "numpy.ndarray[tuple[int], numpy.dtype[numpy.int64]]":
    """The last tokens of a sequence, at most `width`."""
    if getattr(tokens, "typecode", "") == "q" and len(tokens):
        return numpy.frombuffer(tokens, dtype=numpy.int64)[-width:]  # type: ignore[call-overload, no-any-return]
    return numpy.asarray(tokens[-width:], dtype=numpy.int64)
