"""Tells whether the values of a namespace are still those that were kept of it, without copying them again."""

import operator
from collections.abc import Callable, Mapping
from itertools import compress

from regrow.train.values.arrays import ArrayCopy, Keep
from regrow.train.values.plain import PLAIN, GrownCopy, PlainCopy, is_refused, plain_kind, still


class Glance:
    """A namespace as it was when its values were kept. Holds nothing that was not kept.

    Args:
        there: its values.
        kept: copies of those that are followed.
        ignored: names that are not followed.
        arrays: tells for a name what becomes of arrays in it.
    """

    def __init__(
        self,
        there: Mapping[str, object],
        kept: Mapping[str, object],
        ignored: set[str],
        arrays: Callable[[str], Keep],
    ) -> None:
        self._names, self._kinds = list(there), list(map(type, there.values()))
        self._copies = {
            name: copy for name, copy in kept.items() if isinstance(copy, PlainCopy | GrownCopy | ArrayCopy)
        }
        self._is_atom = [name in kept and name not in self._copies for name in there]
        self._atoms = [kept[name] for name in compress(there, self._is_atom)]
        self._refused = [
            (name, arrays(name))
            for name, kind in zip(self._names, self._kinds, strict=True)
            if plain_kind(kind) in PLAIN
            and type(name) is str
            and name not in kept
            and name not in ignored
            and not name.startswith("__")
        ]

    def holds(self, there: Mapping[str, object]) -> bool:
        """True if nothing in it has changed that is followed, and nothing else would be followed by now."""
        return (
            list(there) == self._names
            and all(map(operator.is_, map(type, there.values()), self._kinds))
            and all(map(operator.is_, compress(there.values(), self._is_atom), self._atoms))
            and all(still(copy, there[name]) for name, copy in self._copies.items())
            and all(is_refused(there[name], arrays) for name, arrays in self._refused)
        )
