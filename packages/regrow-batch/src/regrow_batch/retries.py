"""Fault for a row without an answer: the row's, the worker's, the pool's, or unknown. Pure.

One answer alone rarely tells. A refusal is only a doubt here: `evidence` decides it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import Any

from regrow.core.ids import Seconds
from regrow_batch.answers import Answer, is_sound, read_answer, readable, said_wrong
from regrow_batch.rows import BatchRow

_BUSY = 429
_RETRIED = {408, 425, 429}
_WORKERS_FAULT = {401, 402, 403, 407}
"""All rows would get that answer there: the worker wants a key, or another one, or to be paid."""
_BROKEN_OFF = frozenset(
    {
        "abort",
        "aborted",
        "cancelled",  # TensorRT-LLM, and `timeout`
        "canceled",
        "error",
        "insufficient_system_resource",  # DeepSeek
        "timeout",
    }
)
"""Finish reasons of answers that the server itself gave up, in small letters."""
_TALKS, _EMBEDS, _RESPONDS = "/completions", "/embeddings", "/responses"


class Fault(StrEnum):
    """Cause of a row's missing answer."""

    ROW = "row"
    WORKER = "worker"
    POOL = "pool"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Answered:
    """A whole HTTP answer came. `retry_after`, `kind`: the headers Retry-After and Content-Type.

    `body`: without a mark of its encoding, and with U+FFFD for what is half a character, as clients have it.
    `ended_early`: the period of the loop for which a stream was ended; 0: it was not.
    """

    status: int
    body: bytes
    kind: str = ""
    retry_after: str = ""
    request_id: str = ""
    ended_early: int = 0

    def __post_init__(self) -> None:
        """Make it readable: other JSON libraries take these, and so does whoever asks without this package."""
        object.__setattr__(self, "body", readable(self.body))


@dataclass(frozen=True, slots=True)
class Unanswered:
    """No whole answer came.

    Attributes:
        why: follows the worker's name in a sentence.
        hung: a deadline ended the wait.
        strayed: the answer to another row came.
    """

    why: str
    hung: bool = False
    strayed: bool = False


@dataclass(frozen=True, slots=True)
class Accept:
    """The row has its answer."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class Doubtful:
    """The worker refuses the row, or answers nothing: its own fault or the row's. `answer`: the empty one."""

    why: str
    answer: Answer | None = None


@dataclass(frozen=True, slots=True)
class Again:
    """The row is to be sent again.

    Attributes:
        why: follows the worker's name in a sentence.
        fault: whose it is, as far as this answer tells; of the pool's no attempt of the row is counted.
        at_once: nothing is gained by waiting: another worker can take it.
        asked: what the worker wants to be waited for.
        lost: the worker may have ended meanwhile, with all rows that it had.
    """

    why: str
    fault: Fault = Fault.UNKNOWN
    at_once: bool = False
    asked: Seconds = 0.0
    lost: bool = False


@dataclass(frozen=True)
class RetryPolicy:
    """Number and times of a row's attempts.

    Attributes:
        attempts: their number; then it becomes an error row.
        base: the first wait, which doubles with each attempt.
        most: the longest wait; a worker that asks for a longer one is not obeyed beyond it.
    """

    attempts: int = 8
    base: Seconds = 0.25
    most: Seconds = 30.0

    def wait(self, attempt: int, again: Again, jitter: float) -> Seconds:
        """Wait after the attempt of that number, from 1.

        Args:
            attempt: the one that failed.
            again: how it failed.
            jitter: drawn from 0 to 1. Half of the wait is random, so that rows that failed together come back apart.
        """
        if again.at_once and attempt == 1:
            return 0.0
        backoff = min(self.most, self.base * 2.0 ** min(attempt - 1, 30)) * (0.5 + 0.5 * jitter)
        return max(backoff, min(again.asked, self.most) * (1.0 + 0.1 * jitter))


def judge(outcome: Answered | Unanswered, row: BatchRow, *, wall: Seconds) -> Accept | Doubtful | Again:
    """Judge a row's outcome. `wall`: seconds since the epoch, for a Retry-After that is a date."""
    if isinstance(outcome, Unanswered):
        if outcome.strayed:
            return Again(outcome.why, Fault.WORKER, at_once=True)
        return Again(outcome.why, at_once=not outcome.hung, lost=not outcome.hung)
    status = outcome.status
    if 200 <= status < 300:
        return _judge_body(outcome, row)
    if status in _RETRIED or status >= 500:
        fault = Fault.POOL if status == _BUSY else Fault.UNKNOWN
        return Again(
            f"answered with status {status}", fault, False, _asked(outcome.retry_after, wall), lost=status >= 500
        )
    if status in _WORKERS_FAULT:
        return Again(f"answered with status {status}: it requires a key, see --api-key-file", Fault.WORKER)
    if status < 400:
        text = f"answered with status {status}, a redirect: give the address of its target"
        return Again(text, Fault.WORKER)
    return Doubtful(f"refuses rows with status {status}{_reason(outcome.body)}")


def _judge_body(outcome: Answered, row: BatchRow) -> Accept | Doubtful | Again:
    """Read what an answer of status 200 says."""
    answer = read_answer(outcome.body)
    talks, embeds = row.page.endswith(_TALKS), row.page.endswith(_EMBEDS)
    if answer is None:
        if not talks and not embeds and outcome.body.lstrip()[:1] == b"[" and is_sound(outcome.body):
            return Accept(Answer())  # rerankers and classifiers answer with a list alone
        why = f"answered {_what(outcome)} instead of JSON, with status {outcome.status}"
        return Again(why, Fault.WORKER, at_once=True)
    if (wrong := said_wrong(outcome.body)) is not None:
        if 400 <= wrong[0] < 500 and wrong[0] not in _RETRIED | _WORKERS_FAULT:
            return Doubtful(f"refuses rows within an answer of status 200: {wrong[1]}")
        return Again("answered with an error within an answer of status 200")
    if embeds:
        return _judge_embeddings(answer, row)
    if not talks:
        if row.page.endswith(_RESPONDS) and answer.status in ("failed", *_BROKEN_OFF):
            return Again("gave up its answer itself, by its status")
        return Accept(answer)
    if not answer.choices:
        return Again("answered without choices", Fault.WORKER)
    if (count := _distinct([each.index for each in answer.choices])) < row.answers:
        text = f"answered with {count} of {row.answers} choices that were asked for"
        return Again(text, Fault.WORKER)
    if any(each.error or (each.finish_reason or "").lower() in _BROKEN_OFF for each in answer.choices):
        return Again("gave up its answer itself, by its finish reason")
    if not any(each.says_something for each in answer.choices):
        return Doubtful("sends an empty answer", answer)
    return Accept(answer)


def _judge_embeddings(answer: Answer, row: BatchRow) -> Accept | Again:
    found = answer.data if isinstance(answer.data, list) else []
    if not found or not all(isinstance(each, dict) and _is_embedding(each.get("embedding")) for each in found):
        return Again("answered without an embedding", Fault.WORKER)
    if (count := _distinct([each.get("index") for each in found])) < row.answers:
        text = f"answered with {count} of {row.answers} embeddings that were asked for"
        return Again(text, Fault.WORKER)
    return Accept(answer)


def _is_embedding(found: Any) -> bool:
    """True if it has something, and in a list no null, which stands for what is no number."""
    return bool(found) and not (isinstance(found, list) and None in found)


def _distinct(indexes: Sequence[Any]) -> int:
    """Number of different answers, by their places; servers that do not count give all the same one, or none."""
    known = [each for each in indexes if isinstance(each, int)]
    places = len(set(known))
    return places if places > 1 and len(known) == len(indexes) else len(indexes)


def _reason(body: bytes) -> str:
    wrong = said_wrong(body)
    return f": {wrong[1]}" if wrong is not None and wrong[1] else ""


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
    except (ValueError, TypeError, OverflowError):
        return 0.0
