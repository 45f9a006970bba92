"""Writes the result of each row as a line of the journal and counts it; flushes the journal every few milliseconds."""

import asyncio
import time
from collections.abc import Callable

from regrow.core.ids import Seconds
from regrow_batch.answers import Answer, Tokens
from regrow_batch.circles import Circles, circles, reported, reported_by_server
from regrow_batch.journal import Journal
from regrow_batch.judging.evidence import Opinion
from regrow_batch.places import BatchStopped
from regrow_batch.retries import Answered, Fault
from regrow_batch.rows import BadRow, BatchRow, Served, answered, failed, refused
from regrow_batch.scanning import DONE, OPEN
from regrow_batch.tally import Tally

_FLUSH_S: Seconds = 0.01
EMPTY = "empty_answer"
_REPETITION = "repetition"
"""vLLM's finish reason for an answer that its `repetition_detection` has ended."""


class Results:
    """Takes the results of rows.

    Args:
        states: of all rows, shared with the feed; a row with a result is marked here.
        journal: takes the lines.
        tally: counts them.
        failed: called with an error of writing.
    """

    def __init__(
        self, states: bytearray, *, journal: Journal, tally: Tally, failed: Callable[[BaseException], None]
    ) -> None:
        self._states, self._journal, self.tally, self._failed = states, journal, tally, failed
        self._timer: asyncio.TimerHandle | None = None

    def answer(self, row: BatchRow, outcome: Answered, answer: Answer, served: Served) -> None:
        """Write the answer as the row's result."""
        served.model = answer.model
        served.version = answer.system_fingerprint or served.version
        for choice in answer.choices:
            self.tally.finished[choice.finish_reason or "none"] += 1
        found = self._circles(answer, outcome.ended_early)
        name = outcome.request_id or answer.id
        line = answered(row, outcome.status, outcome.body, name, found, served)
        self._commit(row.number, line, tokens=answer.tokens)

    def refuse(self, row: BatchRow, opinion: Opinion, fault: Fault) -> None:
        """Write the refusal as the row's result."""
        outcome = opinion.outcome
        line = refused(
            row,
            outcome.status,
            outcome.body,
            fault=fault,
            code=EMPTY if opinion.empty is not None else "",
            request_id=outcome.request_id,
            worker=opinion.worker,
        )
        self._commit(row.number, line, error=True)

    def fail(self, row: BatchRow | BadRow, code: str, message: str, fault: Fault) -> None:
        """Write an error without any answer as the row's result."""
        self._commit(row.number, failed(row, code, message, fault), error=True)

    def _circles(self, answer: Answer, ended_early: int) -> Circles | None:
        """The loop in an answer, if there is one; an answer that ended by itself has none."""
        if ended_early:
            self.tally.ended += 1
            found: Circles | None = reported(ended_early, ended_early=True)
        elif any(each.finish_reason == _REPETITION for each in answer.choices):
            found = reported_by_server()
        else:
            cut = (each for each in answer.choices if each.finish_reason == "length")
            looked = (circles(text) for each in cut for text in each.texts)
            found = next((each for each in looked if each is not None), None)
        self.tally.degenerate += found is not None
        return found

    def _commit(self, number: int, result: bytes, *, tokens: Tokens | None = None, error: bool = False) -> None:
        """Write a row's result, which no later one replaces."""
        if self._states[number] != OPEN:
            return
        self._states[number] = DONE
        self._journal.append(number, result)
        self.tally.result(time.monotonic(), tokens=tokens, error=error)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_FLUSH_S, self._flush)

    def _flush(self) -> None:
        self._timer = None
        try:
            self._journal.flush()
        except BatchStopped as error:
            self._failed(error)

    def close(self) -> None:
        """Write all pending lines."""
        if self._timer is not None:
            self._timer.cancel()
            self._flush()
