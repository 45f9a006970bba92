"""Cost of a batch, and its metrics for Prometheus."""

import asyncio

import aiohttp
import pytest

from regrow.core.errors import UsageError
from regrow.core.metrics_text import CONTENT_TYPE
from regrow.core.process.tasks import TaskScope
from regrow_batch.account.metrics import exposition
from regrow_batch.account.prices import Prices
from regrow_batch.answers import Tokens, read_answer
from regrow_batch.metrics_endpoint import serve_metrics
from regrow_batch.pool import Pool, PoolPolicy
from regrow_batch.tally import Tally


def test_prices_are_of_a_million_tokens_and_cached_ones_have_their_own() -> None:
    prices = Prices.read("prompt=2,cached=0.5,answer=10")
    assert prices is not None
    assert prices.of(Tokens(prompt=1_000_000, cached=400_000, answer=100_000, reasoning=60_000)) == 1.2 + 0.2 + 1.0
    plain = Prices.read("prompt=2")
    assert plain is not None and plain.of(Tokens(prompt=1_000_000, cached=400_000)) == 2.0
    assert Prices.read("") is None


@pytest.mark.parametrize("words", ["2", "prompt", "prompt=x", "prompt=-1", "prompt=nan", "gpu=1", "prompt=1,,"])
def test_what_is_no_price_is_refused(words: str) -> None:
    with pytest.raises(UsageError, match="is no price"):
        Prices.read(words)


def test_embeddings_and_thoughts_are_counted() -> None:
    embeddings = read_answer(b'{"data":[{"embedding":[0.5]}],"usage":{"prompt_tokens":7,"total_tokens":7}}')
    thoughts = read_answer(
        b'{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":8},'
        b'"completion_tokens_details":{"reasoning_tokens":4}}}'
    )
    assert embeddings is not None and embeddings.tokens == Tokens(prompt=7)
    assert thoughts is not None and thoughts.tokens == Tokens(9, 8, 5, 4)


def test_a_scrape_has_rows_tokens_by_worker_and_cost() -> None:
    pool, tally = Pool(PoolPolicy()), Tally(rows=10, before=2, began=0.0)
    pool.join("http://a:1", 0.0)
    pool.probed("http://a:1", "", 0.0, 0.5)
    assert pool.assign(1) == "http://a:1"
    tokens = Tokens(prompt=1000, cached=100, answer=50, reasoning=20)
    pool.succeeded("http://a:1", tokens)
    tally.result(1.0, tokens=tokens)
    tally.result(1.0, error=True)
    said = exposition(pool, tally, 2.0, Prices.read("prompt=1,answer=1")).splitlines()
    for line in (
        'regrow_batch_rows{state="done"} 3',
        'regrow_batch_rows{state="error"} 1',
        'regrow_batch_rows{state="left"} 6',
        'regrow_batch_tokens_total{worker="http://a:1",kind="cached"} 100',
        'regrow_batch_tokens_total{worker="http://a:1",kind="reasoning"} 20',
        'regrow_batch_worker_rows_total{worker="http://a:1"} 1',
        'regrow_batch_worker_rows_under_way{worker="http://a:1",standing="serving"} 1',
        "regrow_batch_cost_total 0.00105",
    ):
        assert line in said


async def test_metrics_are_served_to_whoever_asks_where_it_is_told() -> None:
    said: asyncio.Queue[str] = asyncio.Queue()
    async with TaskScope() as scope:
        scope.start(serve_metrics(("127.0.0.1", 0), lambda: "a 1\n", said.put_nowait))
        url = (await asyncio.wait_for(said.get(), 60)).rpartition(" ")[2]
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            assert (answer.status, await answer.text()) == (200, "a 1\n")
            assert answer.headers["Content-Type"] == CONTENT_TYPE
        with pytest.raises(UsageError, match="--metrics 127.0.0.1"):
            await serve_metrics(("127.0.0.1", int(url.rpartition(":")[2].partition("/")[0])), str, said.put_nowait)
