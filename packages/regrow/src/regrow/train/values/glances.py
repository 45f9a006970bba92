"""Checks whether a namespace still has the values of which copies were kept, without copying them again."""

import operator
from collections.abc import Callable, Mapping
from itertools import compress

from regrow.train.values.arrays import ArrayCopy, Keep
from regrow.train.values.plain import PLAIN, GrownCopy, PlainCopy, is_refused, plain_kind, still


class Glance:
    """A namespace as it was when its values were kept. Holds nothing that was not kept.

    Args:
        there: the values in the namespace.
        kept: copies of the followed values.
        ignored: names that are not followed.
        arrays: returns the treatment of arrays in the variable of a name.
    """

    def __init__(
        self, there: Mapping[str, object], kept: Mapping[str, object], ignored: set[str], arrays: Callable[[str], Keep]
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
        """True if no followed value has changed, and no other value would be followed now."""
        return (
            list(there) == self._names
            and all(map(operator.is_, map(type, there.values()), self._kinds))
            and all(map(operator.is_, compress(there.values(), self._is_atom), self._atoms))
            and all(still(copy, there[name]) for name, copy in self._copies.items())
            and all(is_refused(there[name], arrays) for name, arrays in self._refused)
        )
