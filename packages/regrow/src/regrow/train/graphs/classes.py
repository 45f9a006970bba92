"""Finds the classes of which a received state may make objects, by name.

A name leads to a class of the script, of a library whose objects the graph held as the loop began, or to one of the
listed builtin classes, always in modules that are imported already. Nothing is imported for a name, and no code of a
class is called.
"""

import enum
import sys
from collections.abc import Iterable
from typing import Any

from regrow.core.errors import StateError
from regrow.train.graphs.kinds import ThingKind
from regrow.train.script.source import is_script

_BUILTIN = {each.__name__: each for each in (bool, int, float, complex, str, bytes, list, dict, set, tuple, frozenset)}
_BUILTINS = "builtins"


class Classes:
    """The classes of which objects may be made.

    Args:
        types: classes of the things in the graph.
    """

    def __init__(self, types: Iterable[type]) -> None:
        self._known = {_full(kind): kind for kind in types}
        self._modules = {kind.__module__ for kind in self._known.values()}

    def name_of(self, kind: type) -> str:
        """Name by which `find` finds this class; empty if `find` does not."""
        name = _full(kind)
        return name if self._look(name) is kind else ""

    def find(self, name: str) -> type:
        """The class with this name. Raises `StateError` if no objects of that class may be made."""
        found = self._look(name)
        if found is None:
            raise StateError(f"{name} is no class that a received object may be of")
        return found

    def _look(self, name: str) -> type | None:
        module, _, path = name.partition(":")
        if module == _BUILTINS:
            return _BUILTIN.get(path)
        if (known := self._known.get(name)) is not None:
            return known
        home = sys.modules.get(module)
        file = getattr(home, "__file__", None)
        if home is None or not (module in self._modules or module == "__main__" or (file and is_script(file))):
            return None
        found: object = home
        for part in path.split("."):
            found = vars(found).get(part) if hasattr(found, "__dict__") else None
        return found if isinstance(found, type) and found.__module__ == module else None


def make(kind: ThingKind, of: type) -> Any:
    """Make an empty object of class `of` without calling its code. Raises `StateError` if that cannot be done."""
    if kind is not ThingKind.OBJECT or issubclass(of, tuple | enum.Enum | type):
        raise StateError(f"{_full(of)} is no class of plain objects")
    return object.__new__(of)


def _full(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"
