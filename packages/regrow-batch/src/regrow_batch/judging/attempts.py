"""Attempts at rows: each is sent to a worker, judged, and settled by a result, another attempt, or a doubt."""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from regrow.core.ids import Instant
from regrow.core.process.tasks import Tasks, shared, supervised
from regrow_batch.answers import Tokens
from regrow_batch.judging.doubts import RowsInDoubt
from regrow_batch.judging.evidence import MOST_DEATHS, Hand, Opinion, WorkerEvidence
from regrow_batch.judging.penalties import Penalties
from regrow_batch.judging.queue import LEAST_READY, Queue
from regrow_batch.judging.results import Results
from regrow_batch.judging.second import SecondTries
from regrow_batch.pool import Pool
from regrow_batch.retries import Accept, Again, Answered, Doubtful, Fault, RetryPolicy, Unanswered, judge
from regrow_batch.rows import Served
from regrow_batch.sending import ProbeAnswer, Sender

_STREAMS = 2
"""Attempts at a streamed answer, however they end."""


@dataclass(slots=True)
class _Moment:
    """Loss of rows by a worker: the number it had, the number it lost, and whether it answers a probe."""

    probe: asyncio.Task[ProbeAnswer]
    rows: int
    lost: int = 0


class Attempts:
    """The attempts under way.

    Args:
        pool: the workers.
        evidence: on workers and kinds of rows.
        sender: sends rows to workers.
        results: takes the results.
        queue: the rows that wait to be sent again.
        second: chooses the rows that are also tried elsewhere.
        retries: number and times of a row's attempts.
        failed: called with defects.
    """

    def __init__(
        self,
        pool: Pool,
        evidence: WorkerEvidence,
        sender: Sender,
        results: Results,
        queue: Queue,
        *,
        second: SecondTries,
        retries: RetryPolicy,
        failed: Callable[[str, BaseException], None],
    ) -> None:
        self._pool, self._evidence, self._sender, self._results = pool, evidence, sender, results
        self._queue, self._second, self._retries, self._failed = queue, second, retries, failed
        self._tally = results.tally
        self.penalties = Penalties(sender)
        self.errands = Tasks(failed)
        self.doubts = RowsInDoubt(pool, evidence, sender, back=queue.at_once, settle=self._decided, errand=self.errand)
        self._under_way: dict[asyncio.Task[None], tuple[str, Hand, Instant]] = {}
        self._recalled: set[asyncio.Task[None]] = set()
        """Attempts of workers that must leave. A row with two copies is recalled for each copy."""
        self._moments: dict[str, _Moment] = {}
        self._asking: dict[str, asyncio.Task[ProbeAnswer]] = {}
        self.good_at = time.monotonic()
        """Time of the last result."""

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def company(self) -> bool:
        """True if a row is under way that may have others beside it."""
        return any(not hand.alone for _, hand, _ in self._under_way.values())

    def errand(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task beside the rows."""
        self.errands.start(work, "an errand").add_done_callback(lambda _: self._queue.wake.set())

    def recall(self, url: str) -> None:
        """Take back the rows of a worker that must leave."""
        for task, (where, _, _) in self._under_way.items():
            if where == url and task not in self._recalled:
                self._recalled.add(task)
                task.cancel()

    def try_elsewhere(self, now: Instant, *, last: bool) -> None:
        """Also send the rows of a silent worker, and the last rows of the batch, to another worker."""
        for hand, url in self._second.due(self._under_way.values(), now, last=last):
            holder = self._pool.workers.get(url)
            never = hand.met | {url}
            if holder is None or not holder.stalled:
                never |= hand.failed
            elif hand.attempt + 1 >= self._retries.attempts:
                continue  # each of these counts
            fits = partial(self._evidence.fits, kind=hand.row.kind)
            other = self._pool.assign(hand.row.tokens, never=never, fits=fits)
            if other is not None:
                self.send(hand, other, now)

    async def end(self) -> None:
        """Cancel all attempts under way; none of them counts."""
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, self.errands.close(), return_exceptions=True)
        for probe in (*self._asking.values(), *(moment.probe for moment in self._moments.values())):
            probe.cancel()

    def send(self, hand: Hand, url: str, now: Instant) -> None:
        """Send a row to the worker it was assigned to."""
        hand.copies += 1
        self._second.began(url, now)
        task = supervised(self._attempt(hand, url), "an attempt", self._failed)
        self._under_way[task] = (url, hand, now)
        task.add_done_callback(self._landed)

    async def _attempt(self, hand: Hand, url: str) -> None:
        row, began = hand.row, time.monotonic()
        outcome = await self._sender.send(url, row)
        verdict = judge(outcome, row, wall=time.time())
        died = (
            isinstance(verdict, Again)
            and verdict.lost
            and await self._has_died(url, row_lost=isinstance(outcome, Unanswered))
        )
        if isinstance(verdict, Accept) and self._evidence.may_be_another_now(url, row, verdict.answer):
            verdict = await self._asked_again(url, verdict)
        penalty = await self.penalties.at(url, row) if isinstance(verdict, Accept) and row.penalized else ""
        # Before the decision: if two attempts fail at the same moment, the second must send the row again.
        hand.copies -= 1
        if isinstance(verdict, Accept) and isinstance(outcome, Answered):
            self._accept(hand, url, began, outcome, verdict, penalty)
        elif isinstance(verdict, Doubtful) and isinstance(outcome, Answered):
            self._doubt(hand, url, outcome, verdict, streamed=row.streams)
        elif isinstance(verdict, Again):
            self._again(hand, url, verdict, died=died)
        self._pool.release(url, row.tokens)
        self._queue.give()

    async def _asked_again(self, url: str, accept: Accept) -> Accept | Again:
        """Ask a worker for its models again. If it fails, the answer's model is unknown, and the answer is dropped."""
        task = self._asking.get(url)
        if task is None or task.done():
            task = self._asking[url] = shared(self._sender.probe(url))
        found = await asyncio.shield(task)
        if found.why:
            return Again(f"answers as the model {accept.answer.model!r} and {found.why}", Fault.WORKER, at_once=True)
        self._evidence.says_again(url, found.models, accept.answer.model)
        return accept

    def _version(self, url: str) -> str:
        worker = self._pool.workers.get(url)
        return worker.version if worker is not None else ""

    async def _has_died(self, url: str, *, row_lost: bool) -> bool:
        """True if a worker's engine seems to have died, and with it every row that it was computing.

        It has if it fails a probe, or if at least two rows, and at least half of those that it had when the probe
        began, lost their connection before the probe ended: it may restart in time to answer the probe.

        Args:
            url: the worker that has just failed a row.
            row_lost: the row lost its connection; False: the worker answered with an error of the server (5xx).
        """
        moment = self._moments.get(url)
        if moment is None or moment.probe.done():
            worker = self._pool.workers.get(url)
            moment = _Moment(shared(self._sender.probe(url)), worker.rows if worker is not None else 0)
            self._moments[url] = moment
        moment.lost += row_lost
        gone = bool((await asyncio.shield(moment.probe)).why)
        return gone or (row_lost and moment.lost > 1 and 2 * moment.lost >= moment.rows)

    def _landed(self, task: asyncio.Task[None]) -> None:
        url, hand, _ = self._under_way.pop(task)
        if task.cancelled():
            hand.copies -= 1
            # Here, not in the attempt: a task that is cancelled before it has begun never runs a line.
            self._pool.release(url, hand.row.tokens)
            if task in self._recalled and not hand.done:
                self._tally.retried("had to go")
                if not hand.copies:
                    self._queue.at_once(hand)
        self._recalled.discard(task)
        if len(self._queue.ready) < LEAST_READY or not self._under_way:
            self._queue.wake.set()

    def _accept(self, hand: Hand, url: str, began: Instant, outcome: Answered, verdict: Accept, penalty: str) -> None:
        row, answer = hand.row, verdict.answer
        if self._evidence.is_of_another_model(url, row, answer):
            why = f"answers as the model {answer.model!r} where {row.model!r} was asked for"
            self._evidence.refused(url, row.kind, why, time.monotonic())
            self._again(hand, url, Again(why, Fault.WORKER, at_once=True))
            return
        self.good_at = time.monotonic()
        self._second.answered(url, began, self.good_at)
        self._pool.succeeded(url, answer.tokens)
        if hand.done:
            return
        self._results.answer(row, outcome, answer, Served(url, version=self._version(url), penalty=penalty))
        self._finish(hand)
        self.doubts.answered(url, hand, began)

    def _doubt(self, hand: Hand, url: str, outcome: Answered, verdict: Doubtful, *, streamed: bool) -> None:
        now = time.monotonic()
        self._second.spoke(url, now)
        self._pool.refused(url)
        if hand.done:
            return
        if streamed and verdict.answer is None:
            hand.row = hand.row.whole  # the worker may refuse only the stream
            if not hand.copies:
                self._queue.at_once(hand)
            return
        self._tally.retried("refused it or answered nothing")
        self.doubts.refused(hand, Opinion(url, verdict.why, outcome, verdict.answer, now))
        self._queue.wake.set()

    def _decided(self, hand: Hand, word: Opinion, fault: Fault) -> None:
        """Settle a row without an answer whose fault is known, or will never be known."""
        if fault is Fault.ROW:
            self.good_at = time.monotonic()
            self._pool.succeeded(word.worker, word.empty.tokens if word.empty is not None else Tokens())
            if word.empty is not None:
                served = Served(word.worker, version=self._version(word.worker))
                self._results.answer(hand.row, word.outcome, word.empty, served)
                self._finish(hand)
                return
        self._results.refuse(hand.row, word, fault)
        self._finish(hand)

    def _again(self, hand: Hand, url: str, again: Again, *, died: bool = False) -> None:
        now, jitter = time.monotonic(), random.random()
        self._tally.retried(again.why)
        if again.fault is Fault.POOL:
            self._pool.busy(url, again.why, now, jitter)
        else:
            self._pool.failed(url, again.why, now, jitter, died=died)
        if hand.done:
            return
        if again.fault is Fault.POOL:
            hand.busy += 1
        elif died:
            hand.deaths += 1  # the row or a neighbour killed the engine: no attempt of either is counted
        else:
            hand.attempt += 1
        hand.avoid = url
        hand.failed.add(url)
        if not self._pool.takers(never=hand.failed):
            hand.failed = {url}
        if hand.copies:
            return  # another attempt at the row goes on
        if hand.alone and hand.deaths > MOST_DEATHS:
            text = f"met {hand.deaths} ends of engines, the last with no row beside it: worker {url} {again.why}"
            self._give_up(hand, "ended_engines", text)
        elif hand.attempt >= self._retries.attempts:
            text = f"was given up after {hand.attempt} attempts; the last: worker {url} {again.why}"
            self._give_up(hand, "gave_up", text)
        else:
            hand.alone = hand.alone or hand.suspected
            if hand.attempt + hand.deaths >= _STREAMS:
                hand.row = hand.row.whole  # no worker streams it correctly, but one may answer it whole
            tried = hand.busy if again.fault is Fault.POOL else hand.attempt + hand.deaths
            wait = self._retries.wait(max(1, tried), again, jitter)
            self._queue.later(hand, now + wait)
        self._queue.wake.set()

    def _give_up(self, hand: Hand, code: str, text: str) -> None:
        if hand.opinions:
            self.doubts.take(hand)
            return
        self._results.fail(hand.row, code, text, Fault.UNKNOWN)
        self._finish(hand)

    def _finish(self, hand: Hand) -> None:
        """The row has its result: cancel its other attempts."""
        hand.done = True
        self._queue.bytes -= hand.size
        if hand.copies:
            for task, (_, other, _) in self._under_way.items():
                if other is hand and task is not asyncio.current_task():
                    task.cancel()
