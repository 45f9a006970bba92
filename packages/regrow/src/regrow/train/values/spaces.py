"""Places of a script's own values around its steps: running functions, their modules, objects that these lead to."""

import threading
from collections.abc import Callable, Iterable
from types import FrameType

from regrow.train.attributes.followed_objects import FollowedObjects
from regrow.train.attributes.keepers import Keepers
from regrow.train.attributes.kept_values import Attributes
from regrow.train.script.namespaces import Namespace, names_elsewhere, namespaces
from regrow.train.script.read_first import BodyReads, loop_read
from regrow.train.script.source import modules_of_script
from regrow.train.values.arrays import ARRAYS, Keep
from regrow.train.values.plain import PLAIN, plain_kind
from regrow.train.values.untouched import Untouched

Frames = Callable[[], list[FrameType]]
Space = Namespace | Attributes
_FRAMES = 8
"""Most calls that are searched, from the innermost."""


class Spaces:
    """Finds the places that are followed, and decides which names in them are."""

    def __init__(self) -> None:
        self._frames: Frames | None = None
        self.objects = FollowedObjects()
        self.reads: BodyReads | None = None
        self._has_read = False
        self._asking: dict[str, int] = {}
        self._known: dict[str, int] = {}
        self._threads = 0
        self.elsewhere: set[str] = set()
        """Names that threads and signal handlers use too."""
        self.untouched: Untouched | None = None
        """Set if nothing may be written into the script's frames: finds the values that would have to be."""

    def follow(self, frames: Frames, objects: Iterable[Attributes], keepers: Keepers | None) -> None:
        """Follow the script from now on: see `Variables.follow`."""
        self._frames, self.objects, self._has_read = frames, FollowedObjects(objects, keepers), False

    def close(self) -> None:
        """Follow nothing any more."""
        self._frames = None

    def requests_step(self) -> bool:
        """Find the places to follow, as the script requests a step. True if other names are followed from now on."""
        found, changed = self._namespaces(), False
        if not self._has_read and self._frames is not None:
            loop = loop_read(self._frames())
            self.reads, self._has_read, changed = None if loop is None else loop[1], True, True
            if self.untouched is not None:
                self.untouched.requests_step(self._frames())
        self._asking = {space.name: id(space.owner) for space in found}
        self._known = self._known or self._asking
        if self._threads != threading.active_count():
            self._threads, changed = threading.active_count(), True
            self.elsewhere = names_elsewhere(map(vars, modules_of_script()))
        return changed

    def enters(self) -> None:
        """Follow only the places that still exist as the script enters the step that it has requested."""
        found = {space.name: id(space.owner) for space in self._namespaces()}
        self._known = {name: owner for name, owner in self._asking.items() if found.get(name) == owner}

    def _namespaces(self) -> list[Namespace]:
        return namespaces(self._frames()[:_FRAMES]) if self._frames is not None else []

    def now(self) -> dict[str, Space]:
        """All followed places that exist now, by name."""
        found = self._namespaces() if self._known else []
        spaces: dict[str, Space] = {
            space.name: space for space in found if self._known.get(space.name) == id(space.owner)
        }
        if self._frames is None or not self._known:
            return spaces
        objects = self.objects.now([space.read() for space in spaces.values()], self._frames())
        return spaces | {each.name: each for each in objects}

    def arrays(self, space: Space, key: str) -> Keep:
        """Treatment of arrays in a variable."""
        if isinstance(space, Attributes):
            return Keep.CONTENT if space.carries else Keep.HERE
        return self.arrays_named(key)

    def arrays_named(self, key: str) -> Keep:
        """As `arrays`, for a call's variable: `CONTENT` if a body may read it, or if the loop's text is not known."""
        reads = self.reads
        if reads is None or (key in reads.first and key not in reads.harmless):
            return Keep.CONTENT
        return Keep.ITSELF if key in reads.added_to else Keep.NOT

    def carries(self, space: Space, key: str) -> bool:
        """True if arrays count as plain values in this variable."""
        return self.arrays(space, key) is Keep.CONTENT

    def is_value(self, space: Space, key: str, value: object) -> bool:
        """True for a value of a kind that is sent to newcomers."""
        return plain_kind(type(value)) in PLAIN or (type(value) in ARRAYS and self.carries(space, key))

    def follows(self, space: Space, key: str, value: object) -> bool:
        """True if a variable with this value is followed."""
        is_here = type(value) in ARRAYS and self.arrays(space, key) is Keep.HERE
        return key not in self.elsewhere and (is_here or self.is_value(space, key, value))
