"""Collectives before the loop: recorded by the first workers, and replayed for workers that build later."""

from collections.abc import Callable
from typing import Any, Protocol

from regrow.comm.torch_private.internals import Work


class CallingGroup(Protocol):
    """A group on which the script calls a collective."""

    ranks: list[int]
    key: str

    @property
    def place(self) -> int:
        """This worker's rank in the group."""
        ...


class SetUp(Protocol):
    """Handles the collectives that the script calls before its loop."""

    def answer(
        self, group: CallingGroup, name: str, args: tuple[Any, ...], options: dict[str, Any], run: Callable[[], Any]
    ) -> Any:
        """Return the work of one call. `run` makes the call, to peers or locally."""
        ...

    def together(self, work: Work) -> Work:
        """Return the work of several coalesced calls, given torch's work for them."""
        ...
