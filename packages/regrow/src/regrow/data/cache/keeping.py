"""Selects the entries to evict when room is short, and the entries to make next, without clock or files.

A reader's position is the entry that it needs next in its sequence (share, shares), which it reads step by step. Needed
entries claim room in this order, until the budget is used up: entries that readers wait for; entries being made; each
reader's current step and the next one; the two steps behind each reader, which a retry after a fault reads again; then
step after step ahead, all sequences in parallel. Pure.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import NamedTuple

from regrow.data.cache.layout import Key

BEHIND = 2
"""Number of steps behind a reader that are kept if there is room."""
_NEAR = 1
_MOST_AHEAD = 4096
"""Most entries ahead of all readers together, to limit the time of a decision."""
_MOST_REMEMBERED = 10_000

_Sequence = tuple[int, int]
_Sequences = dict[_Sequence, list[int]]
"""Steps of the readers' positions, in order, by (share, shares)."""


class Decision(NamedTuple):
    """Entries to remove first (`evict`), then entries to make, in order: they fit, as far as sizes are known."""

    evict: list[Key]
    make: list[Key]


class Keeping:
    """Decides for the entries of one loader.

    It remembers the sizes of evicted entries, so that an entry is not made again before it fits.

    Args:
        budget: bytes that entries may take. A needed entry may exceed it; it is then the only one.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._evicted: dict[Key, int] = {}

    def decide(
        self,
        readers: Iterable[Key],
        there: Mapping[Key, int],
        *,
        estimate: int,
        until: int | None = None,
        wants: Collection[Key] = (),
        underway: Collection[Key] = (),
        limit: int = 1,
    ) -> Decision:
        """Select the entries to evict and the entries to make now.

        Args:
            readers: the entry that each reader needs next, also after it went back.
            there: the present entries, and their sizes in bytes.
            estimate: assumed size in bytes of an entry of unknown size.
            until: steps of the whole training; None: no end.
            wants: entries that readers wait for; they come first.
            underway: entries that are being made already.
            limit: most entries to make next.
        """
        sequences = _sequences_of(readers)
        claimed, make = self._claim(sequences, there, estimate, until, wants, underway, limit)
        coming = sum(self._size(key, there, estimate) for key in {*make, *underway} if key not in there)
        excess = sum(there.values()) + coming - self.budget
        evict: list[Key] = []
        if excess > 0:
            # Evict first the entries that are never read again, and last those that a reader waits for.
            free = (key for key in there if key not in claimed)
            read = {key for key in there if until is None or key.step < until}
            for key in sorted(free, key=lambda key: (key in wants, key in read, _last_needed(key, sequences))):
                evict.append(key)
                excess -= there[key]
                if excess <= 0:
                    break
        self._remember({key: there[key] for key in evict}, sequences)
        return Decision(evict, make)

    def _claim(
        self,
        sequences: _Sequences,
        there: Mapping[Key, int],
        estimate: int,
        until: int | None,
        wants: Collection[Key],
        underway: Collection[Key],
        limit: int,
    ) -> tuple[set[Key], list[Key]]:
        """Entries that must stay, and entries to make, until the budget or `limit` is reached."""
        room = self.budget
        claimed: set[Key] = set()
        make: list[Key] = []
        for key in chain(sorted(wants), sorted(underway), _needs(sequences, there, until)):
            if key in claimed:
                continue
            missing = key not in there and key not in underway
            if missing and len(make) == limit:
                break
            size = self._size(key, there, estimate)
            if size > room and claimed:
                break
            room -= size
            claimed.add(key)
            if missing:
                make.append(key)
        return claimed, make

    def _size(self, key: Key, there: Mapping[Key, int], estimate: int) -> int:
        size = there.get(key)
        return self._evicted.get(key, max(1, estimate)) if size is None else size

    def _remember(self, evicted: Mapping[Key, int], sequences: _Sequences) -> None:
        self._evicted.update(evicted)
        if len(self._evicted) > _MOST_REMEMBERED:
            self._evicted = {key: size for key, size in self._evicted.items() if _distance(key, sequences) is not None}
        if len(self._evicted) > _MOST_REMEMBERED:
            self._evicted = dict(evicted)


def _sequences_of(readers: Iterable[Key]) -> _Sequences:
    steps: dict[_Sequence, set[int]] = {}
    for step, share, shares in readers:
        steps.setdefault((share, shares), set()).add(step)
    return {sequence: sorted(at) for sequence, at in sorted(steps.items())}


def _needs(sequences: _Sequences, there: Collection[Key], until: int | None) -> Iterator[Key]:
    """Entries that readers need, most urgent first; keys may repeat."""
    yield from _ahead(sequences, range(_NEAR + 1), until)
    # Entries behind a reader are kept, but not made.
    yield from (key for key in _ahead(sequences, range(-1, -BEHIND - 1, -1), until) if key in there)
    readers = sum(map(len, sequences.values()))
    if readers:
        yield from _ahead(sequences, range(_NEAR + 1, max(_NEAR + 2, _MOST_AHEAD // readers)), until)


def _ahead(sequences: _Sequences, distances: Iterable[int], until: int | None) -> Iterator[Key]:
    for distance in distances:
        for sequence, steps in sequences.items():
            for at in steps:
                step = at + distance
                if step >= 0 and (until is None or step < until):
                    yield Key(step, *sequence)


def _distance(key: Key, sequences: _Sequences) -> int | None:
    """Steps from the nearest reader that has not passed the entry; negative if all have; None: no reader."""
    steps = sequences.get((key.share, key.shares))
    if steps is None:
        return None
    return min((key.step - at for at in steps if at <= key.step), default=key.step - steps[0])


def _last_needed(key: Key, sequences: _Sequences) -> tuple[int, int, Key]:
    """Sort key by which the entries to evict first come first."""
    distance = _distance(key, sequences)
    if distance is None:
        return 0, key.step, key
    if distance < -BEHIND:
        return 1, key.step, key
    if distance > _NEAR:
        return 2, -distance, key
    return (3, key.step, key) if distance < 0 else (4, -distance, key)
