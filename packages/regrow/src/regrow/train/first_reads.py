"""Announce the loop and the first reads of a rank, to compare them between ranks and with a replacement's."""

from regrow.core.ids import StepNo
from regrow.core.messages.data import BatchRecord, LoaderShown
from regrow.data.naming import name_of
from regrow.data.order import OPAQUE
from regrow.train.batches import Batches
from regrow.train.worker.participation import Participation


class FirstReads:
    """Tells of the reads of steps 0 and 1.

    Args:
        worker: tells it.
        batches: know what was read.
        loader: the script's; with `shares_overlap` ranks read the same by design, and are not compared.
        until: steps of the training.
        length: of an epoch; 0: it has none.
    """

    def __init__(self, worker: Participation, batches: Batches, loader: object, *, until: int, length: int) -> None:
        self._worker, self._batches = worker, batches
        self._overlap = getattr(loader, "shares_overlap", None) is True
        self._loader, self._until, self._length = name_of(loader), until, length
        self._first: list[BatchRecord] = []

    def arrives(self) -> None:
        """The worker stands before its first step, and has rehearsed."""
        self._first = self._batches.reads(self._worker.training.began)
        self._say([self._first] if self._first else [])

    def fetched(self, step: StepNo) -> None:
        """The batch of a step is there."""
        if self._overlap or self._batches.order.kind != OPAQUE:
            return  # regrow's own order, which is dealt out to the ranks
        if step == self._worker.training.began + 1 and self._first and (second := self._batches.reads(step)):
            self._say([self._first, second])

    def _say(self, reads: list[list[BatchRecord]]) -> None:
        self._worker.send(LoaderShown(self._worker.worker_id, self._loader, self._until, self._length, reads))
