"""The interface of all kinds of loaders: a source of batches by step and share."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from regrow.core.messages.data import OrderSpec
from regrow.data.kept import Giving

Place = tuple[int, int, int]
"""(step, share, shares)."""


@dataclass(frozen=True)
class Fetched:
    """A batch with its digests.

    `samples`: `order.samples_digest` of the addresses that were read for it, empty if samples have none. `digest`: of
    its content; None if not computed yet.
    """

    batch: Any
    samples: str = ""
    digest: str | None = None


class Source(Protocol):
    """One kind of loader."""

    @property
    def giving(self) -> Giving:
        """Kind of result of a second `fetch` of the same batch."""
        ...

    spec: OrderSpec
    """The order of its samples, for any number of shares."""

    def seek(self, step: int, rank: int, world: int) -> None:
        """Prepare to fetch `step` at this place; cheap if it is prepared already."""
        ...

    def fetch(self, step: int, rank: int, world: int) -> Fetched:
        """The batch of `step` for share `rank` of `world`."""
        ...

    def close(self) -> None:
        """Release what was opened."""
        ...


@runtime_checkable
class ReadsAgain(Protocol):
    """A source that can be tested for being a function of the step."""

    def read_again(self, step: int, rank: int, world: int) -> Fetched | None:
        """Make the batch that was fetched last anew, from the beginning; None if it can be read only once.

        The loader's exceptions pass through.
        """
        ...

    def goes_on(self) -> bool:
        """Called if `read_again` gave another batch: True if the loader can only be read once; that read is undone."""
        ...
