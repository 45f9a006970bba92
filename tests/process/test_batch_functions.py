"""Rows that a function of Python answers: several calls a row, each row once, whatever ends the run."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from tests.process.batch import desk

from regrow.core.errors import UsageError
from regrow_batch import CallFailed, Calls, arun, run

ROWS = [{"id": f"r{number}", "topic": f"topic {number}"} for number in range(30)]


def said(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


async def two_turns(calls: Calls, row: Any) -> dict[str, str]:
    """A fake worker repeats the first message; so the second turn begins with what the first has said."""
    first = said(await calls.chat(row["topic"], max_tokens=5))
    return {"first": first, "second": said(await calls.chat([{"role": "user", "content": f"more of {first}"}]))}


def results(path: Path) -> dict[str, Any]:
    return {row["custom_id"]: row for row in map(json.loads, path.read_text().splitlines())}


def test_a_function_may_ask_several_times_for_a_row_under_faults_too(tmp_path: Path) -> None:
    with desk(tmp_path) as made:
        made.worker("--faults", "0.3", "--how", "500,cut,torn", "--seed", "5")
        made.worker()
        report = run(ROWS, two_turns, output=str(tmp_path / "out.jsonl"), workers=[each.url for each in made.workers])
        assert (report.rows, report.error_rows) == (30, 0)
        found = results(tmp_path / "out.jsonl")
        assert [each["result"] for each in found.values()] == [
            {"first": row["topic"], "second": f"more of {row['topic']}"} for row in ROWS
        ]
        assert list(found) == [row["id"] for row in ROWS]
        assert report.spent.answer == 30 * 2 * 8, "tokens of both calls of each row"


async def test_what_was_done_is_not_done_again_after_the_function_has_failed(tmp_path: Path) -> None:
    asked: list[str] = []
    failing = True

    async def answer(calls: Calls, row: Any) -> str:
        if failing and row["id"] == "r20":
            raise ZeroDivisionError
        asked.append(row["id"])
        return said(await calls.chat(row["topic"]))

    with desk(tmp_path) as made:
        words: dict[str, Any] = {"output": str(tmp_path / "out.parquet"), "workers": [made.worker().url]}
        with pytest.raises(ZeroDivisionError):
            await arun(ROWS, answer, **words)
        journal = (tmp_path / "out.parquet.journal").read_bytes()
        done = {row["id"] for row in ROWS if f'"custom_id":"{row["id"]}"'.encode() in journal}
        asked.clear()
        failing = False
        report = await arun(ROWS, answer, **words)
        assert set(asked) == {row["id"] for row in ROWS} - done
        assert report.rows == 30
        again = await arun(ROWS, answer, **words)
        assert again.rows == 30 and len(asked) == 30 - len(done), "a batch that is done asks nothing"
        table = parquet.read_table(tmp_path / "out.parquet").to_pylist()
        assert [row["custom_id"] for row in table] == [row["id"] for row in ROWS]
        with pytest.raises(UsageError, match="version was not given and is 2"):
            await arun(ROWS, answer, version="2", **words)


async def test_a_call_that_fails_may_be_caught_and_is_an_error_row_where_it_is_not(tmp_path: Path) -> None:
    async def answer(calls: Calls, row: Any) -> str:
        try:
            return said(await calls.chat(row["prompt"]))
        except CallFailed as failure:
            if row["caught"]:
                return failure.code
            raise

    rows = [{"prompt": "refuse this", "caught": True}, {"prompt": "refuse that", "caught": False}]
    with desk(tmp_path) as made:
        words: dict[str, Any] = {"output": str(tmp_path / "out.jsonl"), "workers": [made.worker().url]}
        report = await arun(rows, answer, **words)
    assert (report.rows, report.error_rows) == (2, 1)
    found = results(tmp_path / "out.jsonl")
    assert found["row-0"]["result"] == "http_400"
    assert found["row-1"]["error"]["code"] == "http_400"


async def test_a_function_that_awaits_a_cancelled_task_ends_the_batch_with_the_name_of_its_row(tmp_path: Path) -> None:
    async def answer(calls: Calls, row: Any) -> str:
        if row["id"] == "r3":
            future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            future.cancel()
            return await future
        return said(await calls.chat(row["topic"]))

    with desk(tmp_path) as made, pytest.raises(UsageError, match="the function was cancelled at 'r3'"):
        words: dict[str, Any] = {"output": str(tmp_path / "out.jsonl"), "workers": [made.worker().url]}
        await asyncio.wait_for(arun(ROWS, answer, **words), 120)
