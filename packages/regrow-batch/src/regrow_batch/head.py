"""Runs a batch: takes rows from the feed, gives them to workers, writes what comes back, until none remains."""

import asyncio
import heapq
import random
import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from regrow.core.ids import Instant, Seconds
from regrow.core.process.tasks import Tasks, supervised
from regrow_batch.circles import Circles, circles, told_of
from regrow_batch.journal import SYNC_S, Journal
from regrow_batch.places import BatchStopped
from regrow_batch.pool import NEVER, Pool
from regrow_batch.retries import Accept, Again, Answered, Refuse, RetryPolicy, Unanswered, judge
from regrow_batch.rows import Answer, BadRow, BatchRow, answered, failed, refused
from regrow_batch.scanning import DONE, OPEN, Feed
from regrow_batch.sending import Sender
from regrow_batch.tally import Tally

_FLUSH_S: Seconds = 0.01
_TURN_S: Seconds = 0.5
_LEAST_READY = 256
_LOOK_ROWS = 256
_MOST_BYTES = 64 << 20
"""Of rows in hand; so many are not read ahead."""


@dataclass(frozen=True)
class HeadPolicy:
    """How a head goes about it.

    Attributes:
        retries: how often and when a row is sent again.
        patience: how long nobody may serve before the job stops, or nothing succeed beyond `timeout`.
        timeout: how long an attempt may take.
        grace: how long rows under way may take once the job is asked to stop.
    """

    retries: RetryPolicy = field(default_factory=RetryPolicy)
    patience: Seconds = 600.0
    timeout: Seconds = 600.0
    grace: Seconds = 30.0


@dataclass(slots=True, eq=False)
class _Hand:
    """A row in hand. `avoid`: who was last not able to answer it. `recalled`: its worker has to go."""

    row: BatchRow
    attempt: int = 0
    avoid: str = ""
    busy: int = 0
    recalled: bool = False


class BatchHead:
    """Runs one batch to its end.

    Args:
        feed: the rows that remain.
        states: of all rows, shared with the feed: a row that has its result is marked here.
        pool: the workers.
        sender: speaks with them.
        journal: takes results.
        tally: counts.
        policy: how it goes about it.
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
        self._feed, self._states, self._pool, self._sender = feed, states, pool, sender
        self._journal, self._tally, self._policy = journal, tally, policy
        self._ready: deque[_Hand] = deque()
        self._later: list[tuple[Instant, int, _Hand]] = []
        self._under_way: dict[asyncio.Task[None], tuple[str, _Hand]] = {}
        self._errands = Tasks(self._failed)
        self._bytes, self._drawn, self._read_all = 0, 0, False
        self._wake = asyncio.Event()
        self._flush_timer: asyncio.TimerHandle | None = None
        self._failure: BaseException | None = None
        self._ends_by: Instant | None = None
        self._good_at = self._served_at = time.monotonic()

    def stop(self) -> None:
        """Send nothing more; what is under way may end within the grace period. A second call ends it at once."""
        self._ends_by = time.monotonic() + self._policy.grace if self._ends_by is None else 0.0
        self._wake.set()

    def changed(self) -> None:
        """Workers have come or been asked to go."""
        self._wake.set()

    async def run(self) -> None:
        """Until each row has its result in the journal. Raises `BatchStopped`, and what a defect raises."""
        self._errand(self._sync_often())
        try:
            while True:
                if self._failure is not None:
                    raise self._failure
                await self._read_ahead()
                now = time.monotonic()
                self._look_after_workers(now)
                self._dispatch()
                if self._ended(now):
                    break
                await self._pause(now)
            self._journal.flush()
        finally:
            await self._let_go()
        self._journal.sync()

    # --- one turn ---

    async def _read_ahead(self) -> None:
        most = max(1024, 4 * self._pool.room)
        while (
            not self._read_all
            and self._ends_by is None
            and len(self._ready) < max(_LEAST_READY, self._pool.room)
            and len(self._ready) + len(self._later) + len(self._under_way) < most
            and self._bytes < _MOST_BYTES
        ):
            rows = await asyncio.to_thread(self._feed.read)
            self._read_all = not rows
            for row in rows:
                if isinstance(row, BadRow):
                    self._commit(row.number, failed(row, "invalid_row", row.message), error=True)
                else:
                    self._bytes += len(row.body)
                    self._ready.append(_Hand(row))
            self._dispatch()

    def _dispatch(self) -> None:
        """Give away rows as long as somebody has room."""
        if self._ends_by is not None or self._failure is not None:
            return
        now = time.monotonic()
        while self._later and self._later[0][0] <= now:
            self._ready.appendleft(heapq.heappop(self._later)[2])
        while self._ready:
            at = self._next_ready()
            hand = self._ready[at]
            url = self._pool.assign(hand.row.tokens, prefix=hand.row.prefix, avoid=hand.avoid)
            if url is None:
                return
            del self._ready[at]
            task = supervised(self._attempt(hand, url), "an attempt", self._failed)
            self._under_way[task] = (url, hand)
            task.add_done_callback(self._landed)

    def _next_ready(self) -> int:
        """The first row that can go where its prefix wants to; where none of many can, the first of all."""
        for at, hand in enumerate(islice(self._ready, _LOOK_ROWS)):
            if self._pool.suits(hand.row.prefix):
                return at
        return 0

    def _look_after_workers(self, now: Instant) -> None:
        for url in self._pool.due_probes(now):
            self._errand(self._probe(url))
        for url in self._pool.overdue(now):
            for task, (where, hand) in self._under_way.items():
                if where == url and not hand.recalled:
                    hand.recalled = True
                    task.cancel()
        serving = self._pool.serving
        self._tally.serving(now, serving)
        if serving:
            self._served_at = now
        # Answers may take as long as an attempt; a pool that only ever says no must not be asked for ever.
        silent = now - self._good_at > self._policy.patience + self._policy.timeout
        if self._ends_by is None and (silent or now - self._served_at > self._policy.patience):
            raise BatchStopped(self._stall(), hint="see to the workers, then run the same command again")

    def _stall(self) -> str:
        reasons = [f"{count} times a worker {why}" for why, count in self._tally.retries.most_common(3)]
        complaints = "; ".join([*self._pool.complaints()][:8] or reasons) or "there is no worker"
        return f"no row was answered for {self._policy.patience:g} s (--patience): {complaints}"

    def _ended(self, now: Instant) -> bool:
        if self._ends_by is not None:
            if self._under_way and now < self._ends_by:
                return False
            self._journal.flush()
            done = self._tally.before + self._tally.done
            raise BatchStopped(
                f"asked to stop: {done:,} of {self._tally.rows:,} rows are in {self._journal.path}",
                hint="run the same command again to go on",
            )
        return self._read_all and not self._ready and not self._later and not self._under_way

    async def _pause(self, now: Instant) -> None:
        due = min(self._pool.next_at(), self._later[0][0] if self._later else NEVER, now + _TURN_S)
        timer = asyncio.get_running_loop().call_later(max(0.0, due - now), self._wake.set)
        await asyncio.sleep(0)  # whatever wakes it, others get their turn
        await self._wake.wait()
        timer.cancel()
        self._wake.clear()

    # --- one row ---

    async def _attempt(self, hand: _Hand, url: str) -> None:
        outcome = await self._sender.send(url, hand.row)
        self._settle(hand, url, outcome)
        self._pool.release(url, hand.row.tokens)
        self._dispatch()

    def _landed(self, task: asyncio.Task[None]) -> None:
        url, hand = self._under_way.pop(task)
        if task.cancelled():
            # Here, not in the attempt: one that is cancelled before it has begun never runs a line.
            self._pool.release(url, hand.row.tokens)
            if hand.recalled:
                hand.recalled = False
                self._tally.retried("had to go")
                self._ready.appendleft(hand)
        if self._failure is not None or len(self._ready) < _LEAST_READY or not self._under_way:
            self._wake.set()

    def _settle(self, hand: _Hand, url: str, outcome: Answered | Unanswered) -> None:
        row = hand.row
        verdict = judge(outcome, wall=time.time())
        if isinstance(verdict, Again):
            self._again(hand, url, verdict)
            return
        self._good_at = time.monotonic()
        tokens = 0
        if isinstance(verdict, Accept) and isinstance(outcome, Answered):
            tokens = verdict.answer.tokens
            found = self._circles(verdict.answer, outcome.ended_early)
            name = outcome.request_id or verdict.answer.id
            self._commit(row.number, answered(row, outcome.status, outcome.body, name, found), tokens=tokens)
        elif isinstance(verdict, Refuse) and isinstance(outcome, Answered):
            self._commit(row.number, refused(row, outcome.status, outcome.body), error=True)
        self._pool.succeeded(url, tokens)
        self._bytes -= len(row.body)

    def _again(self, hand: _Hand, url: str, again: Again) -> None:
        now, jitter, row = time.monotonic(), random.random(), hand.row
        self._tally.retried(again.why)
        if again.busy:
            hand.busy += 1
            self._pool.busy(url, again.why, now, jitter)
        else:
            hand.attempt += 1
            self._pool.failed(url, again.why, now, jitter)
        if hand.attempt >= self._policy.retries.attempts:
            told = f"was given up after {hand.attempt} attempts; the last: worker {url} {again.why}"
            self._commit(row.number, failed(row, "gave_up", told), error=True)
            self._bytes -= len(row.body)
            return
        hand.avoid = url
        wait = self._policy.retries.wait(max(1, hand.busy if again.busy else hand.attempt), again, jitter)
        self._drawn += 1
        heapq.heappush(self._later, (now + wait, self._drawn, hand))
        self._wake.set()

    def _circles(self, answer: Answer, ended_early: int) -> Circles | None:
        """What is told of an answer that runs in circles; an answer that ended by itself does not."""
        if ended_early:
            self._tally.ended += 1
            found: Circles | None = told_of(ended_early, ended_early=True)
        else:
            looked = (circles(each.words) for each in answer.choices if each.finish_reason == "length")
            found = next((each for each in looked if each is not None), None)
        self._tally.degenerate += found is not None
        return found

    def _commit(self, number: int, result: bytes, *, tokens: int = 0, error: bool = False) -> None:
        """Give a row its result, which no later one replaces."""
        if self._states[number] != OPEN:
            return
        self._states[number] = DONE
        self._journal.append(number, result)
        self._tally.result(time.monotonic(), tokens=tokens, error=error)
        if self._flush_timer is None:
            self._flush_timer = asyncio.get_running_loop().call_later(_FLUSH_S, self._flush)

    def _flush(self) -> None:
        self._flush_timer = None
        try:
            self._journal.flush()
        except BatchStopped as error:
            self._failure = self._failure or error
            self._wake.set()

    # --- beside the rows ---

    async def _probe(self, url: str) -> None:
        why = await self._sender.probe(url)
        self._pool.probed(url, why, time.monotonic(), random.random())
        self._wake.set()

    async def _sync_often(self) -> None:
        while True:
            await asyncio.sleep(SYNC_S)
            await asyncio.to_thread(self._journal.sync)

    def _errand(self, work: Coroutine[Any, Any, None]) -> None:
        self._errands.start(work, "an errand")

    def _failed(self, _: str, error: BaseException) -> None:
        self._failure = self._failure or error
        self._wake.set()

    async def _let_go(self) -> None:
        """End all that is under way; nothing of it counts."""
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, self._errands.close(), return_exceptions=True)
        self._feed.close()
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush()
