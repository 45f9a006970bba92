"""Reports of a rank's loop and first reads, to compare them between ranks and with those of a replacement."""

from regrow.core.ids import StepNo
from regrow.core.messages.data import BatchRecord, LoaderShown
from regrow.data.naming import name_of
from regrow.data.order import OPAQUE
from regrow.train.batches import Batches
from regrow.train.worker.participation import Participation


class FirstReads:
    """Reports the reads of steps 0 and 1.

    Args:
        worker: sends the reports.
        batches: have records of the reads.
        loader: the script's loader; with `shares_overlap` ranks read the same data by design, and are not compared.
        until: steps of the training.
        length: steps of an epoch; 0 if there are no epochs.
    """

    def __init__(self, worker: Participation, batches: Batches, loader: object, *, until: int, length: int) -> None:
        self._worker, self._batches = worker, batches
        self._overlap = getattr(loader, "shares_overlap", None) is True
        self._loader, self._until, self._length = name_of(loader), until, length
        self._first: list[BatchRecord] = []

    def arrives(self) -> None:
        """Report this rank's loop and its read for step 0, after the rehearsal."""
        self._first = self._batches.reads(self._worker.training.began)
        self._say([self._first] if self._first else [])

    def fetched(self, step: StepNo) -> None:
        """Report the reads of steps 0 and 1 once step 1 has been fetched, if the ranks' reads are to be compared."""
        if self._overlap or self._batches.order.kind != OPAQUE:
            return  # regrow's own order is dealt out to the ranks, so it needs no comparison
        if step == self._worker.training.began + 1 and self._first and (second := self._batches.reads(step)):
            self._say([self._first, second])

    def _say(self, reads: list[list[BatchRecord]]) -> None:
        self._worker.send(LoaderShown(self._worker.worker_id, self._loader, self._until, self._length, reads))
