"""Follows values of classes, functions and enumerations that steps replace by others, for all users of these."""

from collections.abc import Iterable

from regrow.core.errors import NotCarried
from regrow.train.graphs.outside import alike, apart, given_to
from regrow.train.graphs.places import Places, exchanged_in, is_code, is_plain_code, places, put, receive
from regrow.train.graphs.walk import HOLDERS, Thing

Held = dict[int, tuple[object, Places]]
"""For each class or function, by id: itself and its places."""


class Exchanges:
    """Finds attributes of classes, functions and members of enumerations that steps replace, and can put them back.

    An attribute is compared with its value at the first `look` that met its owner. Data that was replaced is sent to
    other processes; code cannot be.
    """

    def __init__(self) -> None:
        self._first: Held = {}
        self._others: dict[int, dict[str, object]] = {}
        self._passing: set[int] = set()  # functions without places that steps have added: known while held
        self.encoded: dict[int, dict[str, bool]] = {}
        """By holder, places whose values steps have replaced; True: data, which is sent."""
        self.code = ""
        """Name of a place whose old or new value is code; empty if there is none."""

    def look(self, things: Iterable[Thing], *, live: bool) -> Held:
        """All places as they are now. Raises `NotCarried` if a function has other values outside of its places.

        Args:
            things: all things of the graph.
            live: True after the rehearsal.
        """
        now: Held = {}
        for thing in things:
            if thing.kind in HOLDERS:
                now[id(thing.value)] = thing.value, places(thing.value)
                if not isinstance(thing.value, type):
                    self._refuse_others(thing)
                self._compare(thing.value, now[id(thing.value)][1], live)
        for gone in self._passing - now.keys():
            del self._first[gone]
            self._others.pop(gone, None)
        self._passing &= now.keys()
        return now

    def _refuse_others(self, thing: Thing) -> None:
        now = dict(apart(given_to(thing.value), places(thing.value)))
        before = self._others.setdefault(id(thing.value), now)
        for at in {**before, **now}:
            if at not in before or at not in now or not alike(before[at], now[at]):
                name = f"{getattr(thing.value, '__name__', type(thing.value).__name__)}{at}"
                raise NotCarried(thing.path, thing.value, f"steps change {name}, which is no attribute of an object")

    def _compare(self, holder: object, now: Places, live: bool) -> None:
        if live and not now and id(holder) not in self._first and not isinstance(holder, type):
            self._passing.add(id(holder))
        first = self._first.setdefault(id(holder), (holder, dict(now)))[1]
        for at in exchanged_in(first, now):
            if not live and is_plain_code(first.get(at)) and is_plain_code(now.get(at)):
                first[at] = now[at]  # a library replaces a function by a compiled one
                continue
            data = not (is_code(first.get(at)) or is_code(now.get(at)))
            self.encoded.setdefault(id(holder), {})[at] = data
            if not data:
                self.code = self.code or f"{getattr(holder, '__name__', type(holder).__name__)}{at}"

    @staticmethod
    def put_back(held: Held) -> None:
        """Put back the values that were replaced since `look`."""
        for holder, before in held.values():
            put(before, places(holder))

    def built(self) -> None:
        """Give all classes and functions the values that they had when they were first seen."""
        self.put_back(self._first)
        self.encoded, self.code = {}, ""

    def take(self, holder: object, at: str, value: object, *, gone: bool) -> None:
        """Put a received value into its place. Raises `StateError` if that is not allowed."""
        self._first.setdefault(id(holder), (holder, places(holder)))
        receive(holder, at, value, gone=gone)
        self.encoded.setdefault(id(holder), {})[at] = True
