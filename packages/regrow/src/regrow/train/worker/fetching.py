"""Refuses collectives that a loader calls while it fetches a batch, as no newcomer could take part in them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from regrow.core.errors import UsageError
from regrow.data.naming import name_of


class Fetching:
    """Records whether the training thread is in the script's loader."""

    def __init__(self) -> None:
        self._loader = ""
        self._thread = 0

    @contextmanager
    def of(self, loader: object) -> Iterator[None]:
        """Context in which the loader fetches a batch."""
        self._loader, self._thread = name_of(loader), threading.get_ident()
        try:
            yield
        finally:
            self._loader = ""

    def called(self, name: str, size: int) -> None:
        """Check a collective of `size` ranks, as it is called. Raises `UsageError` if the loader calls it."""
        if self._loader and size > 1 and threading.get_ident() == self._thread:
            raise UsageError(
                f"{self._loader} calls {name} while it fetches a batch; a rank that is replaced fetches its batches "
                "when the others do not, so it would get something else than they did",
                hint="give session.steps the loader that it wraps (accelerate: loader.base_dataloader, or the one that "
                "was given to prepare()), and exchange what ranks must agree on inside the step's body",
            )
