"""Notice to a script that the world changes its size."""

from collections.abc import Callable
from dataclasses import dataclass

from regrow.core.ids import Seconds, StepNo
from regrow.core.messages.vocabulary import WorldChange

_KINDS = frozenset({"grow", "shrink", "preempt", "move", "fault"})


@dataclass(frozen=True)
class ScaleEvent:
    """The world has another size, or other nodes, from this step on.

    Attributes:
        kind: `grow`; `shrink`, as somebody asked for it; `preempt`, as a node is given back (`before` and `after` may
            be equal then: its ranks have moved); `move`, as ranks go on on another node; `fault`, as a lost rank had no
            replacement.
        before: replicas so far.
        after: replicas from now on.
        deadline: seconds that are left to a worker that must leave; None: there is no hurry.
        reason: who asked for it, or what has happened; for people.
        step: the first step in the new world.
        leaving: this worker is not in the new world: its process ends when the hooks have returned.
    """

    kind: str
    before: int
    after: int
    deadline: Seconds | None
    reason: str
    step: StepNo
    leaving: bool = False


Hook = Callable[[ScaleEvent], None]


class ScaleHooks:
    """The functions that a script wants to be called."""

    def __init__(self) -> None:
        self._hooks: list[Hook] = []

    def add(self, hook: Hook) -> None:
        """Call it at every change, after those that were added before it."""
        self._hooks.append(hook)

    def notify(self, change: WorldChange | None, step: StepNo, *, leaving: bool = False) -> None:
        """The world has changed so before `step`; what a hook raises is the script's error."""
        if change is None or change.kind not in _KINDS:
            return
        event = ScaleEvent(change.kind, change.before, change.after, change.deadline, change.reason, step, leaving)
        for hook in self._hooks:
            hook(event)
