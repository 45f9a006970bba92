"""Shows a running batch: a table that is redrawn in place on a terminal, lines elsewhere."""

import time
from collections.abc import Callable
from math import ceil
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from regrow.core.ids import Instant, Seconds
from regrow_batch.pool import Pool
from regrow_batch.tally import Tally

EVERY_S: Seconds = 5.0
LIVE_S: Seconds = 0.5
MOST_WORKERS = 16


def span(seconds: Seconds | None) -> str:
    """A duration as text: `1:02:03`, `42 s`; `?` if it is not known."""
    if seconds is None:
        return "?"
    whole = ceil(seconds)  # rounded up, as "0 s" would mean that nothing is left
    if whole < 120:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}"


def headline(tally: Tally, now: Instant) -> str:
    """The progress as one line."""
    seen = max(now - tally.began, 1e-3)
    done = tally.before + tally.done
    parts = [
        f"{done:,} of {tally.rows:,} rows",
        f"{tally.rate(now):,.0f} rows/s",
        f"{(tally.tokens.answer or tally.tokens.prompt) / seen:,.0f} tokens/s",
        f"{span(tally.remaining(now))} left",
        f"{tally.retries.total():,} retries",
    ]
    if tally.errors:
        parts.append(f"{tally.errors:,} error rows")
    if tally.degenerate:
        parts.append(f"{tally.degenerate:,} degenerate")
    return ", ".join(parts)


class BatchProgress:
    """Shows a batch and its messages.

    Args:
        console: the output.
        pool: the workers.
        tally: counts of the batch.
        quiet: show only messages.
        clock: the monotonic clock.
    """

    def __init__(
        self,
        console: Console,
        pool: Pool,
        tally: Tally,
        *,
        quiet: bool = False,
        clock: Callable[[], Instant] = time.monotonic,
    ) -> None:
        self._console, self._pool, self._tally, self._clock = console, pool, tally, clock
        self._quiet = quiet
        self._done_before: dict[str, int] = {}
        self._rates: dict[str, float] = {}
        self._rated = self._shown_at = clock()
        shown = console.is_terminal and not quiet
        self._live = Live(console=console, auto_refresh=False, transient=True) if shown else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, sentence: str) -> None:
        """Print a sentence."""
        self._console.print(escape(sentence), highlight=False, soft_wrap=True)

    def show(self) -> None:
        """Update the table, or print a line if one is due. Called every `LIVE_S`."""
        now = self._clock()
        if self._live is not None:
            self._live.update(self._table(now), refresh=True)
        elif not self._quiet and now - self._shown_at >= EVERY_S:
            self._shown_at = now
            serving, all_ = self._pool.serving, len(self._pool.workers)
            self.say(f"{headline(self._tally, now)}; {serving} of {all_} workers serve{self._slowest(now)}")

    def _slowest(self, now: Instant) -> str:
        self._rate(now)
        rates = sorted((rate, url) for url, rate in self._rates.items() if url in self._pool.workers)
        if len(rates) < 2:
            return ""
        (low, slow), (high, fast) = rates[0], rates[-1]
        return f", from {low:,.1f} rows/s ({slow}) to {high:,.1f} ({fast})"

    def _rate(self, now: Instant) -> None:
        """Update each worker's smoothed rate, in rows a second."""
        seen = now - self._rated
        if seen < LIVE_S:
            return
        self._rated = now
        for url, worker in self._pool.workers.items():
            rate = (worker.done - self._done_before.get(url, 0)) / seen
            known = self._rates.get(url, rate)
            self._rates[url] = known + (rate - known) * min(1.0, seen / EVERY_S)
            self._done_before[url] = worker.done

    def _table(self, now: Instant) -> RenderableType:
        self._rate(now)
        table = Table(box=None, pad_edge=False)
        for name in ("worker", "", "rows/s", "under way", "done", "retried"):
            table.add_column(name, justify="left" if name in ("worker", "") else "right")
        workers = sorted(self._pool.workers.values(), key=lambda each: each.url)
        for worker in workers[:MOST_WORKERS]:
            rate = self._rates.get(worker.url, 0.0)
            state = str(worker.standing)
            counts = (f"{rate:,.1f}", f"{worker.rows}/{worker.limit}", f"{worker.done:,}", f"{worker.retried:,}")
            table.add_row(escape(worker.url), state, *counts)
        if len(workers) > MOST_WORKERS:
            table.add_row(f"and {len(workers) - MOST_WORKERS} more")
        done = self._tally.before + self._tally.done
        bar = ProgressBar(total=max(self._tally.rows, 1), completed=done, width=60)
        return Group(Text(headline(self._tally, now)), bar, table)
