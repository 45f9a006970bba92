"""Refused rows, kept until it is known whether the row or the worker is at fault.

A worker's refusal counts once the worker has answered another row of that kind: one that arrives anyway, or a control,
a row that was answered before and is sent only for this test.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from regrow.core.ids import Instant, Seconds
from regrow_batch.judging.evidence import MOST_OPINIONS, Hand, Kind, Opinion, WorkerEvidence
from regrow_batch.pool import Pool
from regrow_batch.retries import Accept, Doubtful, Fault, Unanswered, judge
from regrow_batch.sending import Sender

_TRIES = 10
"""Failed controls after which an opinion counts as unknown; the worker may be one that fails often."""
_HUNG_TRIES = 4
"""A control that hangs until the timeout counts as this many tries."""
_TRY_WAIT: Seconds = 0.5


class RowsInDoubt:
    """The rows in doubt.

    Args:
        pool: the workers.
        evidence: on workers and kinds of rows.
        sender: sends rows to workers.
        back: takes a row that another worker can be asked about.
        settle: called with a row, the opinion that decides it, and the side at fault.
        errand: runs a task.
    """

    def __init__(
        self,
        pool: Pool,
        evidence: WorkerEvidence,
        sender: Sender,
        *,
        back: Callable[[Hand], None],
        settle: Callable[[Hand, Opinion, Fault], None],
        errand: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._pool, self._evidence, self._sender = pool, evidence, sender
        self._back, self._settle, self._errand = back, settle, errand
        self._rows: list[Hand] = []
        self._trying: set[tuple[str, Kind]] = set()

    @property
    def none(self) -> bool:
        """True if no row is in doubt."""
        return not self._rows

    @property
    def trying(self) -> bool:
        """True while a control is under way."""
        return bool(self._trying)

    def unmet(self, hand: Hand) -> bool:
        """True if there is another worker that can be asked about a row."""
        if len(hand.opinions) >= MOST_OPINIONS:
            return False
        return bool(self._pool.takers(never=hand.met, fits=partial(self._evidence.may_have, hand)))

    def refused(self, hand: Hand, opinion: Opinion) -> None:
        """Send a refused row to another worker, or keep it here, unless another attempt at it is under way."""
        kind = hand.row.kind
        hand.doubt(opinion)
        self._evidence.refused(opinion.worker, kind, opinion.why, opinion.at)
        if not hand.copies:
            self.take(hand)
        if self._evidence.is_doubted(opinion.worker, kind):
            self._try(opinion.worker, kind)

    def take(self, hand: Hand) -> None:
        """Keep a row that has an opinion against it, unless another worker can be asked."""
        if self.unmet(hand):
            self._back(hand)
        else:
            self._rows.append(hand)

    def answered(self, url: str, hand: Hand, began: Instant) -> None:
        """Use the answer of a worker, to a row sent at `began`, as evidence against rows that it refused."""
        self._evidence.answered(url, hand.row)
        for opinion in hand.opinions:
            if opinion.empty is None and opinion.worker != url:
                self._evidence.convicted(opinion.worker, hand.row.kind, time.monotonic())
        self._trust(url, hand.row.kind, began)

    def _trust(self, url: str, kind: Kind, began: Instant) -> None:
        """Settle rows that this worker refused before `began` as the rows' fault, unless others can be asked."""
        rows, self._rows = self._rows, []
        for hand in rows:
            word = next((each for each in hand.opinions if each.worker == url and each.at <= began), None)
            if word is None or hand.row.kind != kind or (word.empty is not None and self._is_refused(hand)):
                self._rows.append(hand)
            elif self.unmet(hand):
                self._back(hand)
            else:
                self._settle(hand, word, Fault.ROW)

    def conclude(self) -> None:
        """No other work is left: test the opinions against the rows, or settle the rows without proof."""
        rows, self._rows = self._rows, []
        for hand in rows:
            if self.unmet(hand):
                self._back(hand)
                continue
            words = [each for each in hand.opinions if self._can_be_tried(each, hand.row.kind)]
            if words:
                self._rows.append(hand)
                # All at once, so that a worker that hangs delays no other. An empty answer is weaker than a refusal.
                for word in [each for each in words if each.empty is None] or words:
                    self._try(word.worker, hand.row.kind)
            elif not hand.asks_all:
                hand.asks_all = True
                self.take(hand)
            else:
                known = all(each.worthless and each.worker in self._pool.workers for each in hand.opinions)
                self._settle(hand, hand.opinions[-1], Fault.WORKER if known else Fault.UNKNOWN)

    def _is_refused(self, hand: Hand) -> bool:
        """True if a refusal of the row may still be tested: it is stronger evidence than empty answers."""
        return any(each.empty is None and self._can_be_tried(each, hand.row.kind) for each in hand.opinions)

    def _can_be_tried(self, word: Opinion, kind: Kind) -> bool:
        here = word.worker in self._pool.takers() and self._evidence.control(kind) is not None
        return here and not word.worthless and word.tries < _TRIES

    def _try(self, url: str, kind: Kind) -> None:
        if (url, kind) not in self._trying and self._evidence.control(kind) is not None:
            self._trying.add((url, kind))
            self._errand(self._send_control(url, kind))

    async def _send_control(self, url: str, kind: Kind) -> None:
        """Send a row that was answered before: a worker that refuses it is at fault itself."""
        row = self._evidence.control(kind)
        try:
            if row is None:
                return
            began = time.monotonic()
            outcome = await self._sender.send(url, row)
            verdict = judge(outcome, row, wall=time.time())
            another = isinstance(verdict, Accept) and self._evidence.is_of_another_model(url, row, verdict.answer)
            if another or (isinstance(verdict, Doubtful) and verdict.answer is None):
                self._evidence.unproven(url, kind, time.monotonic())
                self._mark(url, kind, began, worthless=True)
            elif isinstance(verdict, Accept):
                self._evidence.answered(url, row)
                self._trust(url, kind, began)
            else:
                hung = isinstance(outcome, Unanswered) and outcome.hung
                self._mark(url, kind, began, tries=_HUNG_TRIES if hung else 1)
                await asyncio.sleep(_TRY_WAIT)
        finally:
            self._trying.discard((url, kind))

    def _mark(self, url: str, kind: Kind, began: Instant, *, tries: int = 0, worthless: bool = False) -> None:
        for hand in self._rows:
            for word in hand.opinions:
                if word.worker == url and hand.row.kind == kind and word.at <= began:
                    word.worthless = worthless or word.worthless
                    word.tries += tries
