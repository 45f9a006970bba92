"""A page of shared memory in which a worker shows its progress, readable when the worker is stuck or dead.

One writer (the worker), one reader (its agent). The page is an anonymous memory file passed by descriptor, so it has
no name to leave behind.
"""

import mmap
import os
import struct
import zlib
from typing import NamedTuple

from regrow.core.ids import Generation, StepNo
from regrow.core.messages.data import BatchRecord
from regrow.core.messages.replicas import OwnValues
from regrow.core.phase import IN_BODY, Phase
from regrow.core.process.memory_file import memory_file

_LAYOUT = struct.Struct("<QqQqI")
_BATCH_LAYOUT = struct.Struct("<qqqq16s16s")
"""Fields of a shown batch: generation, step, share, number of shares, digest of its content, digest of its samples."""
_BATCH_AT = 64
_SUM_LAYOUT = struct.Struct("<I")
_SUM_AT = _BATCH_AT + _BATCH_LAYOUT.size
"""Position of the batch's checksum, which does not match a batch that was written only in part."""
_DIGEST_DIGITS = 16
_FLIGHT_LAYOUT = struct.Struct("<i60s")
_FLIGHT_AT = 512
"""Position of the number of collectives in flight (-1: unknown) and the description of the oldest."""
_OWN_END_AT, _STAY_AT = 1024, 1025
"""Positions of two flags: the script handles SIGTERM itself; the worker must stay (written by the agent)."""
_COUNT_LAYOUT = struct.Struct("<QQ")
_BELL_AT = 1032
"""Position of the descriptor and inode (`_COUNT_LAYOUT`) of the pipe that aborts device groups; 0: no pipe."""
_COUNTS_AT, _COUNTS_MOST = 2304, 112
"""Position of the table of counts (a group's name as a non-zero number, its collectives), and its most groups."""
BOARD_BYTES = mmap.PAGESIZE
_OWN_LAYOUT = struct.Struct("<q?II")
"""Header of a rank's own values: step, certain or not, length, checksum. One place for even, one for odd steps."""
OWN_MOST = 1 << 16
"""Largest size of a rank's own values, in bytes."""
_OWN_PLACE = _OWN_LAYOUT.size + OWN_MOST
_ALL_BYTES = BOARD_BYTES + 2 * _OWN_PLACE
BOARD_FILE = "regrow-board"
"""Name of the memory file, by which people and regrow recognize it."""


class BoardReading(NamedTuple):
    """One look at a board. `beats` grows with every sign of progress, `calls` with every collective of the step."""

    beats: int
    step: int
    calls: int
    generation: int
    phase: Phase


class Flight(NamedTuple):
    """The collectives that a worker has begun and not finished. `number` is -1 if unknown."""

    number: int
    oldest: str


class BatchShown(NamedTuple):
    """The batch that a worker has read for its present or its last step."""

    generation: Generation
    step: StepNo
    batch: BatchRecord


class Board:
    """The shared page. The agent opens it with `create`, the worker with `attach`."""

    def __init__(self, page: mmap.mmap) -> None:
        self._page = page
        self._beats = 0
        self._calls = 0
        self._step = -1
        self._generation = 0
        self._phase = Phase.BUILDING

    @classmethod
    def create(cls) -> tuple["Board", int]:
        """Make a page; returns it and the descriptor for the worker, which the caller must close. Raises `OSError`."""
        descriptor = memory_file(BOARD_FILE)
        try:
            os.ftruncate(descriptor, _ALL_BYTES)
            return cls(mmap.mmap(descriptor, _ALL_BYTES)), descriptor
        except OSError:
            os.close(descriptor)
            raise

    @classmethod
    def attach(cls, descriptor: int) -> "Board":
        """Map the page behind a descriptor that an agent has passed."""
        return cls(mmap.mmap(descriptor, _ALL_BYTES))

    def enter(self, phase: Phase, *, step: int | None = None, generation: int | None = None) -> None:
        """Show a new phase."""
        self._phase = phase
        if generation is not None:
            self._generation = generation
        if step is not None and step != self._step:
            self._step = step
            self._calls = 0
        self._beats += 1
        self._write()

    def call(self) -> None:
        """Count one more collective that was issued."""
        self._calls += 1
        self._beats += 1
        self._write()

    def _write(self) -> None:
        _LAYOUT.pack_into(self._page, 0, self._beats, self._step, self._calls, self._generation, self._phase)

    def read(self) -> BoardReading:
        """Read the page as it is now."""
        beats, step, calls, generation, phase = _LAYOUT.unpack_from(self._page, 0)
        return BoardReading(beats, step, calls, generation, Phase(phase))

    def body_beats(self) -> int | None:
        """Signs of progress so far, read by the worker itself; None outside a step's body and update."""
        return self._beats if self._phase in IN_BODY else None

    def show_flight(self, count: int, oldest: str) -> None:
        """Show how many collectives are in flight, and the oldest of them; from any thread."""
        _FLIGHT_LAYOUT.pack_into(self._page, _FLIGHT_AT, count, oldest.encode("ascii", "replace")[:60])

    def read_flight(self) -> Flight:
        """Read the collectives in flight."""
        count, oldest = _FLIGHT_LAYOUT.unpack_from(self._page, _FLIGHT_AT)
        return Flight(count, oldest.rstrip(b"\0").decode("ascii", "replace"))

    def show_count(self, place: int, group: int, calls: int) -> None:
        """Show how many collectives were called in `group`; `place` is the index of the group in this worker."""
        if place < _COUNTS_MOST:
            _COUNT_LAYOUT.pack_into(self._page, _COUNTS_AT + place * _COUNT_LAYOUT.size, group, calls)

    def read_counts(self) -> dict[str, int]:
        """Number of collectives called in each group, by the group's name on the board."""
        found = _COUNT_LAYOUT.iter_unpack(self._page[_COUNTS_AT : _COUNTS_AT + _COUNTS_MOST * _COUNT_LAYOUT.size])
        return {f"{group:016x}": calls for group, calls in found if group}

    def show_bell(self, descriptor: int, inode: int) -> None:
        """Show the agent the pipe by which it can abort this worker's groups while no Python code runs here."""
        _COUNT_LAYOUT.pack_into(self._page, _BELL_AT, descriptor, inode)

    def read_bell(self) -> tuple[int, ...]:
        """Descriptor and inode of the pipe that aborts this worker's groups; both 0 if there is none."""
        return _COUNT_LAYOUT.unpack_from(self._page, _BELL_AT)

    def show_own_end(self, own: bool) -> None:
        """Show whether the script handles SIGTERM itself."""
        self._page[_OWN_END_AT] = own

    @property
    def has_own_end(self) -> bool:
        """True if the script handles SIGTERM itself."""
        return bool(self._page[_OWN_END_AT])

    def hold(self) -> None:
        """Called by the agent: make a worker that gets a signal to end stay until the agent ends it."""
        self._page[_STAY_AT] = 1

    @property
    def must_stay(self) -> bool:
        """True if the worker must stay after a signal to end, until its agent ends it."""
        return bool(self._page[_STAY_AT])

    def show_batch(self, generation: Generation, step: StepNo, batch: BatchRecord) -> None:
        """Show the batch that was read for a step, before its body starts; it replaces the one shown before.

        Raises `ValueError` for a digest that is neither empty nor of 16 digits.
        """
        content, samples = _digits(batch.digest), _digits(batch.samples)
        shown = _BATCH_LAYOUT.pack(generation, step, batch.share, batch.shares, content, samples)
        self._page[_BATCH_AT:_SUM_AT] = shown
        _SUM_LAYOUT.pack_into(self._page, _SUM_AT, zlib.crc32(shown))

    def read_batch(self) -> BatchShown | None:
        """The batch that was shown last; None if there is none, or if its writer was killed while writing it."""
        shown = self._page[_BATCH_AT:_SUM_AT]
        generation, step, share, shares, content, samples = _BATCH_LAYOUT.unpack(shown)
        if shares == 0 or _SUM_LAYOUT.unpack_from(self._page, _SUM_AT) != (zlib.crc32(shown),):
            return None
        digests = (digits.rstrip(b"\0").decode("ascii", "replace") for digits in (content, samples))
        return BatchShown(Generation(generation), StepNo(step), BatchRecord(share, shares, *digests))

    def show_own(self, own: OwnValues) -> None:
        """Write this rank's own values, at most `OWN_MOST` bytes, in the place of those of two steps before."""
        at = BOARD_BYTES + own.step % 2 * _OWN_PLACE
        values = at + _OWN_LAYOUT.size
        self._page[values : values + len(own.values)] = own.values
        _OWN_LAYOUT.pack_into(self._page, at, own.step, own.sure, len(own.values), _sum_of(own))

    def read_own(self) -> list[OwnValues]:
        """The own values on the page, at most two, leaving out values that were written only in part."""
        found = []
        for at in (BOARD_BYTES, BOARD_BYTES + _OWN_PLACE):
            step, sure, length, total = _OWN_LAYOUT.unpack_from(self._page, at)
            values = at + _OWN_LAYOUT.size
            own = OwnValues(StepNo(step), self._page[values : values + min(length, OWN_MOST)], sure)
            found += [own] if length and total == _sum_of(own) else []
        return found

    def let_go(self) -> None:
        """In a fork of the board's owner: write to a private page from now on, which nobody reads."""
        self._page = mmap.mmap(-1, _ALL_BYTES)

    def close(self) -> None:
        """Unmap the page."""
        self._page.close()


def _sum_of(own: OwnValues) -> int:
    return zlib.crc32(own.values, zlib.crc32(struct.pack("<q?", own.step, own.sure)))


def _digits(digest: str) -> bytes:
    if len(digest) not in (0, _DIGEST_DIGITS):
        raise ValueError(f"{digest!r} is not a digest of {_DIGEST_DIGITS} digits")
    return digest.encode("ascii")
