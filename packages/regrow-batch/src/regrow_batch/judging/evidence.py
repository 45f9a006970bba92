"""Evidence on workers: the kinds of rows that each answers or refuses, and the row at fault. Pure.

A refusal is the row's fault if a sound worker gives it: one that has answered another row of that kind since. A worker
that refuses rows which others take is at fault itself, and gets no more rows of that kind but one now and then.
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
"""Most workers that are asked about a row that is refused; those that can take the longest rows first."""
MOST_DEATHS = 2
"""Ends of engines after which their row goes on alone, when all others are done."""
_UNPROVEN_REFUSALS, _PROVEN_REFUSALS = 3, 8
"""In a row, of one kind: then a worker is in doubt itself."""
_FIRST_WAIT: Seconds = 0.5
_LONGEST_WAIT: Seconds = 30.0


@dataclass(slots=True, eq=False)
class Opinion:
    """A worker's word against a row.

    Attributes:
        worker: whose.
        why: follows its name in a sentence.
        outcome: a refusal, or an answer that says nothing.
        empty: the latter as it was read.
        at: when.
        worthless: the worker refuses what others take, or cannot be asked any more.
        tries: how often it could not be found out what the word is worth.
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
    """A row in hand.

    Attributes:
        row: which.
        size: bytes of it as it was read.
        attempt, busy: attempts that count, and those that do not.
        avoid: who was last not able to answer it; `failed`: all who were not, as long as there are others.
        opinions: against it, a worker each.
        deaths: ends of engines that it has met.
        alone: it goes on with no row beside it.
        asks_all: workers that do not fit are asked about it too: nobody else is left.
        copies: how many attempts are under way and not judged yet.
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
        """True if the row itself may be the cause of engines' ends."""
        return self.deaths >= MOST_DEATHS

    @property
    def avoided(self) -> set[str]:
        """Workers that get it only if no other takes rows; of one that is in doubt all are asked but the last."""
        return {self.avoid} - {""} if self.opinions else self.failed

    @property
    def met(self) -> set[str]:
        """Workers that need not be asked about it again."""
        met = {opinion.worker for opinion in self.opinions}
        return met | {self.avoid} if met and self.avoid else met

    def doubt(self, opinion: Opinion) -> None:
        """Take in a worker's word against it, instead of what it said before."""
        self.opinions = [each for each in self.opinions if each.worker != opinion.worker] + [opinion]


@dataclass(slots=True)
class _Record:
    """Of a worker with a kind of rows: how many it has answered, refused in a row, and when it is tried again."""

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
        """Models that any has ever said it has."""
        self._aliases: set[tuple[str, str]] = set()
        """Workers with the names of models as which they answer, though they are asked for others that they have."""

    def _record(self, url: str, kind: Kind) -> _Record:
        found = self._records.get((url, kind))
        if found is None:
            listed = self._models.get(url, frozenset[str]())
            found = self._records[url, kind] = _Record(unlisted=bool(listed and kind[1] and kind[1] not in listed))
        return found

    def serves(self, url: str, models: Collection[str]) -> None:
        """A worker says which models it has, after it has come or come back; nothing it has shown before counts."""
        self._models[url] = frozenset(models)
        self._listed |= self._models[url]
        for each in [key for key in self._records if key[0] == url]:
            del self._records[each]

    def lists(self, model: str, url: str = "") -> bool:
        """True if a worker says that it has this model, or, without one, if any has said so that ever was here."""
        return model in (self._models.get(url, ()) if url else self._listed)

    def may_be_another_now(self, url: str, row: BatchRow, answer: Answer) -> bool:
        """True if a worker that says it has the row's model answers as one, maybe since it was started again."""
        return (
            answer.model not in ("", row.model)
            and self.lists(row.model, url)
            and (url, answer.model) not in self._aliases
        )

    def says_again(self, url: str, models: Collection[str], name: str) -> None:
        """A worker has said once more which models it has, since it has answered as one of that name."""
        if models != self._models.get(url):
            self.serves(url, models)
            self._aliases = {each for each in self._aliases if each[0] != url}
        self._aliases.add((url, name))

    def is_of_another_model(self, url: str, row: BatchRow, answer: Answer) -> bool:
        """True if a worker that does not have the row's model, while another one has or had it, answers as another."""
        return answer.model not in ("", row.model) and not self.lists(row.model, url) and self.lists(row.model)

    def answered(self, url: str, row: BatchRow) -> None:
        """A worker has answered a row with something; the cheapest of a kind is kept, to try others with."""
        record = self._record(url, row.kind)
        record.answered += 1
        record.refused, record.wait = 0, _FIRST_WAIT
        known = self._controls.get(row.kind)
        if known is None or row.tokens < known.tokens:
            self._controls[row.kind] = row.whole

    def refused(self, url: str, kind: Kind, why: str, now: Instant) -> None:
        """A worker has refused a row of that kind, or said nothing to it."""
        record = self._record(url, kind)
        record.refused += 1
        record.why = why
        if self._is_unfit(record):
            record.try_at = max(record.try_at, now + record.wait)

    def convicted(self, url: str, kind: Kind, now: Instant) -> None:
        """A worker has refused what another has answered."""
        record = self._record(url, kind)
        if not record.answered:  # one that answers others may take shorter rows only, and is of use with these
            record.refused = max(record.refused, _UNPROVEN_REFUSALS)
            record.try_at = now + record.wait

    def unproven(self, url: str, kind: Kind, now: Instant) -> None:
        """A worker has refused a row that was answered before: nothing that it has answered counts any more."""
        self._record(url, kind).answered = 0
        self.convicted(url, kind, now)

    def is_doubted(self, url: str, kind: Kind) -> bool:
        """True if a worker that has answered such rows has since refused enough in a row that it is to be tried."""
        return self._record(url, kind).refused >= _PROVEN_REFUSALS

    def control(self, kind: Kind) -> BatchRow | None:
        """A row of that kind that was answered; None: none was, by anybody."""
        return self._controls.get(kind)

    @staticmethod
    def _is_unfit(record: _Record) -> bool:
        if record.unlisted and not record.answered:
            return True
        return record.refused >= (_PROVEN_REFUSALS if record.answered else _UNPROVEN_REFUSALS)

    def fits(self, url: str, kind: Kind) -> bool:
        """True if a worker is given rows of that kind as they come."""
        return not self._is_unfit(self._record(url, kind))

    def may_have(self, hand: Hand, url: str) -> bool:
        """True if a worker is given this row."""
        return hand.asks_all or self.fits(url, hand.row.kind)

    def may_try(self, url: str, kind: Kind, now: Instant) -> bool:
        """True if a worker that does not fit may be tried with one row now; True is said once for each wait."""
        record = self._record(url, kind)
        if now < record.try_at:
            return False
        record.try_at = now + record.wait
        record.wait = min(2 * record.wait, _LONGEST_WAIT)
        return True

    def next_try(self, urls: Collection[str]) -> Instant:
        """When a worker that does not fit is to be tried again."""
        waits = (each.try_at for (url, _), each in self._records.items() if url in urls and self._is_unfit(each))
        return min(waits, default=float("inf"))

    def complaints(self, urls: Collection[str]) -> Iterator[str]:
        """Workers that get no rows of some kind, and the reasons."""
        for (url, (page, model)), record in self._records.items():
            if url in urls and self._is_unfit(record):
                why = record.why or f"does not list the model {model!r} ({', '.join(sorted(self._models[url])[:4])})"
                yield f"worker {url}, asked for {model or page}, {why}"
