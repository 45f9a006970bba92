"""Workers that announce themselves to a batch, and are given and taken away while it runs."""

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.ports import held_port
from tests.process.batch import FAKE, SetUpNotes, desk, until

TOKEN = {"REGROW_TOKEN": "a long random text"}
OVER = "is no longer needed: all rows of the batch are done"


@pytest.fixture
def at(tmp_path: Path) -> Iterator[SetUpNotes]:
    with desk(tmp_path) as made:
        yield made


@pytest.fixture
def place() -> str:
    """Address for a head."""
    return f"127.0.0.1:{held_port()}"


def ask(at: SetUpNotes, count: int) -> dict[str, str]:
    """An input of `count` rows, and the answer that each must get."""
    at.rows(*(f"prompt {number}" for number in range(count)))
    return {f"id-{number}": f"prompt {number}" for number in range(count)}


def test_who_is_taken_away_ends_its_rows_first_and_who_is_left_is_told_when_all_are_done(
    at: SetUpNotes, place: str
) -> None:
    wanted = ask(at, 100)
    heard = at.folder / "heard"
    words = ("--latency", "0.2", "--heard", str(heard))
    first = at.register(f"http://{place}", *words, flags=("--cap", "4"), env=TOKEN)
    assert first.stdout is not None
    while "no process listens there" not in first.stdout.readline():
        assert first.poll() is None, "it does not wait for a head"
    head = at.start("--listen", place, env=TOKEN)
    until(lambda: at.journaled() >= 4)
    second = at.register(f"http://{place}", *words, flags=("--cap", "4"), env=TOKEN)
    first.send_signal(signal.SIGTERM)
    code, said = at.end(first)
    assert code == 0 and "belongs to the batch of" in said and "rows under way" not in said, said
    code, said = at.end(head)
    assert code == 0 and said.count("has announced itself") == 2, said
    assert at.answers() == wanted
    assert len(heard.read_text().splitlines()) == len(wanted), "a row was sent twice, though its worker left in order"
    code, said = at.end(second)
    assert code == 0 and OVER in said, said


def test_a_head_that_is_killed_and_started_again_finds_its_workers_and_not_those_that_died(
    at: SetUpNotes, place: str
) -> None:
    wanted = ask(at, 120)
    head = at.start("--listen", place, "--per-worker", "1", env=TOKEN)  # so that rows are left when it is killed
    lost, kept = (at.register(f"http://{place}", "--latency", "0.1", env=TOKEN) for _ in range(2))
    until(lambda: at.journaled() >= 20)
    at.kill(head)
    at.kill(lost)
    head = at.start("--listen", place, "--per-worker", "16", env=TOKEN)
    code, said = at.end(head)
    assert code == 0 and said.count("has announced itself") == 1, said
    assert at.answers() == wanted
    code, said = at.end(kept)
    assert code == 0 and OVER in said, said


def test_rows_that_outlast_the_grace_go_elsewhere(at: SetUpNotes) -> None:
    wanted = ask(at, 8)
    heard = at.folder / "heard"
    head = at.start("--workers-file", "pool.txt", "--timeout", "600s", "--model", "fake")
    (at.folder / "pool.txt").write_text("")
    until(lambda: (at.folder / "out.jsonl.control").exists())
    slow = at.register("out.jsonl", "--latency", "400", "--heard", str(heard), flags=("--grace", "1s"))
    until(lambda: heard.exists() and len(heard.read_text().splitlines()) == 8)
    began = time.monotonic()
    slow.send_signal(signal.SIGTERM)
    code, said = at.end(slow)
    assert code == 0 and "ends with rows under way: they go elsewhere" in said, said
    assert time.monotonic() - began < 110
    (at.folder / "pool.txt").write_text(f"{at.worker().url}\n")
    assert at.end(head)[0] == 0
    assert at.answers() == wanted


def test_who_is_drained_at_the_head_ends_and_one_that_ends_by_itself_says_so(at: SetUpNotes) -> None:
    from tests.process.test_batch import workers

    ask(at, 10_000)  # more than will be done
    at.worker("--latency", "0.2")
    at.start("--per-worker", "2")
    until(lambda: at.journaled() >= 2)
    drained = at.register("out.jsonl", "--latency", "0.2", flags=("--cap", "2"))
    until(lambda: workers(at).count("serving") == 2)
    (url,) = {line.split()[0] for line in workers(at).splitlines()} - {at.workers[0].url}
    workers(at, "--drain", url)
    code, said = at.end(drained)
    assert code == 0 and f"{url} is no longer needed: it was asked to go" in said, said
    broken = at.register("out.jsonl", "--no-such-flag")
    code, said = at.end(broken)
    assert code == 2 and f"{sys.executable} exited with code 2 without being asked to" in said, said


def test_a_command_that_names_the_head_starts_workers_anywhere(at: SetUpNotes, place: str) -> None:
    wanted = ask(at, 150)  # more than the first is done with before the second has started
    command = f"{sys.executable} -m regrow batch worker --cap 2 {{head}} {sys.executable} {FAKE} {{port}} --latency 0.1"
    head = at.start("--spawn", command, "--spawn-count", "2")
    code, said = at.end(head)
    assert code == 0 and said.count("has announced itself") == 2, said
    assert at.answers() == wanted
    at.journal.unlink()
    (at.folder / "out.jsonl").unlink()
    wanted = ask(at, 20)
    code, said = at.run("--spawn", command, "--listen", place, env=TOKEN)
    assert code == 0 and f"may announce themselves at http://{place}" in said, said
    assert at.answers() == wanted


def test_without_the_right_token_or_a_head_nothing_is_started_for_long(at: SetUpNotes, place: str) -> None:
    ask(at, 1)
    head = at.start("--listen", place, env=TOKEN)
    until(lambda: (at.folder / "out.jsonl.control").exists())
    code, said = at.end(at.register(f"http://{place}", env={"REGROW_TOKEN": "another"}))
    assert code == 2 and "has another token (see --token-file)" in said, said
    code, said = at.end(at.register(f"http://{place}"))
    assert code == 2 and "must send a token (add --token-file FILE)" in said, said
    head.send_signal(signal.SIGTERM)
    assert at.end(head)[0] == 75
    code, said = at.end(at.register(f"http://{place}", flags=("--patience", "100ms"), env=TOKEN))
    assert code == 75 and "no head was found for 0.1 s (--patience)" in said, said
    code, said = at.run("--listen", place)
    assert code == 2 and "must send a token" in said, said
