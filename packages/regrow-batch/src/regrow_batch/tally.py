"""Counts of a batch so far, in bounded memory for a batch of any length. Pure."""

from collections import Counter
from dataclasses import dataclass, field

from regrow.core.ids import Instant, Seconds
from regrow_batch.answers import Tokens

MOST_BUCKETS = 600
MOST_REASONS = 100
RECENT_S: Seconds = 20.0


@dataclass
class Tally:
    """Counts of one run of the head.

    Attributes:
        rows: results that the batch will have.
        before: results of earlier runs.
        began: start of this run.
        done: results of this run.
        errors: error rows, of earlier runs too.
        tokens: of this run.
        retries: repeated attempts, by reason.
        degenerate: answers that loop, of earlier runs too; `ended`: the number that this run ended early.
        finished: choices of answers in this run by their finish reason.
    """

    rows: int
    before: int = 0
    began: Instant = 0.0
    done: int = 0
    errors: int = 0
    tokens: Tokens = field(default_factory=Tokens)
    retries: Counter[str] = field(default_factory=Counter)
    degenerate: int = 0
    ended: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    width: Seconds = 1.0
    buckets: list[int] = field(default_factory=list)
    """Results in each interval of `width` seconds since the start."""
    workers: list[int] = field(default_factory=list)
    """Number of serving workers at the end of each interval."""

    def result(self, now: Instant, *, tokens: Tokens | None = None, error: bool = False) -> None:
        """Count a row's result."""
        self.done += 1
        self.errors += error
        if tokens is not None:
            self.tokens.add(tokens)
        self._grow(now)
        self.buckets[-1] += 1

    def retried(self, why: str) -> None:
        """Count a row that is sent again. `why`: phrased to follow the worker's name."""
        self.retries[why if why in self.retries or len(self.retries) < MOST_REASONS else "failed otherwise"] += 1

    def serving(self, now: Instant, workers: int) -> None:
        """Note the number of serving workers."""
        self._grow(now)
        self.workers[-1] = workers

    def _grow(self, now: Instant) -> None:
        wanted = int((now - self.began) / self.width)
        while wanted >= MOST_BUCKETS:
            pairs = range(0, len(self.buckets), 2)
            self.buckets = [sum(self.buckets[at : at + 2]) for at in pairs]
            self.workers = [max(self.workers[at : at + 2]) for at in pairs]
            self.width *= 2
            wanted = int((now - self.began) / self.width)
        while len(self.buckets) <= wanted:
            self.buckets.append(0)
            self.workers.append(self.workers[-1] if self.workers else 0)

    @property
    def left(self) -> int:
        """Rows without a result."""
        return self.rows - self.before - self.done

    def rate(self, now: Instant) -> float:
        """Rows a second over the last intervals."""
        seen = now - self.began
        if seen <= 0:
            return 0.0
        whole = max(1, int(RECENT_S / self.width))
        last = self.buckets[-whole:]
        start = (len(self.buckets) - len(last)) * self.width
        return sum(last) / max(seen - start, 1e-3)

    def remaining(self, now: Instant) -> Seconds | None:
        """Time until the end at the present rate, never 0 while rows wait; None: not known."""
        rate = self.rate(now)
        if not self.left:
            return 0.0
        return max(1.0, self.left / rate) if rate else None
