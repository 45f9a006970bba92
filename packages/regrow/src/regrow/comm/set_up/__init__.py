"""Collectives before the loop: noted by the first workers, and answered from the notes for those that build later."""

from collections.abc import Callable
from typing import Any, Protocol

from regrow.comm.torch_private.internals import Work


class CallingGroup(Protocol):
    """A group on which the script calls a collective."""

    ranks: list[int]
    key: str

    @property
    def place(self) -> int:
        """This worker's rank in it."""
        ...


class SetUp(Protocol):
    """Handling of the collectives that the script calls before its loop."""

    def answer(
        self, group: CallingGroup, name: str, args: tuple[Any, ...], options: dict[str, Any], run: Callable[[], Any]
    ) -> Any:
        """The work of one. `run`: calls it, really or locally."""
        ...

    def together(self, work: Work) -> Work:
        """The work of calls that were put together."""
        ...
