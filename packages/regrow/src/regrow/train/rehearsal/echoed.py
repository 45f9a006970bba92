"""Runs a part of a script without effect: collectives are answered locally, and its changes are undone."""

import contextlib
from collections.abc import Iterator

from regrow.core.errors import Rehearsed
from regrow.train.gradients.wrappers import Modules
from regrow.train.state.protected import ProtectedState
from regrow.train.worker.participation import Participation


@contextlib.contextmanager
def echoed(worker: Participation, state: ProtectedState, modules: Modules) -> Iterator[None]:
    """Context in which collectives are answered locally; its end restores the state. `Rehearsed` ends it early."""
    kept = state.capture() if worker.holds_initial_state else None
    attributes = state.modes.attributes()
    state.begin(closely=True)
    with worker.echo():
        try:
            yield
        except Rehearsed:
            state.attributes.put_back()  # this rehearsal ends here
        finally:
            modules.settle(all_of_them=True)
    state.modes.learn(attributes)
    state.modes.undo(attributes)
    if kept is not None:
        state.restore(kept)
    modules.overwritten()
