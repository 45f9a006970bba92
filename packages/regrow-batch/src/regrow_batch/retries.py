"""What becomes of an answer, or of none: a result, an error row, or another attempt. Pure."""

from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from regrow.core.ids import Seconds
from regrow_batch.rows import Answer, read_answer

_BUSY = 429
_RETRIED = {408, 429}
_WORKERS_FAULT = {401, 403}
"""All rows would get that answer there: the worker wants a key, or another one."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A whole HTTP answer came. `retry_after`, `kind`: the headers Retry-After and Content-Type.

    `ended_early`: the period of the loop for which a stream was ended; 0: it was not.
    """

    status: int
    body: bytes
    kind: str = ""
    retry_after: str = ""
    request_id: str = ""
    ended_early: int = 0


@dataclass(frozen=True, slots=True)
class Unanswered:
    """No whole answer came. `why`: follows the worker's name in a sentence. `hung`: a deadline ended the wait."""

    why: str
    hung: bool = False


@dataclass(frozen=True, slots=True)
class Accept:
    """The row has its answer."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class Refuse:
    """The row is refused, and would be elsewhere too."""


@dataclass(frozen=True, slots=True)
class Again:
    """The row is to be sent again.

    Attributes:
        why: follows the worker's name in a sentence.
        busy: the worker is sound and has too much to do: no fault of it, and no attempt of the row.
        at_once: nothing is gained by waiting: another worker can take it.
        asked: what the worker wants to be waited for.
    """

    why: str
    busy: bool = False
    at_once: bool = False
    asked: Seconds = 0.0


@dataclass(frozen=True)
class RetryPolicy:
    """How often and after which time a row is sent again.

    Attributes:
        attempts: so many in all; then it becomes an error row.
        base: the first wait, which doubles with each attempt.
        most: the longest wait; a worker that asks for a longer one is not obeyed beyond it.
    """

    attempts: int = 8
    base: Seconds = 0.25
    most: Seconds = 30.0

    def wait(self, attempt: int, again: Again, jitter: float) -> Seconds:
        """How long to wait after the attempt of that number, from 1.

        Args:
            attempt: which one failed.
            again: how.
            jitter: drawn from 0 to 1. Half of the wait is random, so that rows that failed together come back apart.
        """
        if again.at_once and attempt == 1:
            return 0.0
        backoff = min(self.most, self.base * 2.0 ** min(attempt - 1, 30)) * (0.5 + 0.5 * jitter)
        return max(backoff, min(again.asked, self.most) * (1.0 + 0.1 * jitter))


def judge(outcome: Answered | Unanswered, *, wall: Seconds) -> Accept | Refuse | Again:
    """What becomes of a row. `wall`: seconds since the epoch, for a Retry-After that is a date."""
    if isinstance(outcome, Unanswered):
        return Again(outcome.why, at_once=not outcome.hung)
    status = outcome.status
    if 200 <= status < 300:
        answer = read_answer(outcome.body)
        if answer is not None:
            return Accept(answer)
        return Again(f"answered {_what(outcome)} instead of JSON, with status {status}", at_once=True)
    if status in _RETRIED or status >= 500:
        return Again(f"answered with status {status}", status == _BUSY, False, _asked(outcome.retry_after, wall))
    if status in _WORKERS_FAULT:
        return Again(f"answered with status {status}: it wants a key, see --api-key-file")
    if status < 400:
        return Again(f"answered with status {status}, which leads elsewhere: give the address that it leads to")
    return Refuse()


def _what(outcome: Answered) -> str:
    if "html" in outcome.kind or outcome.body.lstrip()[:1] == b"<":
        return "HTML"
    return "a torn text" if outcome.body.lstrip()[:1] == b"{" else "something else"


def _asked(header: str, wall: Seconds) -> Seconds:
    """The header's seconds, or seconds until its date; 0.0 of none and of nonsense."""
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - wall)
    except (ValueError, TypeError):
        return 0.0
