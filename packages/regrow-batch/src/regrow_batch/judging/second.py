"""Choice of the rows under way that are also tried elsewhere; the first answer counts. Pure."""

from collections.abc import Collection, Iterator

from regrow.core.ids import Instant, Seconds
from regrow_batch.judging.evidence import Hand
from regrow_batch.pool import Pool

_LOOK_S: Seconds = 0.25
_TIMES_TYPICAL, _TIMES_SLOWEST = 3.0, 5.0
_FORGETS = 0.99


class SecondTries:
    """Finds rows whose worker seems to hang.

    A worker whose engine hangs still passes its health check; it is recognised by its silence while others answer.

    Args:
        pool: the workers.
        silence: shortest time that a worker may answer nothing while others do.
        lateness: shortest time that one of the last rows may take.
    """

    def __init__(self, pool: Pool, *, silence: Seconds, lateness: Seconds) -> None:
        self._pool, self._silence, self._lateness = pool, silence, lateness
        self._typical: Seconds | None = None
        self._slowest: Seconds = 0.0
        self._answered_at: Instant = 0.0
        self._look_at: Instant = 0.0

    def began(self, url: str, now: Instant) -> None:
        """Record that a row is sent to a worker."""
        worker = self._pool.workers[url]
        if worker.rows == 1:
            worker.answered_at = now

    def spoke(self, url: str, now: Instant) -> None:
        """Record that a worker has sent an answer of any kind."""
        self._answered_at = now
        worker = self._pool.workers.get(url)
        if worker is not None:
            worker.answered_at = now

    def answered(self, url: str, began: Instant, now: Instant) -> None:
        """Record that a worker has answered a row that was sent at `began`."""
        self.spoke(url, now)
        took = now - began
        self._typical = took if self._typical is None else self._typical + 0.05 * (took - self._typical)
        self._slowest = max(took, self._slowest * _FORGETS)

    def due(
        self, under_way: Collection[tuple[str, Hand, Instant]], now: Instant, *, last: bool
    ) -> Iterator[tuple[Hand, str]]:
        """Rows that should also be tried elsewhere, each with its present worker.

        Args:
            under_way: rows, their workers, and their start times.
            now: the time.
            last: true if no other row waits.
        """
        if self._typical is None or now < self._look_at:
            return
        self._look_at = now + _LOOK_S
        silence = max(self._silence, _TIMES_SLOWEST * self._slowest)
        for worker in self._pool.workers.values():
            if worker.rows and now - worker.answered_at > silence and self._answered_at > worker.answered_at:
                self._pool.stall(worker.url, f"has answered nothing for {silence:.0f} s while others have")
        late = max(self._lateness, _TIMES_TYPICAL * self._typical)
        for url, hand, began in list(under_way):
            if hand.done or hand.alone or hand.copies != 1:
                continue
            holder = self._pool.workers.get(url)
            if (holder is not None and holder.stalled) or (last and now - began > late):
                yield hand, url
