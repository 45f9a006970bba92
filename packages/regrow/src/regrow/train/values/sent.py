"""Values of a script's variables on their way to another process."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from regrow.core.errors import StateError
from regrow.hydration.codec import decode, encode
from regrow.train.values.arrays import check_sendable, packed, unpacked
from regrow.train.values.plain import GrownCopy, atoms, copied


class Sent(NamedTuple):
    """One of them.

    Attributes:
        in_place: the container or array that is there stays, with this in it.
        value: itself.
        made: names of what was made as this flag has changed.
        by_all: each rank has found it out for itself in its rehearsal.
    """

    in_place: bool
    value: object
    made: Sequence[object]
    by_all: bool

    def encoded(self) -> bytes:
        """As bytes."""
        return encode([self.in_place, packed(self.value), list(self.made), self.by_all])


def received(data: bytes) -> Sent:
    """A value that was sent. Raises `StateError`."""
    match decode(data):
        case [bool(in_place), bytes(value), list(made), bool(by_all)]:
            return Sent(in_place, unpacked(value), made, by_all)
    raise StateError("what was told of a variable is not a value")


def sendable(kept: object, tail: int | None, means_nothing: Callable[[object], bool]) -> object:
    """Copy of a kept value. Raises `NotPlain`, `TooLarge` or `StateError` where it cannot be sent.

    Args:
        tail: of a long list take the last values alone.
        means_nothing: tells this of an atom.
    """
    kept = kept.values(tail) if isinstance(kept, GrownCopy) else kept
    if any(map(means_nothing, atoms(kept))):
        raise StateError("a clock's reading means nothing in another process")
    check_sendable(atoms(kept))
    return copied(kept)
