"""What this node keeps of what other nodes need next: files in `mirror/<node>/<identity>/`, bounded for each node."""

from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from regrow.core.data_messages import REHEARSED

_FOLDER = "mirror"


@dataclass(frozen=True)
class Place:
    """One mirrored entry. `step`: when it is needed."""

    node: str
    identity: str
    name: str
    step: int


@dataclass
class _Shelf:
    """What is kept for one node. `identities`: bytes of each entry, the identity stored last at the end."""

    identities: OrderedDict[str, dict[str, tuple[int, int]]] = field(default_factory=OrderedDict)
    reserved: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes here and on their way."""
        return self.reserved + sum(size for names in self.identities.values() for size, _ in names.values())


class Mirror:
    """Knows what is kept and decides what goes. Files are few, so it removes them itself.

    Args:
        folder: of the data cache.
        budget: bytes for each node.
        nodes: most nodes that it keeps something for.
    """

    def __init__(self, folder: Path, *, budget: int, nodes: int) -> None:
        self._folder = folder / _FOLDER
        self._budget = budget
        self._nodes = nodes
        self._shelves: dict[str, _Shelf] = {}

    def reserve(self, place: Place, size: int, keep_from: int) -> Path | None:
        """Make room for an entry: where it belongs, or None where there is none. `keep` or `cancel` follows.

        First what `place.identity` has below `keep_from` goes (but for the first step's), then, of other identities,
        what was stored least lately.
        """
        if place.node not in self._shelves and len(self._shelves) >= self._nodes:
            return None
        shelf = self._shelves.setdefault(place.node, _Shelf())
        mine = shelf.identities.get(place.identity, {})
        for name, (_, step) in list(mine.items()):
            if REHEARSED < step < keep_from or name == place.name:
                self._drop(place.node, place.identity, name)
        mine = shelf.identities.get(place.identity, {})
        if shelf.reserved + sum(held for held, _ in mine.values()) + size > self._budget:
            return None
        others = [identity for identity in shelf.identities if identity != place.identity]
        while shelf.nbytes + size > self._budget and others:
            other = others.pop(0)
            for name in list(shelf.identities[other]):
                self._drop(place.node, other, name)
            del shelf.identities[other]
        shelf.reserved += size
        return self._folder / place.node / place.identity / place.name

    def keep(self, place: Place, size: int) -> None:
        """The entry is where it belongs."""
        shelf = self._shelves[place.node]
        shelf.reserved -= size
        shelf.identities.setdefault(place.identity, {})[place.name] = (size, place.step)
        shelf.identities.move_to_end(place.identity)

    def cancel(self, place: Place, size: int) -> None:
        """The entry has not come."""
        self._shelves[place.node].reserved -= size

    def identities(self) -> set[str]:
        """Whose entries are here."""
        return {identity for shelf in self._shelves.values() for identity, names in shelf.identities.items() if names}

    def entries(self, identity: str) -> dict[str, int]:
        """Names and sizes."""
        return {
            name: size
            for shelf in self._shelves.values()
            for name, (size, _) in shelf.identities.get(identity, {}).items()
        }

    def kept_for(self, node: str) -> dict[str, dict[str, int]]:
        """All that is kept for one node: identity, name, bytes."""
        shelf = self._shelves.get(node)
        kept = {} if shelf is None else shelf.identities
        return {identity: {name: size for name, (size, _) in names.items()} for identity, names in kept.items()}

    def find(self, identity: str, name: str) -> Path | None:
        """Where such an entry is."""
        for node, shelf in self._shelves.items():
            if name in shelf.identities.get(identity, {}):
                return self._folder / node / identity / name
        return None

    def _drop(self, node: str, identity: str, name: str) -> None:
        self._shelves[node].identities[identity].pop(name, None)
        (self._folder / node / identity / name).unlink(missing_ok=True)
