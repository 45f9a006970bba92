"""The job's state: the one place where it changes, and the table of allowed transitions."""

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
    # All but the first and the last continue the work of the previous coordinator.
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
"""States that may follow each state. The same kind of state may also follow with another deadline."""


class JobState:
    """State of the job; only `goto` changes it.

    A transition that is not in the table is a defect of regrow. It is made all the same, so that the job goes on,
    and kept in `unforeseen` until it is reported; tests and simulator accept none.
    """

    def __init__(self) -> None:
        self.state: State = Gathering()
        """An attribute, not a property, because it is read several times for each fact."""
        self.unforeseen: list[str] = []

    def goto(self, new: State) -> None:
        """Change to another state."""
        before, self.state = self.state, new
        if type(new) not in NEXT[type(before)]:
            self.unforeseen.append(f"{type(before).__name__} → {type(new).__name__}")

    def take_unforeseen(self) -> list[str]:
        """The transitions since the last call that are not in the table."""
        taken, self.unforeseen = self.unforeseen, []
        return taken
