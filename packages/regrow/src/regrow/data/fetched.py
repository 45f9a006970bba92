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

    `samples`: `order.samples_digest` of the addresses that were read for it, empty if samples have none. `digest`:
    digest of its content; None if not computed yet.
    """

    batch: Any
    samples: str = ""
    digest: str | None = None


class Source(Protocol):
    """Interface of one kind of loader: batches by step and share."""

    @property
    def giving(self) -> Giving:
        """Result of a second `fetch` of the same batch: a new batch, the same tensors, or nothing."""
        ...

    spec: OrderSpec
    """The order of the source's samples, for any number of shares."""

    def seek(self, step: int, rank: int, world: int) -> None:
        """Prepare to fetch `step` for share `rank` of `world`; cheap if it is prepared already."""
        ...

    def fetch(self, step: int, rank: int, world: int) -> Fetched:
        """The batch of `step` for share `rank` of `world`."""
        ...

    def close(self) -> None:
        """Release the files, processes and connections that the source has opened."""
        ...


@runtime_checkable
class ReadsAgain(Protocol):
    """A source that can be checked for making the same batch whenever a step is read."""

    def read_again(self, step: int, rank: int, world: int) -> Fetched | None:
        """Make the batch that was fetched last anew, from the beginning; None if it can be read only once.

        The loader's exceptions pass through.
        """
        ...

    def goes_on(self) -> bool:
        """Called if `read_again` gave another batch. True: the loader can be read only once, and the read is undone."""
        ...
