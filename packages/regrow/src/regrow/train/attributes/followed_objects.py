"""Finds objects around a loop whose values are restored with its steps, even if the script has replaced them."""

from collections.abc import Iterable, Mapping
from types import FrameType

from regrow.train.attributes.keepers import Keepers
from regrow.train.attributes.kept_values import Attributes


class FollowedObjects:
    """The followed objects of one loop.

    Args:
        objects: the objects to follow at first.
        keepers: finds the objects that exist at a later moment; None: `objects` stay.
    """

    def __init__(self, objects: Iterable[Attributes] = (), keepers: Keepers | None = None) -> None:
        self._all, self._keepers, self._new = list(objects), keepers, keepers is not None
        self._outside: Mapping[int, object] = {}
        self.left_out = ""

    def leave_alone(self, things: Mapping[int, object]) -> None:
        """Stop following these objects, by id. Called after the rehearsal; objects that it has made are followed."""
        self._outside, self._new = things, self._keepers is not None
        self._all = [each for each in self._all if not each.is_in(things)]

    def missed(self, thing: object) -> list[tuple[str, object]]:
        """Attributes of an object of the script's own that nobody looks after."""
        known = id(thing) in self._outside or any(each.is_in({id(thing): thing}) for each in self._all)
        return [] if known or self._keepers is None else self._keepers.left_over(thing)

    def now(self, variables: list[dict[str, object]], frames: Iterable[FrameType]) -> list[Attributes]:
        """The objects to follow now. `variables`: of the script's calls, innermost first; `frames`: generators' too."""
        named = {name: value for values in reversed(variables) for name, value in values.items()}
        gone = {each.name: each for each in self._all if not each.is_present(named)}
        if not gone and not self._new:
            return self._all
        if self._keepers is not None and self._new:
            self._new = False
            self._all = self._keepers.find(values for each in frames for values in (each.f_locals, each.f_globals))
        elif self._keepers is not None:
            found = self._keepers.find(variables, {each.root for each in gone.values()})
            others = {each.name: each for each in found if each.name in gone}
            self._all = [others.get(each.name, each) for each in self._all]
        self.left_out = self._keepers.left_out if self._keepers is not None else ""
        self._all = [each for each in self._all if each.alive and not each.is_in(self._outside)]
        return self._all
