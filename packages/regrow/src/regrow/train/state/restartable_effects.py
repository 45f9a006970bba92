"""Learns which protected state restartable functions change: exchanged weights, renewed statistics.

The first runs of a function are watched closely, and all state that it could change is copied before; later runs copy
only state that was seen to change.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from regrow.train.state.audit import ScriptPart, changed
from regrow.train.state.moment import Moment, Scope
from regrow.train.state.protected import ProtectedState

_LEARNT_AFTER = 2


class RestartableEffects:
    """The restartable functions since the last step, and the changes that all of them make.

    Args:
        state: the protected state.
    """

    def __init__(self, state: ProtectedState) -> None:
        self._state = state
        self._runs: Counter[str] = Counter()
        self._entries: list[Moment] = []

    def entry(self, number: int) -> Moment:
        """The state as it was when the `number`th function since the last step began."""
        while len(self._entries) < number:
            self._entries.append(self._state.moment())
        return self._entries[number - 1]

    def enter_again(self, number: int) -> None:
        """Restore the state from which a function began, as it is run again although this worker is past it."""
        if self.entry(number).taken:
            self.entry(number).put_back()

    def forget(self) -> None:
        """Forget all entries, as a step was committed and functions before it never run again."""
        for entry in self._entries:
            entry.forget()

    def scope(self, name: str) -> Scope:
        """State to copy before the function of this name runs."""
        looker, state = self._state.looker, self._state
        known = looker.scope_of(state.habits.of(ScriptPart.REGION))
        return known if self._runs[name] >= _LEARNT_AFTER else looker.large()

    @contextlib.contextmanager
    def watch(self, name: str) -> Iterator[None]:
        """Context in which the function runs: learn which state it changes, even if it restores it at its end."""
        looker, habits = self._state.looker, self._state.habits
        closely = self._runs[name] < _LEARNT_AFTER
        before, modules = looker.look(closely=closely), self._state.modules
        sample = looker.sample() if closely else {}

        def called(module: nn.Module, _: object) -> None:
            if module in modules:
                habits.learn(ScriptPart.REGION, changed(sample, looker.sample()))

        hook = register_module_forward_pre_hook(called) if closely else None
        try:
            yield
            self._runs[name] += 1
        finally:
            if hook is not None:
                hook.remove()
            habits.learn(ScriptPart.REGION, changed(before, looker.look(closely=closely)))
