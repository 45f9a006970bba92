"""What a script was seen to change, and when: the moments of a step, and what of the state each of them touches.

begin(n) → early part, before the first update → update → late part → commit → between → begin(n + 1). The update and
the late part may change anything. What changes in the early part, in a restartable function or between two steps has to
be copied beforehand, so that it can be put back, or handed over as it was. Seen once is known from then on.
"""

from collections.abc import Iterable, Mapping
from enum import Enum

Look = Mapping[str, object]
"""For each thing that may change: something that is another when it has changed."""


class ScriptPart(Enum):
    """Where in a script something changes."""

    EARLY = "before the first update of a step"
    BETWEEN = "between two steps"
    REGION = "in a restartable function"


class Habits:
    """What is known of a script."""

    def __init__(self) -> None:
        self._known: dict[ScriptPart, frozenset[str]] = dict.fromkeys(ScriptPart, frozenset())

    def learn(self, part: ScriptPart, names: Iterable[str]) -> list[str]:
        """These change there. Returns those that were not known to."""
        new = sorted(set(names) - self._known[part])
        self._known[part] |= frozenset(new)
        return new

    def of(self, *parts: ScriptPart) -> frozenset[str]:
        """What changes in any of these parts."""
        return frozenset().union(*(self._known[part] for part in parts))

    @property
    def all(self) -> frozenset[str]:
        """What changes anywhere but in an update and after it."""
        return self.of(*ScriptPart)


def changed(before: Look, after: Look) -> list[str]:
    """What is not what it was, as far as it was there before."""
    return [name for name, token in after.items() if name in before and before[name] != token]
