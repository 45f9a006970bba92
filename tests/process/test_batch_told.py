"""Each line of a batch, its summary and its metrics say what is to be known of an answer."""

import re
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.ports import held_port
from tests.process.batch import SetUpNotes, desk, until


@pytest.fixture
def at(tmp_path: Path) -> Iterator[SetUpNotes]:
    with desk(tmp_path) as made:
        yield made


def test_an_answer_that_its_server_has_ended_as_it_repeats_is_counted(at: SetUpNotes) -> None:
    at.worker()
    at.rows("loop a", "b", repetition_detection={"max_pattern_size": 8, "min_count": 8})
    code, told = at.run_here("--workers", at.workers[0].url)
    assert code == 0, told
    found = [row.get("degenerate") for row in at.results().values()]
    assert found == [{"kind": "ended by the server", "period": 0, "ended_early": 1}, None]
    assert at.summary()["finished"] == {"repetition": 1, "stop": 1}
    assert at.summary()["degenerate_rows"] == 1
    assert "1 answers run in circles" in told


def test_each_line_says_whether_the_penalty_that_was_asked_for_was_there(at: SetUpNotes) -> None:
    one, two = (at.folder / name for name in ("one", "two"))  # neither has them all before the other has any
    having = at.worker("--penalty", "--heard", str(one), "--hold", f"4:{two}").url
    without = at.worker("--heard", str(two), "--hold", f"4:{one}").url
    at.rows(*(f"row {number}" for number in range(12)), vllm_xargs={"lz_strength": 0.2})
    code, told = at.run_here("--workers", f"{having},{without}", "--per-worker", "2")
    assert code == 0, told
    served = [row["served"] for row in at.results().values()]
    assert {each["worker"] for each in served} == {having, without}
    for each in served:
        assert each["penalty"] == ("heeded" if each["worker"] == having else "missing")
    missing = sum(each["penalty"] == "missing" for each in served)
    assert at.summary()["penalties"] == {"heeded": 12 - missing, "missing": missing}
    assert f"{missing} answers are of workers without the LZ penalty that was asked for" in told


def test_after_a_resume_counts_of_errors_and_loops_are_of_all_rows(at: SetUpNotes) -> None:
    go_on = at.folder / "go on"
    at.worker("--hold", f"2:{go_on}")
    at.rows("refuse this", "loop a", "b", "c", "d")
    head = at.start("--per-worker", "1")
    until(lambda: at.journaled() == 3 or head.poll() is not None)
    at.kill(head)
    assert at.journaled() == 3
    port = held_port()
    head = at.start("--metrics", f"127.0.0.1:{port}")
    text = ""

    def scraped() -> bool:
        nonlocal text
        assert head.poll() is None, at.end(head)
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        return bool(text)

    until(scraped)
    figures = dict(re.findall(r"^(regrow_batch_(?:rows\{.*\}|degenerate_rows)) (\d+)", text, re.MULTILINE))
    assert figures == {
        'regrow_batch_rows{state="done"}': "2",
        'regrow_batch_rows{state="error"}': "1",
        'regrow_batch_rows{state="left"}': "2",
        "regrow_batch_degenerate_rows": "1",
    }
    go_on.touch()
    code, told = at.end(head)
    assert code == 0 and "5 rows are in out.jsonl, 1 of them error rows" in told, told
    assert (at.summary()["error_rows"], at.summary()["degenerate_rows"]) == (1, 1)
    code, told = at.run("--retry-errors=http_400")
    assert code == 77 and "sent again: 1 rows with the error http_400" in told, told
