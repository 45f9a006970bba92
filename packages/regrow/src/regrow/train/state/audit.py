"""Records which parts of the protected state change at which moments of a step.

begin(n) → early part, before the first update → update → late part → commit → between → begin(n + 1). The update and
the late part may change anything. State that changes in the early part, in a restartable function or between two steps
has to be copied before, so that it can be put back, or sent as it was. A change seen once is expected later.
"""

from collections.abc import Iterable, Mapping
from enum import Enum

Look = Mapping[str, object]
"""A token for each piece of state that may change; it differs after a change."""


class ScriptPart(Enum):
    """Part of a script in which state changes."""

    EARLY = "before the first update of a step"
    BETWEEN = "between two steps"
    REGION = "in a restartable function"


class Habits:
    """Changes that a script is known to make."""

    def __init__(self) -> None:
        self._known: dict[ScriptPart, frozenset[str]] = dict.fromkeys(ScriptPart, frozenset())

    def learn(self, part: ScriptPart, names: Iterable[str]) -> list[str]:
        """Note that state with these names changes in `part`. Returns the names that are new."""
        new = sorted(set(names) - self._known[part])
        if new:
            self._known[part] |= frozenset(new)
        return new

    def of(self, *parts: ScriptPart) -> frozenset[str]:
        """Names that change in any of these parts."""
        return frozenset().union(*(self._known[part] for part in parts))

    @property
    def all(self) -> frozenset[str]:
        """Names that change anywhere but in an update and after it."""
        return self.of(*ScriptPart)


def changed(before: Look, after: Look) -> list[str]:
    """Names in both looks whose tokens differ."""
    return [name for name, token in after.items() if name in before and before[name] != token]
