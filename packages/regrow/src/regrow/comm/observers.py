"""Interfaces of code that observes a worker's collectives, or answers them in place of its peers.

A call passes them in this order: `CallObserver.called`, wherever it will be answered; `CallTaker`, which may take it
over; then, if peers answer it, `CallObserver.starts`, `Tape.record` and `CallObserver.answered`. Until the script's
loop, `SetUp` wraps the last three. An echo, and `PastCalls`, replace them.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from regrow.comm.past_calls import PastCalls

POINT_TO_POINT = ("send", "recv", "recv_anysource")


class AskedCollective(NamedTuple):
    """A collective that the script calls. `size`: number of ranks in its group."""

    name: str
    size: int
    echoed: bool
    """True if the collective would be answered locally."""
    answer: Callable[[str, tuple[Any, ...], dict[str, Any]], Any]
    """Makes the call, with the given arguments."""
    args: tuple[Any, ...]
    options: dict[str, Any]


class CountedGroup(Protocol):
    """A group as observers of its collectives see it; see `RegrowGroup`. `calls`: those before the present one."""

    number: int
    sign: int
    calls: int


class CallObserver:
    """Gets notified of a worker's collectives, from any thread. An error that it raises refuses the call.

    Observers derive from this class and override the methods that they need; the others are never called.
    """

    in_hooks = False
    """True if the observer is also notified of collectives in hooks, which run beside the script's steps."""

    def called(self, name: str, size: int) -> None:
        """Called when the script calls a collective of `size` ranks, wherever it will be answered."""

    def starts(self, group: CountedGroup, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Called when a collective is about to be sent to the peers, with this rank's input."""

    def answered(self, name: str) -> None:
        """Called when the call of a collective has returned; on a device the collective may still run."""


class Moments(NamedTuple):
    """The methods that observers override, by the moment at which they are called, in the order of observers."""

    called: tuple[Callable[[str, int], None], ...] = ()
    starts: tuple[Callable[[CountedGroup, str, tuple[Any, ...], dict[str, Any]], None], ...] = ()
    answered: tuple[Callable[[str], None], ...] = ()

    @classmethod
    def of(cls, observers: Iterable[CallObserver]) -> "Moments":
        """The methods that these observers override."""
        mine = tuple(observers)
        return cls(
            tuple(each.called for each in mine if type(each).called is not CallObserver.called),
            tuple(each.starts for each in mine if type(each).starts is not CallObserver.starts),
            tuple(each.answered for each in mine if type(each).answered is not CallObserver.answered),
        )


class CallTaker(Protocol):
    """Answers, in place of the groups, collectives that are called between two steps."""

    past: PastCalls
    """Records the answers between two steps, and repeats them for a worker that reaches that code later."""

    def work_of(self, call: AskedCollective) -> Any:
        """The work of a call that is taken over; None: make the call as usual."""


Done = Callable[[], None]
"""Called when an answer has arrived, from any thread; must not raise."""


class Tape(Protocol):
    """Records the collectives of a step's body."""

    def record(self, group: int, rank: int, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Done | None:
        """Note a call of a collective. Call the returned function, if any, when the answer is in the tensors of `args`.

        Args:
            group: number of the group among this worker's groups, in the order in which the script made them.
            rank: this worker's rank in that group.
            name, args, options: of the call.
        """
