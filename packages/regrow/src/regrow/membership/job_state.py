"""The job's state: the one place where it changes, and the table of what may follow what."""

from collections.abc import Mapping

from regrow.membership.states import (
    Building,
    Closing,
    Ended,
    Forming,
    Gathering,
    Mending,
    Releasing,
    Restarting,
    Retaining,
    Saving,
    State,
    Switching,
    Training,
    Waiting,
)

NEXT: Mapping[type[State], frozenset[type[State]]] = {
    # All but the first and the last: what another coordinator had begun.
    Gathering: frozenset({Building, Training, Closing, Releasing, Restarting, Ended}),
    Building: frozenset({Building, Forming, Restarting, Ended}),
    Forming: frozenset({Training, Closing, Mending, Saving, Restarting, Ended}),
    Training: frozenset({Training, Switching, Mending, Saving, Restarting, Closing, Releasing, Ended}),
    Switching: frozenset({Switching, Training, Forming, Mending, Saving, Restarting, Ended}),
    Mending: frozenset({Mending, Forming, Waiting, Retaining, Saving, Restarting, Ended}),
    Waiting: frozenset({Waiting, Forming, Mending, Retaining, Saving, Restarting, Ended}),
    Retaining: frozenset({Retaining, Mending, Saving, Restarting, Ended}),
    Saving: frozenset({Ended}),
    Restarting: frozenset({Restarting, Building, Ended}),
    Closing: frozenset({Closing, Mending, Restarting, Releasing, Ended}),
    Releasing: frozenset({Releasing, Mending, Restarting, Ended}),
    Ended: frozenset(),
}
"""States that may follow each state. One of the same kind may follow if only its wait changes."""


class JobState:
    """State of the job; changed by `goto` alone.

    A change that the table does not have is a defect of ours. It is made all the same, since a job that goes on is
    worth more than a table, and kept in `unforeseen` until it is reported; tests and simulator accept none.
    """

    def __init__(self) -> None:
        self.state: State = Gathering()
        """Read several times for each fact, so it is an attribute."""
        self.unforeseen: list[str] = []

    def goto(self, new: State) -> None:
        """Be in another state from now on."""
        before, self.state = self.state, new
        if type(new) not in NEXT[type(before)]:
            self.unforeseen.append(f"{type(before).__name__} → {type(new).__name__}")

    def take_unforeseen(self) -> list[str]:
        """The changes since the last call that the table does not have."""
        taken, self.unforeseen = self.unforeseen, []
        return taken
