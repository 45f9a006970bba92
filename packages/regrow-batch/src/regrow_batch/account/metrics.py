"""Metrics of a running batch for Prometheus. Pure. docs/inference.md has a line for each series."""

from regrow.core.ids import Instant
from regrow.core.metrics_text import Series, series_of, text_of
from regrow_batch.account.prices import Prices
from regrow_batch.answers import Tokens
from regrow_batch.pool import Pool
from regrow_batch.tally import Tally


def exposition(pool: Pool, tally: Tally, now: Instant, prices: Prices | None = None) -> str:
    """The answer to a scrape."""
    return text_of(series(pool, tally, now, prices))


def series(pool: Pool, tally: Tally, now: Instant, prices: Prices | None = None) -> list[Series]:
    """All series of a batch. Tokens and retries are those of this run of the head; rows are those of all runs."""
    workers = [*pool.workers.values(), *pool.departed]
    states = {"done": tally.before + tally.done - tally.errors, "error": tally.errors, "left": tally.left}
    found = [
        series_of("regrow_batch_rows", "Rows by state.", [({"state": name}, count) for name, count in states.items()]),
        series_of("regrow_batch_rows_per_second", "Results a second, of late.", [({}, tally.rate(now))]),
        series_of(
            "regrow_batch_tokens_total",
            "Tokens by worker and kind: prompt, of these cached; answer, of these reasoning.",
            [
                ({"worker": each.url, "kind": kind}, count)
                for each in workers
                for kind, count in _by_kind(each.spent).items()
            ],
            "counter",
        ),
        series_of(
            "regrow_batch_worker_rows_total",
            "Rows with a result from a worker.",
            [({"worker": each.url}, each.done) for each in workers],
            "counter",
        ),
        series_of(
            "regrow_batch_worker_rows_under_way",
            "Rows that a worker has now.",
            [({"worker": each.url, "standing": str(each.standing)}, each.rows) for each in pool.workers.values()],
        ),
        series_of("regrow_batch_workers_serving", "Workers that take rows.", [({}, pool.serving)]),
        series_of(
            "regrow_batch_retries_total", "Attempts that are made again.", [({}, tally.retries.total())], "counter"
        ),
        series_of("regrow_batch_degenerate_rows", "Answers that run in circles.", [({}, tally.degenerate)]),
    ]
    if prices is not None:
        text = "What the tokens of this run cost, in the currency of --price."
        found.append(series_of("regrow_batch_cost_total", text, [({}, prices.of(tally.tokens))], "counter"))
    return found


def _by_kind(tokens: Tokens) -> dict[str, int]:
    return {
        "prompt": tokens.prompt,
        "cached": tokens.cached,
        "answer": tokens.answer,
        "reasoning": tokens.reasoning,
    }
