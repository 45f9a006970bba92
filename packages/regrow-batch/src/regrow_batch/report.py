"""What a batch has been, at its end: sentences, a file for programs, a picture."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from regrow.core.errors import UsageError
from regrow.core.ids import Instant, Seconds
from regrow.core.process.extras import install_line
from regrow_batch.pool import PoolWorker
from regrow_batch.progress import span
from regrow_batch.rows import RowError, read_answer
from regrow_batch.tally import Tally

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINE, _GREY = "#1f4e79", "#6b7280"


class WorkerReport(msgspec.Struct):
    """What a worker has done in the last run of the head."""

    url: str
    rows: int
    tokens: int
    retried: int


class BatchReport(msgspec.Struct):
    """A batch that is done.

    `rows`, `error_rows`, `degenerate_rows`, `tokens` are of the whole output; the other figures of the head's last run.
    """

    output: str
    rows: int
    error_rows: int
    degenerate_rows: int
    ended_early: int
    tokens: int
    malformed_lines: int
    repeated_lines: int
    complaints: list[str]
    seconds: Seconds
    rows_this_run: int
    rows_per_s: float
    tokens_per_s: float
    retries: dict[str, int]
    workers: list[WorkerReport]
    bucket_s: Seconds
    buckets: list[int]
    serving: list[int]


class _Reply(msgspec.Struct):
    body: msgspec.Raw


class _Kept(msgspec.Struct):
    error: RowError | None = None
    degenerate: dict[str, str | int] | None = None
    response: _Reply | None = None


@dataclass
class OutputCount:
    """Adds up the rows of an output as they are written."""

    errors: int = 0
    degenerate: int = 0
    tokens: int = 0

    def take(self, result: bytes) -> None:
        """Count a row, which this package has written."""
        row = msgspec.json.decode(result, type=_Kept)
        self.errors += row.error is not None
        self.degenerate += row.degenerate is not None
        if row.error is None and row.response is not None:
            answer = read_answer(row.response.body)
            self.tokens += answer.tokens if answer is not None else 0


def workers_of(workers: Sequence[PoolWorker]) -> list[WorkerReport]:
    """What each has done, by name."""
    found = [WorkerReport(each.url, each.done, each.done_tokens, each.retried) for each in workers]
    return sorted(found, key=lambda worker: worker.url)


def this_run(tally: Tally, now: Instant) -> tuple[Seconds, float, float]:
    """Seconds, rows a second, tokens a second."""
    seconds = max(now - tally.began, 1e-3)
    return seconds, tally.done / seconds, tally.tokens / seconds


def sentences(report: BatchReport) -> Iterator[str]:
    """The report for people."""
    bad = f", {report.error_rows:,} of them error rows" if report.error_rows else ""
    yield f"{report.rows:,} rows are in {report.output}{bad}"
    yield (
        f"this run: {report.rows_this_run:,} rows in {span(report.seconds)}, {report.rows_per_s:,.0f} rows/s, "
        f"{report.tokens_per_s:,.0f} tokens/s"
    )
    if report.degenerate_rows:
        yield f"{report.degenerate_rows:,} answers run in circles; this run has ended {report.ended_early:,} early"
    if report.malformed_lines or report.repeated_lines:
        yield f"left out: {report.malformed_lines:,} lines that are no rows, {report.repeated_lines:,} repeated"
    for worker in report.workers:
        yield f"worker {worker.url}: {worker.rows:,} rows, {worker.tokens:,} tokens, {worker.retried:,} retried"
    for why, count in sorted(report.retries.items(), key=lambda each: -each[1])[:8]:
        yield f"sent again {count:,} times since a worker {why}"


def draw(report: BatchReport) -> bytes:
    """A picture, as PNG: rows a second and workers that served, along time; rows of each worker.

    Raises `UsageError` without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            f"a plot needs matplotlib, which cannot be imported: {error}",
            hint=install_line("plot", package="regrow-batch"),
        ) from error
    figure = Figure(figsize=(9.0, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, width_ratios=(2.2, 1.0), height_ratios=(1.7, 1.0))
    rates: Axes = figure.add_subplot(grid[0, 0])
    serving: Axes = figure.add_subplot(grid[1, 0], sharex=rates)
    shares: Axes = figure.add_subplot(grid[:, 1])
    # The last stretch is not over, so its rate is that of the part that has passed.
    edges = [at * report.bucket_s for at in range(len(report.buckets))] + [report.seconds]
    widths = [max(right - left, 1e-3) for left, right in pairwise(edges)]
    rates.stairs([rows / width for rows, width in zip(report.buckets, widths, strict=True)], edges, color=_LINE)
    rates.set_ylabel("rows/s")
    rates.set_ylim(bottom=0)
    serving.stairs(report.serving, edges, color=_LINE, fill=True, alpha=0.25)
    serving.set_ylabel("workers that serve")
    serving.set_xlabel("time since the head's start (s)")
    names = [worker.url.partition("//")[2] for worker in report.workers[:30]]
    shares.barh(names, [worker.rows for worker in report.workers[:30]], color=_LINE)
    shares.set_xlabel("rows answered")
    for panel in (rates, serving, shares):
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8, labelcolor=_GREY)
    figure.suptitle(f"{report.rows:,} rows, {report.rows_per_s:,.0f} rows/s in the last run", fontsize=11)
    content = BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()
