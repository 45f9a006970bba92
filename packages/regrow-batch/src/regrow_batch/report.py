"""Report of a batch at its end: sentences, a JSON file, a picture."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from regrow.core.errors import UsageError
from regrow.core.ids import Instant, Seconds
from regrow.core.process.extras import install_line
from regrow_batch.account.prices import Prices
from regrow_batch.answers import Tokens, read_answer
from regrow_batch.pool import PoolWorker
from regrow_batch.progress import span
from regrow_batch.rows import RowError, Served
from regrow_batch.tally import Tally

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINE, _GREY = "#1f4e79", "#6b7280"


class WorkerReport(msgspec.Struct):
    """Work of one worker in the last run of the head."""

    url: str
    rows: int
    tokens: int
    retried: int
    spent: Tokens = msgspec.field(default_factory=Tokens)
    cost: float | None = None


class ErrorRows(msgspec.Struct):
    """Error rows that have the same reason.

    Attributes:
        rows: their number.
        theirs: number of those that are known to be at fault themselves.
        custom_id, message: of the first one.
    """

    rows: int = 0
    theirs: int = 0
    custom_id: str = ""
    message: str = ""


class BatchReport(msgspec.Struct):
    """A finished batch.

    `rows`, `error_rows`, `unproven_rows`, `errors`, `degenerate_rows`, `tokens`, `spent`, `models` and `penalties`
    count the whole output; the other figures are of the head's last run. `unproven_rows`: error rows that are not known
    to be at fault themselves. `tokens`: of answers; `spent`: all tokens; `cost`: of `spent`, by --price. `finished`:
    choices of answers by their finish reason.
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
    unproven_rows: int = 0
    errors: dict[str, ErrorRows] = {}
    spent: Tokens = msgspec.field(default_factory=Tokens)
    models: dict[str, int] = {}
    penalties: dict[str, int] = {}
    finished: dict[str, int] = {}
    cost: float | None = None


class _Reply(msgspec.Struct):
    body: msgspec.Raw


class _Kept(msgspec.Struct):
    custom_id: str = ""
    error: RowError | None = None
    degenerate: dict[str, str | int] | None = None
    response: _Reply | None = None
    served: Served | None = None
    spent: Tokens | None = None


def error_of(result: bytes) -> RowError | None:
    """The error of a result line; None: the row was answered."""
    return msgspec.json.decode(result, type=_Kept).error


@dataclass
class OutputCount:
    """Adds up the rows of an output as they are written."""

    errors: int = 0
    unproven: int = 0
    degenerate: int = 0
    tokens: Tokens = field(default_factory=Tokens)
    reasons: dict[str, ErrorRows] = field(default_factory=dict)
    models: Counter[str] = field(default_factory=Counter)
    penalties: Counter[str] = field(default_factory=Counter)

    def take(self, result: bytes) -> None:
        """Count a row of the output."""
        row = msgspec.json.decode(result, type=_Kept)
        self.degenerate += row.degenerate is not None
        if row.error is not None:
            self._take_error(row.custom_id, row.error)
        elif row.served is not None:
            self.models[row.served.model] += 1
            if row.served.penalty:
                self.penalties[row.served.penalty] += 1
        if row.spent is not None:
            self.tokens.add(row.spent)
        if row.error is None and row.response is not None:
            answer = read_answer(row.response.body)
            if answer is not None:
                self.tokens.add(answer.tokens)

    def _take_error(self, name: str, error: RowError) -> None:
        self.errors += 1
        self.unproven += not error.is_its_own
        found = self.reasons.setdefault(error.code, ErrorRows(0, 0, name, error.message))
        found.rows += 1
        found.theirs += error.is_its_own


def workers_of(workers: Sequence[PoolWorker], prices: Prices | None = None) -> list[WorkerReport]:
    """Work of each worker, by name."""
    found = [
        WorkerReport(
            each.url,
            each.done,
            each.spent.answer,
            each.retried,
            each.spent,
            prices.of(each.spent) if prices is not None else None,
        )
        for each in workers
    ]
    return sorted(found, key=lambda worker: worker.url)


def this_run(tally: Tally, now: Instant) -> tuple[Seconds, float, float]:
    """Duration in seconds, rows per second and tokens per second of this run."""
    seconds = max(now - tally.began, 1e-3)
    return seconds, tally.done / seconds, tally.tokens.answer / seconds


def sentences(report: BatchReport) -> Iterator[str]:
    """The report as sentences for people."""
    bad = f", {report.error_rows:,} of them error rows" if report.error_rows else ""
    yield f"{report.rows:,} rows are in {report.output}{bad}"
    yield (
        f"this run: {report.rows_this_run:,} rows in {span(report.seconds)}, {report.rows_per_s:,.0f} rows/s, "
        f"{report.tokens_per_s:,.0f} tokens/s"
    )
    spent = report.spent
    yield (
        f"tokens: {spent.prompt:,} of prompts ({spent.cached:,} cached), "
        f"{spent.answer:,} of answers ({spent.reasoning:,} of thoughts)"
        + (f"; they cost {report.cost:,.4f} (--price)" if report.cost is not None else "")
    )
    for code, error in sorted(report.errors.items(), key=lambda each: -each[1].rows):
        whose = "" if error.theirs == error.rows else f", {error.rows - error.theirs:,} not known to be their own fault"
        yield f"error {code}: {error.rows:,} rows{whose}; {error.custom_id!r}: {error.message}"
    if len(report.models) > 1:
        named = ", ".join(f"{name or 'none'} ({count:,})" for name, count in sorted(report.models.items()))
        yield f"answers come from more than one model: {named}"
    if missing := report.penalties.get("missing", 0):
        yield f"{missing:,} answers are of workers without the LZ penalty that was asked for (`served` in each line)"
    if report.degenerate_rows:
        yield f"{report.degenerate_rows:,} answers run in circles; this run has ended {report.ended_early:,} early"
    if report.malformed_lines or report.repeated_lines:
        yield f"left out: {report.malformed_lines:,} lines that are no rows, {report.repeated_lines:,} repeated"
    for worker in report.workers:
        spent, seconds = worker.spent, max(report.seconds, 1e-3)
        cost = f", {worker.cost:,.4f}" if worker.cost is not None else ""
        yield (
            f"worker {worker.url}: {worker.rows:,} rows, {spent.prompt:,} tokens of prompts, {spent.answer:,} of "
            f"answers ({spent.answer / seconds:,.0f}/s){cost}, {worker.retried:,} retried"
        )
    for why, count in sorted(report.retries.items(), key=lambda each: -each[1])[:8]:
        yield f"sent again {count:,} times since a worker {why}"


def draw(report: BatchReport) -> bytes:
    """PNG picture: rows a second and serving workers over time; rows of each worker.

    Raises `UsageError` if matplotlib is not installed.
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
    # The last stretch is incomplete, so its rate is that of the part that has passed.
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
