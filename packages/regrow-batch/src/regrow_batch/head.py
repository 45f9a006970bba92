"""Runs a batch: takes rows from the feed, assigns them to workers, and writes their results until no row remains."""

import asyncio
import random
import time
from dataclasses import dataclass, field
from functools import partial

from regrow.core.ids import Instant, Seconds
from regrow_batch.journal import SYNC_S, Journal
from regrow_batch.judging.attempts import Attempts
from regrow_batch.judging.evidence import Hand, WorkerEvidence
from regrow_batch.judging.queue import LEAST_READY, Queue, alike
from regrow_batch.judging.results import Results
from regrow_batch.judging.second import SecondTries
from regrow_batch.places import BatchStopped
from regrow_batch.pool import Pool
from regrow_batch.retries import Fault, RetryPolicy
from regrow_batch.rows import BadRow
from regrow_batch.scanning import Feed
from regrow_batch.sending import Sender
from regrow_batch.tally import Tally

_TURN_S: Seconds = 0.5
_MOST_BYTES = 64 << 20
"""Bytes of rows in hand at which reading ahead stops."""


@dataclass(frozen=True)
class HeadPolicy:
    """Limits and retries of a head.

    Attributes:
        retries: number and times of a row's attempts.
        patience: the job stops after this time with no serving worker, or this time plus `timeout` with no result.
        timeout: longest attempt.
        grace: time for rows under way once the job is asked to stop.
        silence: time that a worker may answer nothing, while others do, before its rows are also tried elsewhere.
        lateness: the same for the last rows of the batch.
    """

    retries: RetryPolicy = field(default_factory=RetryPolicy)
    patience: Seconds = 600.0
    timeout: Seconds = 600.0
    grace: Seconds = 30.0
    silence: Seconds = 30.0
    lateness: Seconds = 2.0


class BatchHead:
    """Runs one batch to its end.

    Args:
        feed: the rows that remain.
        states: of all rows, shared with the feed; a row with a result is marked here.
        pool: the workers.
        sender: sends rows to workers.
        journal: takes results.
        tally: counts.
        policy: limits and retries.
    """

    def __init__(
        self,
        feed: Feed,
        states: bytearray,
        *,
        pool: Pool,
        sender: Sender,
        journal: Journal,
        tally: Tally,
        policy: HeadPolicy,
    ) -> None:
        self._feed, self._pool, self._sender = feed, pool, sender
        self._journal, self._tally, self._policy = journal, tally, policy
        self._evidence, self._queue = WorkerEvidence(), Queue(self._dispatch)
        self._results = Results(states, journal=journal, tally=tally, failed=lambda error: self._failed("", error))
        self._attempts = Attempts(
            pool,
            self._evidence,
            sender,
            self._results,
            self._queue,
            second=SecondTries(pool, silence=policy.silence, lateness=policy.lateness),
            retries=policy.retries,
            failed=self._failed,
        )
        self._doubts = self._attempts.doubts
        self._read_all = False
        self._failure: BaseException | None = None
        self._ends_by: Instant | None = None
        self._served_at = time.monotonic()

    def stop(self) -> None:
        """Send no more rows; those under way may end within the grace period. A second call ends them at once."""
        self._ends_by = time.monotonic() + self._policy.grace if self._ends_by is None else 0.0
        self._queue.wake.set()

    def changed(self) -> None:
        """Wake the head: workers have joined or been asked to leave."""
        self._queue.wake.set()

    async def run(self) -> None:
        """Run until each row has its result in the journal. Raises `BatchStopped`; defects are raised as they are."""
        self._attempts.errand(self._sync_often())
        try:
            while True:
                if self._failure is not None:
                    raise self._failure
                await self._read_ahead()
                now = time.monotonic()
                self._look_after_workers(now)
                self._dispatch()
                self._go_on_with_the_last(now)
                if self._ended(now):
                    break
                await self._pause(now)
            self._journal.flush()
        finally:
            await self._attempts.end()
            self._feed.close()
            self._results.close()
        self._journal.sync()

    # --- one turn ---

    async def _read_ahead(self) -> None:
        most, queue = max(1024, 4 * self._pool.room), self._queue
        while (
            not self._read_all
            and self._ends_by is None
            and len(queue.ready) < max(LEAST_READY, self._pool.room)
            and len(queue) + len(self._attempts) < most
            and queue.bytes < _MOST_BYTES
        ):
            rows = await asyncio.to_thread(self._feed.read)
            if not rows:
                self._read_all = self._feed.ended
                break
            for row in rows:
                if isinstance(row, BadRow):
                    self._results.fail(row, "invalid_row", row.message, Fault.ROW)
                else:
                    queue.bytes += len(row.body)
                    queue.ready.append(Hand(row, len(row.body)))
            self._dispatch()

    def _dispatch(self) -> None:
        """Assign rows while a worker has room."""
        if self._ends_by is not None or self._failure is not None:
            return
        now, queue = time.monotonic(), self._queue
        queue.come_due(now)
        blocked: set[object] = set()
        while self._pool.any_room:
            at = queue.next(blocked, self._pool.suits)
            if at is None:
                return
            hand = queue.ready[at]
            url = self._assign(hand, now)
            if url is not None:
                del queue.ready[at]
                self._attempts.send(hand, url, now)
            elif hand.opinions and not self._doubts.unmet(hand):
                del queue.ready[at]
                self._doubts.take(hand)
            else:
                blocked.add(alike(hand))

    def _assign(self, hand: Hand, now: Instant) -> str | None:
        row, fits = hand.row, partial(self._evidence.may_have, hand)
        if hand.failed and not self._pool.takers(never=hand.failed, fits=fits):
            url = self._try_one_that_does_not_fit(hand, now)
            if url is not None:
                return url
        url = self._pool.assign(
            row.tokens, prefix=row.prefix, avoid=hand.avoided, never=hand.met, fits=fits, alone=hand.alone
        )
        return url if url is not None else self._try_one_that_does_not_fit(hand, now)

    def _try_one_that_does_not_fit(self, hand: Hand, now: Instant) -> str | None:
        """Try a row at a worker that does not fit: it may have changed, or have met only rows that were at fault."""
        if hand.opinions or not self._pool.all_asked:
            return None
        kind = hand.row.kind
        for worker in [*self._pool.workers.values()]:
            free = worker.has_room and not worker.rows and not self._evidence.fits(worker.url, kind)
            if free and self._evidence.may_try(worker.url, kind, now):
                return self._pool.assign(hand.row.tokens, fits=worker.url.__eq__, alone=hand.alone)
        return None

    def _look_after_workers(self, now: Instant) -> None:
        for url in self._pool.due_probes(now):
            self._attempts.errand(self._probe(url))
        for url in self._pool.overdue(now):
            self._attempts.recall(url)
        self._pool.end_stalls(now, random.random())
        serving = self._pool.serving
        self._tally.serving(now, serving)
        kind = self._queue.ready[0].row.kind if self._queue.ready else None
        if serving and (kind is None or any(self._evidence.fits(url, kind) for url in self._pool.takers())):
            self._served_at = now
        if not self._queue and not self._attempts:
            self._attempts.good_at = now  # no row is under way, so no answer is due
        # An answer may take as long as an attempt; a pool that only refuses must not be asked forever.
        silent = now - self._attempts.good_at > self._policy.patience + self._policy.timeout
        if self._ends_by is None and (silent or now - self._served_at > self._policy.patience):
            raise BatchStopped(self._stall(), hint="see to the workers, then run the same command again")

    def _stall(self) -> str:
        reasons = [f"{count} times a worker {why}" for why, count in self._tally.retries.most_common(3)]
        found = [*self._pool.complaints(), *self._evidence.complaints(self._pool.takers())]
        complaints = "; ".join([*found[:8], *reasons]) or "there is no worker"
        return f"no row was answered for {self._policy.patience:g} s (--patience): {complaints}"

    def _go_on_with_the_last(self, now: Instant) -> None:
        """Also try the last rows elsewhere; rows that may kill engines go on with no other row beside them."""
        if self._ends_by is not None:
            return
        self._attempts.try_elsewhere(now, last=self._read_all and self._queue.only_last)
        if not self._queue.only_last or self._attempts.company or self._doubts.trying:
            return
        last = self._queue.last
        while last:
            if last[0].opinions and not self._doubts.unmet(last[0]):
                self._doubts.take(last.popleft())  # the workers that could be asked about it have left
            elif (url := self._assign(last[0], now)) is not None:
                self._attempts.send(last.popleft(), url, now)
            else:
                break
        if not last and not self._attempts:
            self._doubts.conclude()

    def _ended(self, now: Instant) -> bool:
        if self._ends_by is not None:
            if self._attempts and now < self._ends_by:
                return False
            self._journal.flush()
            done = self._tally.before + self._tally.done
            raise BatchStopped(
                f"asked to stop: {done:,} of {self._tally.rows:,} rows are in {self._journal.path}",
                hint="run the same command again to go on",
            )
        return self._read_all and not self._queue and not self._attempts and self._doubts.none

    async def _pause(self, now: Instant) -> None:
        due, wake = min(self._pool.next_at(), self._queue.next_at, now + _TURN_S), self._queue.wake
        timer = asyncio.get_running_loop().call_later(max(0.0, due - now), wake.set)
        await asyncio.sleep(0)  # lets other tasks run before the next turn
        await wake.wait()
        timer.cancel()
        wake.clear()

    # --- beside the rows ---

    async def _probe(self, url: str) -> None:
        found = await self._sender.probe(url)
        if not found.why:
            self._evidence.serves(url, found.models)
            self._attempts.penalties.forget(url)
        now, jitter = time.monotonic(), random.random()
        self._pool.probed(url, found.why, now, jitter, context=found.context, version=found.version)
        self._queue.wake.set()

    async def _sync_often(self) -> None:
        while True:
            await asyncio.sleep(SYNC_S)
            await asyncio.to_thread(self._journal.sync)

    def _failed(self, _: str, error: BaseException) -> None:
        self._failure = self._failure or error
        self._queue.wake.set()
