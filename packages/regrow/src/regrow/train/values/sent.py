"""Encodes values of a script's variables for another process."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from regrow.core.errors import StateError
from regrow.hydration.codec import decode, encode
from regrow.train.values.arrays import check_sendable, packed, unpacked
from regrow.train.values.plain import GrownCopy, PlainCopy, atoms, copied, has_grown


class Sent(NamedTuple):
    """A variable's value as it is sent.

    Attributes:
        in_place: True if the receiver keeps its container or array, and gives it this content.
        value: the value itself.
        made: names of things that were made when this flag has changed.
        by_all: True if each rank has found out the value by itself in its rehearsal.
    """

    in_place: bool
    value: object
    made: Sequence[object]
    by_all: bool

    def encoded(self) -> bytes:
        """Encode the value as bytes."""
        return encode([self.in_place, packed(self.value), list(self.made), self.by_all])


def received(data: bytes) -> Sent:
    """A value that was sent. Raises `StateError`."""
    match decode(data):
        case [bool(in_place), bytes(value), list(made), bool(by_all)]:
            return Sent(in_place, unpacked(value), made, by_all)
    raise StateError("the data received for a variable is not a value")


def is_reading(value: object, since: tuple[float, float]) -> bool:
    """True if this may be a clock's reading after `since`, in seconds or nanoseconds: other processes cannot use it."""
    if (type(value) is not float and type(value) is not int) or value < min(since):
        return False
    number = float(value) if abs(value) < 1e300 else 0.0
    until = time.time(), time.monotonic()
    return any(a <= each <= b for each in (number, number / 1e9) for a, b in zip(since, until, strict=True))


def spelt_out(kept: object, tail: int | None = None) -> object:
    """A kept value in which lists that were kept by length are replaced by copies of their items."""
    if isinstance(kept, GrownCopy):
        return kept.values(tail)
    if not isinstance(kept, PlainCopy) or not has_grown(kept):
        return kept
    return PlainCopy(kept.thing, kept.keys, [spelt_out(each, tail) for each in kept.items])


def sendable(kept: object, tail: int | None, means_nothing: Callable[[object], bool]) -> object:
    """Copy of a kept value. Raises `NotPlain`, `TooLarge` or `StateError` if it cannot be sent.

    Args:
        tail: send only this many last values of a long list.
        means_nothing: returns True for an atom that other processes cannot use.
    """
    kept = spelt_out(kept, tail)
    if any(map(means_nothing, atoms(kept))):
        raise StateError("a clock's reading means nothing in another process")
    check_sendable(atoms(kept))
    return copied(kept)
