"""Evidence on workers: the kinds of rows that each answers or refuses, and the side at fault. Pure.

A refusal is the row's fault if it comes from a sound worker: one that has answered another row of that kind since. A
worker that refuses rows which others answer is at fault itself, and is only tried with a row of that kind at times.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from regrow.core.ids import Instant, Seconds
from regrow_batch.answers import Answer
from regrow_batch.retries import Answered
from regrow_batch.rows import BatchRow

Kind = tuple[str, str]
"""The page and the model that rows ask for."""

MOST_OPINIONS = 4
"""Most workers that are asked about a refused row; those that accept the longest rows come first."""
MOST_DEATHS = 2
"""Engine deaths after which a row is held back and sent alone, when all others are done."""
_UNPROVEN_REFUSALS, _PROVEN_REFUSALS = 3, 8
"""Refusals in a row, of one kind, after which a worker is itself in doubt."""
_FIRST_WAIT: Seconds = 0.5
_LONGEST_WAIT: Seconds = 30.0


@dataclass(slots=True, eq=False)
class Opinion:
    """A worker's refusal of a row, or its empty answer.

    Attributes:
        worker: its address.
        why: phrased to follow the worker's name.
        outcome: a refusal, or an answer without content.
        empty: the answer without content, decoded.
        at: time of the outcome.
        worthless: the worker refuses rows that others answer, or can no longer be asked.
        tries: controls that failed to show whether the opinion counts.
    """

    worker: str
    why: str
    outcome: Answered
    empty: Answer | None = None
    at: Instant = 0.0
    worthless: bool = False
    tries: int = 0


@dataclass(slots=True, eq=False)
class Hand:
    """A row in hand, with its history.

    Attributes:
        row: the row.
        size: its bytes in the input.
        attempt, busy: attempts that count, and attempts that do not.
        avoid: the worker that failed it last; `failed`: all that failed it, while there are others.
        opinions: against the row, one a worker.
        deaths: engines that died while they had it.
        alone: it must have no row beside it.
        asks_all: workers that do not fit are asked too, since no other is left.
        copies: number of attempts under way and not judged yet.
        done: it has its result.
    """

    row: BatchRow
    size: int = 0
    attempt: int = 0
    avoid: str = ""
    failed: set[str] = field(default_factory=set)
    busy: int = 0
    opinions: list[Opinion] = field(default_factory=list)
    deaths: int = 0
    alone: bool = False
    asks_all: bool = False
    copies: int = 0
    done: bool = False

    @property
    def suspected(self) -> bool:
        """True if the row itself may have killed engines."""
        return self.deaths >= MOST_DEATHS

    @property
    def avoided(self) -> set[str]:
        """Workers that get the row only if no other takes rows; of a row in doubt only the last one."""
        return {self.avoid} - {""} if self.opinions else self.failed

    @property
    def met(self) -> set[str]:
        """Workers that need not be asked about the row again."""
        met = {opinion.worker for opinion in self.opinions}
        return met | {self.avoid} if met and self.avoid else met

    def doubt(self, opinion: Opinion) -> None:
        """Add a worker's opinion, in place of its earlier one."""
        self.opinions = [each for each in self.opinions if each.worker != opinion.worker] + [opinion]


@dataclass(slots=True)
class _Record:
    """A worker's answers and refusals in a row for one kind of rows, and the time of its next trial."""

    answered: int = 0
    refused: int = 0
    why: str = ""
    unlisted: bool = False
    try_at: Instant = 0.0
    wait: Seconds = _FIRST_WAIT


class WorkerEvidence:
    """Evidence on all workers of a job."""

    def __init__(self) -> None:
        self._records: dict[tuple[str, Kind], _Record] = {}
        self._controls: dict[Kind, BatchRow] = {}
        self._models: dict[str, frozenset[str]] = {}
        self._listed: set[str] = set()
        """Models that any worker has ever listed."""
        self._aliases: set[tuple[str, str]] = set()
        """Workers with the model names that they answer with, although asked for another model that they list."""

    def _record(self, url: str, kind: Kind) -> _Record:
        found = self._records.get((url, kind))
        if found is None:
            listed = self._models.get(url, frozenset[str]())
            found = self._records[url, kind] = _Record(unlisted=bool(listed and kind[1] and kind[1] not in listed))
        return found

    def serves(self, url: str, models: Collection[str]) -> None:
        """Store the models that a worker lists after it joined or came back; its earlier evidence is dropped."""
        self._models[url] = frozenset(models)
        self._listed |= self._models[url]
        for each in [key for key in self._records if key[0] == url]:
            del self._records[each]

    def lists(self, model: str, url: str = "") -> bool:
        """True if the worker lists this model; without a worker, if any past or present worker has listed it."""
        return model in (self._models.get(url, ()) if url else self._listed)

    def may_be_another_now(self, url: str, row: BatchRow, answer: Answer) -> bool:
        """True if a worker that lists the row's model answers as another: it may have restarted with other models."""
        return (
            answer.model not in ("", row.model)
            and self.lists(row.model, url)
            and (url, answer.model) not in self._aliases
        )

    def says_again(self, url: str, models: Collection[str], name: str) -> None:
        """Store the models that a worker lists after it answered under this name."""
        if models != self._models.get(url):
            self.serves(url, models)
            self._aliases = {each for each in self._aliases if each[0] != url}
        self._aliases.add((url, name))

    def is_of_another_model(self, url: str, row: BatchRow, answer: Answer) -> bool:
        """True if a worker answers as another model and does not list the row's, which some worker has listed."""
        return answer.model not in ("", row.model) and not self.lists(row.model, url) and self.lists(row.model)

    def answered(self, url: str, row: BatchRow) -> None:
        """Record an answer with content. The cheapest answered row of each kind is kept as a control."""
        record = self._record(url, row.kind)
        record.answered += 1
        record.refused, record.wait = 0, _FIRST_WAIT
        known = self._controls.get(row.kind)
        if known is None or row.tokens < known.tokens:
            self._controls[row.kind] = row.whole

    def refused(self, url: str, kind: Kind, why: str, now: Instant) -> None:
        """Record that a worker has refused a row of that kind, or answered it without content."""
        record = self._record(url, kind)
        record.refused += 1
        record.why = why
        if self._is_unfit(record):
            record.try_at = max(record.try_at, now + record.wait)

    def convicted(self, url: str, kind: Kind, now: Instant) -> None:
        """Record that a worker has refused a row that another worker has answered."""
        record = self._record(url, kind)
        if not record.answered:  # a worker that answers others may only accept shorter rows, and is of use for these
            record.refused = max(record.refused, _UNPROVEN_REFUSALS)
            record.try_at = now + record.wait

    def unproven(self, url: str, kind: Kind, now: Instant) -> None:
        """Record that a worker has refused a control: its own earlier answers no longer count."""
        self._record(url, kind).answered = 0
        self.convicted(url, kind, now)

    def is_doubted(self, url: str, kind: Kind) -> bool:
        """True if refusals in a row by a worker that answered others reach the limit: a control must test it."""
        return self._record(url, kind).refused >= _PROVEN_REFUSALS

    def control(self, kind: Kind) -> BatchRow | None:
        """A row of that kind that was answered; None: no worker has answered one."""
        return self._controls.get(kind)

    @staticmethod
    def _is_unfit(record: _Record) -> bool:
        if record.unlisted and not record.answered:
            return True
        return record.refused >= (_PROVEN_REFUSALS if record.answered else _UNPROVEN_REFUSALS)

    def fits(self, url: str, kind: Kind) -> bool:
        """True if a worker gets rows of that kind without restriction."""
        return not self._is_unfit(self._record(url, kind))

    def may_have(self, hand: Hand, url: str) -> bool:
        """True if a worker may get this row."""
        return hand.asks_all or self.fits(url, hand.row.kind)

    def may_try(self, url: str, kind: Kind, now: Instant) -> bool:
        """True if a worker that does not fit may be tried with one row now. Starts the wait before the next trial."""
        record = self._record(url, kind)
        if now < record.try_at:
            return False
        record.try_at = now + record.wait
        record.wait = min(2 * record.wait, _LONGEST_WAIT)
        return True

    def next_try(self, urls: Collection[str]) -> Instant:
        """Time of the next trial of a worker that does not fit."""
        waits = (each.try_at for (url, _), each in self._records.items() if url in urls and self._is_unfit(each))
        return min(waits, default=float("inf"))

    def complaints(self, urls: Collection[str]) -> Iterator[str]:
        """One sentence for each worker that gets no rows of some kind, with the reason."""
        for (url, (page, model)), record in self._records.items():
            if url in urls and self._is_unfit(record):
                why = record.why or f"does not list the model {model!r} ({', '.join(sorted(self._models[url])[:4])})"
                yield f"worker {url}, asked for {model or page}, {why}"
