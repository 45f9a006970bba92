"""Hooks to rebuild resources that a script or a library builds on the groups, whenever groups are formed again.

See decision 0101.
"""

from collections.abc import Callable
from dataclasses import dataclass

from regrow.agent.workers.tracebacks import report
from regrow.core.ids import Seconds
from regrow.train.state.protected import ProtectedState
from regrow.train.worker.participation import Participation

RegroupHook = Callable[[int], None]
"""Called with the number of the generation whose groups are given up, or were formed."""


@dataclass
class _Pair:
    before: RegroupHook | None
    after: RegroupHook | None
    within: Seconds
    held: int | None = None
    """Generation with which `after` was last called; None if its groups were given up since."""


class RegroupHooks:
    """The `on_regroup` hooks of one worker's script.

    Args:
        worker: how this process takes part in a job.
    """

    def __init__(self, worker: Participation) -> None:
        self._worker = worker
        self._pairs: list[_Pair] = []

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def add(self, before: RegroupHook | None, after: RegroupHook | None, *, within: Seconds) -> None:
        """Add hooks for every change. If groups are formed already, call `after` at once; its errors are raised."""
        pair = _Pair(before, after, within)
        if not self._worker.newcomer:
            self._open(pair, self._worker.groups.generation)
        self._pairs.append(pair)
        self._worker.body.awaits_causes = True

    def give_up(self) -> None:
        """Call `before` hooks when the groups are given up. Their errors are reported, and the job goes on."""
        for pair in reversed(self._pairs):
            held, pair.held = pair.held, None
            if held is None or pair.before is None:
                continue
            try:
                with self._worker.beside(_named("before", pair.before), pair.within, calls=False):
                    pair.before(held)
            except Exception as error:  # noqa: BLE001  the state here is still good after any error
                why = report(error)
                self._worker.note_of_script(
                    f"{_named('before', pair.before)} raised {why.type}: {why.message} ({why.where}); the job goes "
                    "on, and resources that were not released there are left to the `after` of the same call"
                )

    def call_after_hooks(self, state: ProtectedState) -> bool:
        """Call `after` hooks that were not called for the present groups. False if an error gave the groups up again.

        Args:
            state: the protected state, while no body runs.
        """
        try:
            for pair in self._pairs:
                if pair.held != self._worker.groups.generation:
                    self._open(pair, self._worker.groups.generation)
        except Exception as error:
            if not self._worker.body.abort(error, state):
                raise
            return False
        return True

    def _open(self, pair: _Pair, generation: int) -> None:
        pair.held = generation  # also if it fails: the part that it has built must be given up
        if pair.after is None:
            return
        try:
            with self._worker.beside(_named("after", pair.after), pair.within, calls=True):
                pair.after(generation)
        except Exception as error:
            error.add_note(f"in {_named('after', pair.after)}, for the groups of generation {generation}")
            raise


def _named(part: str, hook: RegroupHook) -> str:
    return f"the `{part}` hook {getattr(hook, '__qualname__', repr(hook))} of session.on_regroup"
