"""Notification of a script when the world changes its size."""

from collections.abc import Callable
from dataclasses import dataclass

from regrow.core.ids import Seconds, StepNo
from regrow.core.messages.vocabulary import WorldChange

_KINDS = frozenset({"grow", "shrink", "preempt", "move", "fault"})


@dataclass(frozen=True)
class ScaleEvent:
    """The world has another size, or other nodes, from this step on.

    Attributes:
        kind: `grow`; `shrink`, by request; `preempt`, if a node is given back (`before` and `after` may then be equal,
            if its ranks have moved); `move`, if ranks continue on another node; `fault`, if a lost rank had no
            replacement.
        before: number of replicas so far.
        after: number of replicas from now on.
        deadline: seconds that are left to a worker that must leave; None if there is no deadline.
        reason: the requester, or the event, for people.
        step: the first step in the new world.
        leaving: True if this worker is not in the new world: its process ends when the hooks have returned.
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
    """The `on_scale` hooks of a script."""

    def __init__(self) -> None:
        self._hooks: list[Hook] = []

    def add(self, hook: Hook) -> None:
        """Add a hook, called at every change after those that were added before it."""
        self._hooks.append(hook)

    def notify(self, change: WorldChange | None, step: StepNo, *, leaving: bool = False) -> None:
        """Call the hooks for a change of the world before `step`. Raises what a hook raises."""
        if change is None or change.kind not in _KINDS:
            return
        event = ScaleEvent(change.kind, change.before, change.after, change.deadline, change.reason, step, leaving)
        for hook in self._hooks:
            hook(event)
