"""Pool of workers: their states, and the choice of the worker that gets the next row. Pure.

A worker joins, is probed until it answers, and serves. After several failures in a row it counts as broken: it is
probed after a wait that doubles each time, and then tried with one row. A worker that is asked to leave gets no more
rows and may finish those it has.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b

from regrow.core.ids import Instant, Seconds
from regrow_batch.answers import Tokens

NEVER: Instant = float("inf")
MOST_DEPARTED = 1000
MOST_HOMES = 10_000
_ANY_LENGTH = 1 << 60


class Standing(StrEnum):
    """State of a worker in the pool."""

    JOINING = "joining"
    SERVING = "serving"
    TRIED = "tried"
    BROKEN = "broken"
    LEAVING = "leaving"


_TAKES_ROWS = (Standing.SERVING, Standing.TRIED)


@dataclass(frozen=True)
class PoolPolicy:
    """Limits and waits of a pool.

    Attributes:
        cap: most rows that a worker has at once, unless its own entry sets another cap.
        failures: number in a row after which a worker is broken.
        first_wait: before a broken worker is probed; doubled each time it breaks again.
        longest_wait: upper bound of that wait.
        joining_wait: between two probes of a worker that has not answered yet.
        slack_tokens: a prefix's preferred worker may have this many more tokens outstanding than the least loaded one.
    """

    cap: int = 32
    failures: int = 5
    first_wait: Seconds = 0.5
    longest_wait: Seconds = 30.0
    joining_wait: Seconds = 0.5
    slack_tokens: int = 8192


@dataclass
class PoolWorker:
    """A worker as the pool sees it.

    Attributes:
        url: its base address.
        cap: most rows at once.
        limit: most rows at once at present: lowered while the worker answers that it is busy.
        rows, tokens: outstanding.
        failures: in a row.
        breaks: number of times in a row that it was found broken.
        probe_at: when it is to be probed.
        leave_by: when it must have left.
        because: its last failure, phrased to follow the worker's name.
        done, retried: rows that have a result from it, and rows that it failed to answer.
        spent: tokens of the rows done.
        context: the longest row that it accepts, in tokens; 0: not known.
        version: of its server; empty: not known.
        asked: it was asked for its models, whatever it answered.
        alone: it has one row that must not have others beside it.
        stalled: it answers nothing while others do, so it gets no rows, even if its health check succeeds.
        answered_at: time of its last answer, or when it got its first row.
    """

    url: str
    cap: int
    limit: int
    standing: Standing = Standing.JOINING
    rows: int = 0
    tokens: int = 0
    failures: int = 0
    breaks: int = 0
    calm: int = 0
    probe_at: Instant = 0.0
    leave_by: Instant = NEVER
    because: str = "has not answered yet"
    done: int = 0
    retried: int = 0
    spent: Tokens = field(default_factory=Tokens)
    context: int = 0
    version: str = ""
    asked: bool = False
    alone: bool = False
    stalled: bool = False
    answered_at: Instant = 0.0

    @property
    def takes_rows(self) -> bool:
        """True if it may get rows, with room now or later."""
        return self.standing in _TAKES_ROWS and not self.stalled

    @property
    def has_room(self) -> bool:
        """True if it may get a row."""
        most = 1 if self.standing is Standing.TRIED else self.limit
        return self.takes_rows and not self.alone and self.rows < most


class Pool:
    """The workers of a job.

    Args:
        policy: limits and waits.
    """

    def __init__(self, policy: PoolPolicy) -> None:
        self._policy = policy
        self.workers: dict[str, PoolWorker] = {}
        self._departed: dict[str, PoolWorker] = {}
        self._homes: dict[bytes, str] = {}

    # --- membership ---

    def join(self, url: str, now: Instant, *, cap: int = 0) -> None:
        """Add a worker, or take one back. `cap`: most rows at once; 0: the policy's."""
        cap = cap or self._policy.cap
        known = self.workers.get(url)
        if known is None:
            self.workers[url] = PoolWorker(url, cap, cap, probe_at=now)
            return
        known.limit = min(known.limit, cap) if cap <= known.cap else cap
        known.cap = cap
        if known.standing is Standing.LEAVING:
            known.leave_by, known.probe_at = NEVER, now
            self._now_stands(known, Standing.JOINING)

    def drain(self, url: str, now: Instant, *, grace: Seconds) -> bool:
        """Ask a worker to leave: it gets no more rows, and must end after `grace`. False: it is not in the pool."""
        worker = self.workers.get(url)
        if worker is None:
            return False
        if worker.standing is not Standing.LEAVING or now + grace < worker.leave_by:
            worker.leave_by = now + grace
        worker.probe_at = NEVER
        self._now_stands(worker, Standing.LEAVING)
        self._let_go(worker)
        return True

    def overdue(self, now: Instant) -> list[str]:
        """Workers past their deadline to leave whose rows must be taken back. Each is named once."""
        late = [worker for worker in self.workers.values() if worker.leave_by <= now]
        for worker in late:
            worker.leave_by = NEVER
        return [worker.url for worker in late]

    def _let_go(self, worker: PoolWorker) -> None:
        if worker.standing is Standing.LEAVING and not worker.rows:
            del self.workers[worker.url]
            if worker.done or worker.retried:
                self._remember(worker)

    def _remember(self, worker: PoolWorker) -> None:
        """Keep the totals of a worker that has left; only the last ones of very many."""
        before = self._departed.pop(worker.url, None)
        if before is not None:
            worker.done += before.done
            worker.spent.add(before.spent)
            worker.retried += before.retried
        self._departed[worker.url] = worker
        if len(self._departed) > MOST_DEPARTED:
            del self._departed[next(iter(self._departed))]

    @property
    def departed(self) -> list[PoolWorker]:
        """Workers that have left, with their totals."""
        return list(self._departed.values())

    # --- assignment ---

    def assign(
        self,
        tokens: int,
        *,
        prefix: bytes = b"",
        avoid: Collection[str] = (),
        never: Collection[str] = (),
        fits: Callable[[str], bool] = lambda _: True,
        alone: bool = False,
    ) -> str | None:
        """Assign a row to a worker, and return its URL; None: no worker has room.

        Args:
            tokens: estimated cost of the row.
            prefix: rows with the same prefix go to the same worker where its load allows.
            avoid: workers that failed to answer this row; they get it again only if no other takes rows at all.
            never: workers that refused this row; of the others, those that accept longer rows come first.
            fits: true for a worker that may get this row.
            alone: the worker must have no other row.
        """
        takers = [each for each in self.workers.values() if each.has_room and each.url not in never and fits(each.url)]
        if alone:
            takers = [worker for worker in takers if not worker.rows]
        if avoid and self._has_other(avoid, fits):
            takers = [worker for worker in takers if worker.url not in avoid]
        if not takers:
            return None
        if never:
            longest = max(worker.context or _ANY_LENGTH for worker in takers)
            takers = [worker for worker in takers if (worker.context or _ANY_LENGTH) == longest]
        chosen = min(takers, key=lambda worker: (worker.tokens, worker.rows))
        if prefix and not never:
            preferred = self.workers.get(self.home(prefix))
            if preferred in takers and preferred.tokens <= chosen.tokens + self._policy.slack_tokens:
                chosen = preferred
        chosen.rows += 1
        chosen.tokens += tokens
        chosen.alone = alone
        return chosen.url

    def takers(self, *, never: Collection[str] = (), fits: Callable[[str], bool] = lambda _: True) -> list[str]:
        """Workers that take rows, with room or without."""
        return [url for url, each in self.workers.items() if each.takes_rows and url not in never and fits(url)]

    def home(self, prefix: bytes) -> str:
        """The worker that rows with this prefix prefer, among those that take rows; empty: none takes any."""
        found = self._homes.get(prefix)
        if found is None:
            takers = self.takers()
            found = max(takers, key=lambda url: _weight(prefix, url), default="")
            if len(self._homes) >= MOST_HOMES:
                self._homes.clear()
            self._homes[prefix] = found
        return found

    def suits(self, prefix: bytes) -> bool:
        """True if the preferred worker has room; always true for an empty prefix."""
        if not prefix:
            return True
        home = self.workers.get(self.home(prefix))
        return home is not None and home.has_room

    def _now_stands(self, worker: PoolWorker, standing: Standing) -> None:
        worker.standing = standing
        self._homes.clear()

    def _has_other(self, urls: Collection[str], fits: Callable[[str], bool]) -> bool:
        others = (each for each in self.workers.values() if each.url not in urls and not each.stalled)
        return any(each.standing is Standing.SERVING and fits(each.url) for each in others)

    @property
    def any_room(self) -> bool:
        """True if any worker has room."""
        return any(worker.has_room for worker in self.workers.values())

    @property
    def all_asked(self) -> bool:
        """True once each worker was asked for its models: only then is one tried that does not list a row's model."""
        return all(worker.asked for worker in self.workers.values())

    def release(self, url: str, tokens: int) -> None:
        """Release an assigned row, whatever became of it. Call after `succeeded`, `failed` and the like."""
        worker = self.workers.get(url)
        if worker is not None:
            worker.rows -= 1
            worker.tokens -= tokens
            worker.alone = worker.alone and worker.rows > 0
            self._let_go(worker)

    @property
    def room(self) -> int:
        """Number of rows that all serving workers together may have at once."""
        return sum(worker.limit for worker in self.workers.values() if worker.takes_rows)

    @property
    def serving(self) -> int:
        """Number of workers that take rows."""
        return sum(worker.takes_rows for worker in self.workers.values())

    # --- outcomes ---

    def succeeded(self, url: str, tokens: Tokens) -> None:
        """Record that a worker has settled a row, by an answer or by a refusal that counts."""
        worker = self.workers.get(url)
        if worker is None:
            return
        self.spoke(url)
        worker.done += 1
        worker.spent.add(tokens)
        worker.calm += 1
        if worker.limit < worker.cap and worker.calm >= worker.limit:
            worker.limit, worker.calm = worker.limit + 1, 0

    def spoke(self, url: str) -> None:
        """Record that a worker has sent an answer of any kind: its engine lives."""
        worker = self.workers.get(url)
        if worker is None:
            return
        worker.failures = worker.breaks = 0
        worker.stalled = False
        if worker.standing is Standing.TRIED:
            self._now_stands(worker, Standing.SERVING)

    def refused(self, url: str) -> None:
        """Record a refusal that decides nothing yet."""
        worker = self.workers.get(url)
        if worker is not None:
            worker.retried += 1
            self.spoke(url)

    def stall(self, url: str, why: str) -> None:
        """Give a worker that answers nothing while others do no more rows until it answers one of those it has."""
        worker = self.workers.get(url)
        if worker is not None and not worker.stalled:
            worker.stalled, worker.because = True, why
            self._homes.clear()

    def end_stalls(self, now: Instant, jitter: float) -> None:
        """Mark stalled workers that have no rows left as broken: each is probed, and then tried with one row."""
        for worker in self.workers.values():
            if worker.stalled and not worker.rows:
                worker.stalled = False
                if worker.standing in _TAKES_ROWS:
                    self._break(worker, now, jitter)

    def busy(self, url: str, why: str, now: Instant, jitter: float) -> None:
        """Lower the limit of a worker that answered that it is overloaded by one row, for a while."""
        worker = self.workers.get(url)
        if worker is None:
            return
        worker.limit, worker.calm = max(1, min(worker.limit, worker.rows) - 1), 0
        if worker.standing is Standing.TRIED:
            self.failed(url, why, now, jitter)
        else:
            worker.retried += 1

    def failed(self, url: str, why: str, now: Instant, jitter: float, *, died: bool = False) -> None:
        """Record that a worker failed to answer a row. `jitter`: from 0 to 1. `died`: it answers no probe either."""
        worker = self.workers.get(url)
        if worker is None:
            return
        worker.retried += 1
        worker.because = why
        worker.failures += 1
        many = died or worker.failures >= self._policy.failures
        if worker.standing is Standing.TRIED or (worker.standing is Standing.SERVING and many):
            self._break(worker, now, jitter)

    def _break(self, worker: PoolWorker, now: Instant, jitter: float) -> None:
        wait = min(self._policy.longest_wait, self._policy.first_wait * 2.0 ** min(worker.breaks, 30))
        worker.breaks += 1
        self._now_stands(worker, Standing.BROKEN)
        worker.probe_at = now + wait * (0.5 + 0.5 * jitter)

    # --- probes ---

    def due_probes(self, now: Instant) -> list[str]:
        """Workers to probe now; each is named once until `probed` is called."""
        due = [worker for worker in self.workers.values() if worker.probe_at <= now]
        for worker in due:
            worker.probe_at = NEVER
        return [worker.url for worker in due]

    def probed(self, url: str, why: str, now: Instant, jitter: float, *, context: int = 0, version: str = "") -> None:
        """Record the result of a probe. `why`: the error, phrased to follow the worker's name; empty: none."""
        worker = self.workers.get(url)
        if worker is None:
            return
        worker.asked = True
        worker.context, worker.version = context or worker.context, version or worker.version
        if worker.standing not in (Standing.JOINING, Standing.BROKEN):
            return
        if not why:
            self._now_stands(worker, Standing.SERVING if worker.standing is Standing.JOINING else Standing.TRIED)
            worker.failures = 0
            return
        worker.because = why
        if worker.standing is Standing.BROKEN:
            self._break(worker, now, jitter)
        else:
            worker.probe_at = now + self._policy.joining_wait * (0.5 + 0.5 * jitter)

    def next_at(self) -> Instant:
        """Time when something is due: a probe, or the end of a grace period."""
        return min((min(each.probe_at, each.leave_by) for each in self.workers.values()), default=NEVER)

    def complaints(self) -> Iterator[str]:
        """One sentence for each worker that does not serve."""
        for worker in self.workers.values():
            if not worker.takes_rows:
                yield f"worker {worker.url} {worker.because}"


def _weight(prefix: bytes, url: str) -> bytes:
    """Rendezvous hashing: a worker that joins or leaves moves only its own prefixes."""
    return blake2b(url.encode() + b"\0" + prefix, digest_size=8).digest()
