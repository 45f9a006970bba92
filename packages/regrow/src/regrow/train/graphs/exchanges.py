"""Values that steps exchange in classes, functions and enumerations, which have them for all their objects."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from regrow.train.graphs.kinds import NotCarried
from regrow.train.graphs.outside import Given, alike
from regrow.train.graphs.places import Places, exchanged_in, is_plain_code, others, places, put, receive, travels
from regrow.train.graphs.walk import HOLDERS, Thing

Held = dict[int, tuple[object, Places]]
"""By the id of a class or a function: that, and its places."""


class Received(NamedTuple):
    """A value that steps have exchanged elsewhere."""

    holder: object
    at: str
    value: object
    gone: bool


class Exchanges:
    """Knows what holders had as they were first seen.

    Data that was put there since travels with the state, and what else was put there stays with this process.
    """

    def __init__(self) -> None:
        self._first: Held = {}
        self._others: dict[int, Given] = {}
        self.told: dict[int, set[str]] = {}
        """By holder, places whose value travels, as steps exchange it."""
        self.stays: dict[int, dict[str, str]] = {}
        """By holder, places whose value cannot travel, and what people call them."""

    def look(self, things: Iterable[Thing], *, live: bool) -> Held:
        """All places as they are now.

        Raises `NotCarried` where a holder has other values than it had, in what is no place.

        Args:
            live: steps count by now: code that was put there since is told from the rest.
        """
        now: Held = {}
        for thing in things:
            if thing.kind in HOLDERS:
                now[id(thing.value)] = thing.value, places(thing.value)
                self._refuse_others(thing)
                self._compare(thing, now[id(thing.value)][1], live)
        return now

    def _refuse_others(self, thing: Thing) -> None:
        now = others(thing.value)
        before = dict(self._others.setdefault(id(thing.value), now))
        after = dict(now)
        for at in before.keys() | after.keys() if before or after else ():
            if at not in before or at not in after or not alike(before[at], after[at]):
                raise NotCarried(
                    thing.path,
                    thing.value,
                    f"steps change {_name(thing.value)}{at}, which is no attribute of an object",
                )

    def _compare(self, thing: Thing, now: Places, live: bool) -> None:
        holder = id(thing.value)
        first = self._first.setdefault(holder, (thing.value, dict(now)))[1]
        for at in exchanged_in(first, now):
            if not live and is_plain_code(first.get(at)) and is_plain_code(now.get(at)):
                first[at] = now[at]  # a library puts what it has compiled in the place of a function
            elif travels(at, now.get(at)):
                self.told.setdefault(holder, set()).add(at)
            else:
                self.stays.setdefault(holder, {})[at] = f"{_name(thing.value)}{at}"
                self.told.get(holder, set()).discard(at)

    def without(self) -> dict[int, set[str]]:
        """Places that are left out of what is told."""
        return {holder: set(each) for holder, each in self.stays.items()}

    def apart(self, holder: object) -> set[str]:
        """Places of a holder that are not told as what all have built alike."""
        return self.told.get(id(holder), set()) | set(self.stays.get(id(holder), ()))

    def names(self) -> list[str]:
        """Names of all that stays with this process, for people."""
        return sorted(name for each in self.stays.values() for name in each.values())

    @staticmethod
    def put_back(held: Held) -> None:
        """Exchange what was exchanged since `look`."""
        for holder, before in held.values():
            put(before, places(holder))

    def built(self) -> None:
        """Let all holders have what they had as they were first seen."""
        self.put_back(self._first)
        self.told, self.stays = {}, {}

    def take(self, received: Iterable[Received]) -> None:
        """Put what was received into its places. Raises `StateError` where it may not be."""
        for holder, at, value, gone in received:
            self._first.setdefault(id(holder), (holder, places(holder)))
            receive(holder, at, value, gone=gone)
            self.told.setdefault(id(holder), set()).add(at)

    def told_of(self, things: Iterable[Thing]) -> Iterator[tuple[Thing, str]]:
        """Holders and places whose values travel, in the order of the things."""
        for thing in things:
            yield from ((thing, at) for at in sorted(self.told.get(id(thing.value), ())))


def _name(holder: object) -> str:
    return str(getattr(holder, "__name__", type(holder).__name__))
