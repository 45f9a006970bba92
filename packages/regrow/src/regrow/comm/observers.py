"""Observers of a worker's collectives, and those who answer in the place of its peers.

A call passes them in this order: `CallObserver.called`, wherever it will be answered; `CallTaker`, which may take it
over; then, if peers answer it, `CallObserver.starts`, `Tape.given` and `CallObserver.answered`. `SetUp` stands around
these until the script's loop; an echo, and `PastCalls`, take their place.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from regrow.comm.past_calls import PastCalls

POINT_TO_POINT = ("send", "recv", "recv_anysource")


class AskedCollective(NamedTuple):
    """A collective that the script calls. `size`: of its group."""

    name: str
    size: int
    echoed: bool
    """True if it would be answered locally."""
    answer: Callable[[str, tuple[Any, ...], dict[str, Any]], Any]
    """Calls it now, with what it is given."""
    args: tuple[Any, ...]
    options: dict[str, Any]


class CountedGroup(Protocol):
    """View of a group for observers of its collectives; see `RegrowGroup`. `calls`: before the present one."""

    number: int
    sign: int
    calls: int


class CallObserver:
    """Hears of the collectives of a worker, from any thread. An error that it raises refuses the call.

    Observers derive from this, and override the moments that they want; no other is called.
    """

    in_hooks = False
    """True if it hears of the collectives of hooks too, which run beside the script's steps."""

    def called(self, name: str, size: int) -> None:
        """The script calls a collective of `size` ranks, wherever it is answered."""

    def starts(self, group: CountedGroup, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """A collective is about to be sent to the peers, with what this rank gives to it."""

    def answered(self, name: str) -> None:
        """The call has returned; on a device the collective may still be under way."""


class Moments(NamedTuple):
    """Methods to call at each moment: those that observers override, in their order."""

    called: tuple[Callable[[str, int], None], ...] = ()
    starts: tuple[Callable[[CountedGroup, str, tuple[Any, ...], dict[str, Any]], None], ...] = ()
    answered: tuple[Callable[[str], None], ...] = ()

    @classmethod
    def of(cls, observers: Iterable[CallObserver]) -> "Moments":
        """Those of these observers."""
        mine = tuple(observers)
        return cls(
            tuple(each.called for each in mine if type(each).called is not CallObserver.called),
            tuple(each.starts for each in mine if type(each).starts is not CallObserver.starts),
            tuple(each.answered for each in mine if type(each).answered is not CallObserver.answered),
        )


class CallTaker(Protocol):
    """Takes over calls of collectives that stand between two steps."""

    past: PastCalls
    """Notes what is answered there, and answers who comes to it later."""

    def lone(self, call: AskedCollective) -> Any:
        """The work of a call that is taken over; None: it is called like any other."""


Done = Callable[[], None]
"""Called where an answer has come, from any thread; raises nothing."""


class Tape(Protocol):
    """Hears of the collectives of a body."""

    def given(self, group: int, rank: int, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Done | None:
        """A collective is called. What is returned is to be called when its answer is in the tensors of `args`.

        Args:
            group: which of this worker's groups, in the order in which the script made them.
            rank: this worker's in that group.
            name, args, options: of the call.
        """
