"""A batch can be trusted: it names whose fault an error row is, and ends all that it started."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process.batch import SetUpNotes, desk, until
from tests.process.test_batch_stubs import stubs

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def at(tmp_path: Path) -> Iterator[SetUpNotes]:
    with desk(tmp_path) as made:
        yield made


def heard(path: Path) -> list[list[str]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_row_that_ends_engines_ends_three_and_its_neighbours_are_answered(at: SetUpNotes) -> None:
    kind = "engine that dies of a row"
    at.rows(*(f"row {number}" for number in range(20)), "poison", *(f"row {number}" for number in range(20, 120)))
    with stubs(kind, kind, heard=str(at.folder / "heard")) as urls:
        code, told = at.run_here("--workers", ",".join(urls), "--attempts", "3")
    assert code == 77, told
    found = at.results()
    wrong = {name: row["error"] for name, row in found.items() if row["error"] is not None}
    assert {name: error["code"] for name, error in wrong.items()} == {"id-20": "ended_engines"}, told
    assert wrong["id-20"]["fault"] == "unknown"
    deaths = [prompt for what, prompt in heard(at.folder / "heard") if what == "death"]
    assert deaths == ["poison"] * 3, "two ends of engines in company, and one alone"
    assert "error ended_engines: 1 rows, 1 not known to be their own fault; 'id-20': met 3 ends of engines" in told


def test_error_rows_that_are_no_fault_of_theirs_are_sent_again_and_others_are_left(at: SetUpNotes) -> None:
    at.rows("row 1", "bad row", "row 2")
    log = at.folder / "heard"
    with stubs("sound", "other model, unlisted", heard=str(log)) as (sound, wrong):
        code, told = at.run_here("--workers", wrong)
        assert code == 77 and "error http_404: 3 rows, 3 not known to be their own fault" in told, told
        assert "The model `tiny` does not exist" in at.results()["id-0"]["error"]["message"]
        assert at.summary()["errors"]["http_404"]["custom_id"] == "id-0"
        code, told = at.run_here("--workers", sound)
        assert code == 77 and "3 error rows are not known to be their own fault: --retry-errors" in told, told
        code, told = at.run_here("--workers", sound, "--retry-errors=timeout")
        assert code == 2 and "no row has the error 'timeout' (there are http_404 (3))" in told, told
        code, told = at.run_here("--workers", sound, "--retry-errors")
        assert code == 0 and "sent again: 3 rows with the error http_404" in told, told
        assert [row["error"] and row["error"]["fault"] for row in at.results().values()] == [None, "row", None]
        sent = len(heard(log))
        code, told = at.run_here("--workers", sound, "--retry-errors")
        assert (code, told) == (0, "3 rows are in out.jsonl already\n") and len(heard(log)) == sent
        code, told = at.run_here("--workers", sound, "--retry-errors=http_400", "--quiet")
        assert code == 77, "alone, a row that is refused proves nothing"
        assert [row["error"] is None for row in at.results().values()] == [True, False, True]


def test_a_batch_under_way_sends_its_error_rows_again(at: SetUpNotes) -> None:
    from regrow_batch.journal import Journal

    at.rows("row 1", "row 2")
    with stubs("sound", "other model, unlisted") as (sound, wrong):
        assert at.run_here("--workers", wrong, "--quiet")[0] == 77
        lines = (at.folder / "out.jsonl").read_text().splitlines()
        (at.folder / "out.jsonl").unlink()
        head = json.loads(at.journal.read_text())
        at.journal.unlink()
        journal = Journal.open(at.journal, head["fingerprint"])
        for number, line in enumerate(lines):
            journal.append(number, line.encode())
        journal.flush()
        journal.close()
        code, told = at.run_here("--workers", sound, "--retry-errors=http_404", "--quiet")
    assert code == 0, told
    assert [row["error"] for row in at.results().values()] == [None, None]


def processes(mark: str) -> dict[int, str]:
    """Processes with a mark in their command line, but those of regrow itself."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue  # it has ended
            if mark in words and "regrow batch" not in words:
                found[int(entry.name)] = words
    return found


@pytest.mark.parametrize("who", ["the head", "a worker", "the server", "nobody"])
def test_whatever_ends_nothing_is_left_of_a_server_nor_of_the_engines_that_it_has_forked(
    at: SetUpNotes, who: str
) -> None:
    mark = f"engine-of-{at.folder.name}-{os.getpid()}"
    at.rows(*(f"row {number}" for number in range(40 if who == "nobody" else 4000)))
    script = SCRIPTS / "forking_worker.py"
    server = f"{sys.executable} {script} {{port}} {mark}"
    if who == "a worker":
        at.worker("--latency", "1")
        at.start("--per-worker", "1")
        until(lambda: (at.folder / "out.jsonl.control").exists())
        started = at._batch("worker", "out.jsonl", *server.split())
    else:
        started = at.start("--spawn", server, "--per-worker", "1")

    def leaders() -> list[int]:
        return [pid for pid, words in processes(mark).items() if str(script) in words and "guard.py" not in words]

    # The guard, the server, an engine in a session of its own, and one whose parent has ended.
    until(lambda: who == "nobody" or sum(f"{mark} engine" in each for each in processes(mark).values()) == 2)
    if who == "the server":
        until(lambda: len(leaders()) == 1)  # that parent may not have ended yet, and has the server's command line
        first = processes(mark)
        os.kill(leaders()[0], signal.SIGKILL)
        until(lambda: not set(first) & set(processes(mark)))
        started.send_signal(signal.SIGTERM)
        started.send_signal(signal.SIGTERM)
    elif who != "nobody":
        started.send_signal(signal.SIGKILL)
    code, told = at.end(started)
    until(lambda: not processes(mark))
    if who == "nobody":
        assert code == 0, told
        assert "noise of a server" not in told
        assert "noise of a server" in (at.folder / "out.jsonl.servers" / "1.log").read_text()


def test_each_line_says_who_has_answered_it_and_counts_are_of_all_that_was_spent(at: SetUpNotes) -> None:
    at.rows("row 1", "row 2")
    with stubs("sound") as (url,):
        code, told = at.run_here("--workers", url)
    assert code == 0, told
    served = [row["served"] for row in at.results().values()]
    assert served == [{"worker": url, "model": "tiny"}] * 2
    spent: dict[str, Any] = at.summary()["spent"]
    assert spent == {"prompt": 6, "cached": 0, "answer": 10, "reasoning": 0}
    assert at.summary()["workers"][0]["spent"] == spent
    assert at.summary()["finished"] == {"stop": 2}
