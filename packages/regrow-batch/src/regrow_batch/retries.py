"""Side at fault for a row without an answer: the row, the worker, the pool, or unknown. Pure.

One answer alone rarely decides. A refusal is only a doubt here: `evidence` decides it.
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
"""The worker would answer every row so: it wants an API key, another key, or payment."""
_BROKEN_OFF = frozenset(
    {
        "abort",
        "aborted",
        "cancelled",  # TensorRT-LLM, as is `timeout`
        "canceled",
        "error",
        "insufficient_system_resource",  # DeepSeek
        "timeout",
    }
)
"""Finish reasons of answers that the server itself gave up, in lower case."""
_TALKS, _EMBEDS, _RESPONDS = "/completions", "/embeddings", "/responses"


class Fault(StrEnum):
    """Cause of a row's missing answer."""

    ROW = "row"
    WORKER = "worker"
    POOL = "pool"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Answered:
    """A complete HTTP answer. `retry_after`, `kind`: the headers Retry-After and Content-Type.

    `body`: without a byte order mark, and with U+FFFD in place of half a surrogate pair, as HTTP clients decode it.
    `ended_early`: the period of the loop for which a stream was ended; 0: it was not ended.
    """

    status: int
    body: bytes
    kind: str = ""
    retry_after: str = ""
    request_id: str = ""
    ended_early: int = 0

    def __post_init__(self) -> None:
        """Make the body readable for other JSON libraries and for programs that do not use this package."""
        object.__setattr__(self, "body", readable(self.body))


@dataclass(frozen=True, slots=True)
class Unanswered:
    """No complete answer arrived.

    Attributes:
        why: phrased to follow the worker's name.
        hung: a deadline ended the wait.
        strayed: the answer to another row arrived.
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
    """The worker refuses the row, or answers with nothing: either may be at fault. `answer`: the empty one."""

    why: str
    answer: Answer | None = None


@dataclass(frozen=True, slots=True)
class Again:
    """The row must be sent again.

    Attributes:
        why: phrased to follow the worker's name.
        fault: side at fault as far as this answer shows; a failed attempt by the pool's fault does not count.
        at_once: send without a wait, since another worker can take the row.
        asked: wait that the worker asks for.
        lost: the worker may have died with all its rows.
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
        attempts: their number; after the last one the row becomes an error row.
        base: the first wait, which doubles with each attempt.
        most: the longest wait, even if a worker asks for a longer one.
    """

    attempts: int = 8
    base: Seconds = 0.25
    most: Seconds = 30.0

    def wait(self, attempt: int, again: Again, jitter: float) -> Seconds:
        """Wait after a failed attempt.

        Args:
            attempt: its number, from 1.
            again: how it failed.
            jitter: random, from 0 to 1. Half of the wait is random, so that rows that failed together return apart.
        """
        if again.at_once and attempt == 1:
            return 0.0
        backoff = min(self.most, self.base * 2.0 ** min(attempt - 1, 30)) * (0.5 + 0.5 * jitter)
        return max(backoff, min(again.asked, self.most) * (1.0 + 0.1 * jitter))


def judge(outcome: Answered | Unanswered, row: BatchRow, *, wall: Seconds) -> Accept | Doubtful | Again:
    """Judge the outcome of an attempt. `wall`: seconds since the epoch, for a Retry-After that is a date."""
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
    """Judge the body of an answer of status 200."""
    answer = read_answer(outcome.body)
    talks, embeds = row.page.endswith(_TALKS), row.page.endswith(_EMBEDS)
    if answer is None:
        if not talks and not embeds and outcome.body.lstrip()[:1] == b"[" and is_sound(outcome.body):
            return Accept(Answer())  # rerankers and classifiers answer with a bare list
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
    """True if it has content, and, if a list, no null, which stands for NaN."""
    return bool(found) and not (isinstance(found, list) and None in found)


def _distinct(indexes: Sequence[Any]) -> int:
    """Number of different answers, by their indexes; servers that do not count give all the same index, or none."""
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
    """The header in seconds, or the seconds until its date; 0.0 if it is missing or invalid."""
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - wall)
    except (ValueError, TypeError, OverflowError):
        return 0.0
