"""A kind of loader as the steps see it: a source of batches by step and share."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from regrow.core.messages.data import OrderSpec
from regrow.data.kept import Giving

Place = tuple[int, int, int]
"""(step, share, shares)."""


@dataclass(frozen=True)
class Fetched:
    """A batch, and what is known about it.

    `samples`: `order.samples_digest` of the addresses that were read for it, empty where samples have none. `digest`:
    of its content; None where nobody has worked it out yet.
    """

    batch: Any
    samples: str = ""
    digest: str | None = None


class Source(Protocol):
    """One kind of loader."""

    @property
    def giving(self) -> Giving:
        """Kind of batch that it gives when it is asked once more."""
        ...

    spec: OrderSpec
    """The order of its samples, for any number of shares."""

    def seek(self, step: int, rank: int, world: int) -> None:
        """Makes ready for `step` at this place; cheap where it is ready."""
        ...

    def fetch(self, step: int, rank: int, world: int) -> Fetched:
        """The batch of `step` for share `rank` of `world`."""
        ...

    def close(self) -> None:
        """Ends what was opened."""
        ...


@runtime_checkable
class ReadsAgain(Protocol):
    """A source that can show whether it is a function of the step."""

    def read_again(self, step: int, rank: int, world: int) -> Fetched | None:
        """The batch that was fetched last, made anew from the beginning; None where it can be had once only.

        What the loader raises passes through.
        """
        ...

    def goes_on(self) -> bool:
        """That was another batch: whether because it can be gone through once, and is as if nobody had read it."""
        ...
