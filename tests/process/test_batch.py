"""Batch inference through everything that can happen to its workers and to itself: each id once, none lost."""

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pytest
from tests.process.batch import FAKE, SOURCE, SetUpNotes, desk, until

from regrow_batch.pool import Pool, PoolPolicy

T = TypeVar("T")


@pytest.fixture
def at(tmp_path: Path) -> Iterator[SetUpNotes]:
    with desk(tmp_path) as made:
        yield made


def prompts(count: int) -> list[str]:
    return [f"prompt {number}" for number in range(count)]


def expected(count: int) -> dict[str, str]:
    return {f"id-{number}": f"prompt {number}" for number in range(count)}


def timed(act: Callable[[], T]) -> tuple[float, T]:
    """Seconds that it took, and what came of it."""
    began = time.monotonic()
    came = act()
    return time.monotonic() - began, came


def disturbed(
    at: SetUpNotes, rows: int, *, heads: int, workers: int, words: tuple[str, ...]
) -> tuple[str, list[float]]:
    """Run while heads and workers are killed in turns, evenly over the rows; what the last head said.

    With it, the seconds from each end of a head to the first answer that the next one wrote down.
    """
    pauses = []
    head = at.start(*words)
    for number in range(1, heads + workers + 1):
        until(lambda number=number: at.journaled() >= number * rows // (heads + workers + 1), every=0.05)  # type: ignore[misc]
        if number % 2 and number // 2 < heads:
            at.kill(head)
            began, written = time.monotonic(), at.journaled()
            head = at.start(*words)
            until(lambda written=written: at.journaled() > written, every=0.01)  # type: ignore[misc]
            pauses.append(time.monotonic() - began)
        else:
            worker = at.workers[number // 2 % len(at.workers)]
            worker.kill()
            worker.start()
    code, said = at.end(head)
    assert code == 0, said
    return said, pauses


def test_faults_of_all_kinds_and_kills_of_workers_and_heads_lose_no_row_and_repeat_none(at: SetUpNotes) -> None:
    rows = 400
    at.rows(*prompts(rows))
    for seed in range(3):
        at.worker("--latency", "0.2", "--faults", "0.03", "--seed", str(seed))
    said, _ = disturbed(at, rows, heads=2, workers=2, words=("--per-worker", "8", "--timeout", "1s"))
    assert at.answers() == expected(rows)
    assert "the others are sent" in said
    anyone = ("--workers", "http://127.0.0.1:9")
    assert at.run_here(*anyone) == (0, f"{rows} rows are in out.jsonl already\n")
    at.rows(*prompts(rows + 1))
    code, said = at.run_here(*anyone)
    assert code == 2 and "the input was" in said and "remove the journal to begin anew" in said


def test_ten_thousand_rows_with_five_kills_of_the_head_take_little_longer(
    at: SetUpNotes, tmp_path: Path, record_property: Callable[[str, float], None]
) -> None:
    rows, faults = 10_000, 0.02
    words = ("--per-worker", "8", "--timeout", "4s", "--quiet")
    (tmp_path / "alone").mkdir()
    with desk(tmp_path / "alone") as calm:
        # Both at once, so that whatever else the machine does slows both.
        for made in (at, calm):
            made.rows(*prompts(rows))
            for seed in range(4):
                wrong = ("--faults", str(faults), "--seed", str(seed), "--heard", str(at.folder / "heard"))
                made.worker("--latency", "0.1", *(wrong if made is at else ()))
        assert all(worker.url for made in (at, calm) for worker in made.workers)
        with ThreadPoolExecutor(1) as beside:
            undisturbed = beside.submit(timed, lambda: calm.run(*words))
            took, (_, pauses) = timed(lambda: disturbed(at, rows, heads=5, workers=5, words=words))
            alone, (code, said) = undisturbed.result()
        assert code == 0, said
        assert calm.answers() == expected(rows)
    assert at.answers() == expected(rows)
    record_property("seconds alone", round(alone, 1))
    record_property("seconds disturbed", round(took, 1))
    record_property("of these, until heads that were started again had an answer", round(sum(pauses), 1))
    again = len((at.folder / "heard").read_bytes().splitlines()) - rows
    record_property("rows sent again", again)
    # Those that failed, and of each kill those under way, which for a head are 32, and what it had not yet written.
    assert again < 2 * faults * rows + 5 * 8 + 5 * 2 * 32, "rows that were answered were sent again"
    # What a start of Python takes depends on the machine: of heads it is measured, of the workers much less is missed.
    assert took <= 1.3 * alone + 2 * sum(pauses), f"{took:.1f} s, {pauses} in starts, {alone:.1f} s undisturbed"


def test_bad_rows_become_error_rows_and_bad_lines_and_workers_are_named(at: SetUpNotes) -> None:
    at.rows("one", "refuse this", "two")
    with (at.folder / "in.jsonl").open("a") as stream:
        stream.write('{torn\n{"custom_id": "id-0"}\n{"custom_id": "empty", "url": "/v1/completions", "body": 1}\n')
    asked = at.folder / "asked"
    at.worker("--hold", f"0:{asked}")
    at.worker("--faults", "1", "--how", "html", "--heard", str(asked))
    html = at.workers[1].url
    code, said = at.run_here("--workers", f"{at.workers[0].url},{html}", "--per-worker", "1")
    assert code == 0, said
    assert "in.jsonl, line 4: is not JSON" in said
    assert "in.jsonl, line 5: repeats the custom_id 'id-0' of line 1" in said
    found = at.results()
    assert set(found) == {"id-0", "id-1", "id-2", "empty"}
    assert (found["id-1"]["error"]["code"], found["id-1"]["response"]["status_code"]) == ("http_400", 400)
    assert "in.jsonl, line 6" in found["empty"]["error"]["message"]
    assert found["id-0"]["error"] is None and found["id-2"]["error"] is None
    assert "answered HTML instead of JSON" in said and f"worker {html}: 0 rows" in said
    assert (at.summary()["error_rows"], at.summary()["malformed_lines"], at.summary()["repeated_lines"]) == (2, 1, 1)


def test_without_any_worker_that_can_be_used_it_stops_and_names_each(at: SetUpNotes) -> None:
    at.rows("one")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    code, said = at.run_here("--workers", url, "--patience", "3s")  # it has to be asked once within that
    assert code == 75
    assert said.count("regrow:") == 1 and f"worker {url} cannot be reached" in said and "run the same command" in said


def test_a_full_disk_stops_it_with_one_message_and_it_goes_on_when_there_is_room(at: SetUpNotes) -> None:
    at.rows(*prompts(200))
    at.worker("--latency", "0.001")
    limit = 30_000
    code, said = at.run(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    assert code == 75
    assert said.count("regrow:") == 1 and "out.jsonl.journal cannot be written: File too large (make room" in said
    assert not (at.folder / "out.jsonl").exists()
    code, said = at.run_here("--workers", at.workers[0].url)
    assert code == 0 and "of 200 rows are in out.jsonl.journal; the others are sent" in said
    assert at.answers() == expected(200)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Callable[[str], SetUpNotes]]:
    """Makes a desk on a disk of a size, or gives that disk another size."""
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("a small disk is a tmpfs, and to mount one needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    with desk(folder) as made:

        def resized(size: str) -> SetUpNotes:
            option = f"remount,size={size}" if folder.is_mount() else f"size={size}"
            done = subprocess.run([mount, "-t", "tmpfs", "-o", option, "tmpfs", folder], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"a tmpfs cannot be mounted: {done.stderr}")
            return made

        yield resized
    if folder.is_mount():
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize(
    ("size", "rows_kept", "named"),
    [
        ("400k", "none", "the journal out.jsonl.journal"),
        ("500k", "some", "the journal out.jsonl.journal"),
        ("1000k", "all", "regrow: out.jsonl"),
    ],
    ids=["before the first row", "in the journal", "in the output"],
)
def test_a_full_disk_costs_no_row_wherever_it_is_found_full(
    small: Callable[[str], SetUpNotes], tmp_path: Path, size: str, rows_kept: str, named: str
) -> None:
    at, heard = small(size), tmp_path / "heard"
    heard.touch()
    asked = [f"prompt {number} ".ljust(1000, ".") for number in range(300)]
    at.rows(*asked)
    if rows_kept == "none":
        with suppress(OSError), (at.folder / "ballast").open("wb") as stream:
            stream.write(bytes(1 << 20))
    at.worker("--heard", str(heard))
    words = ("--workers", at.workers[0].url, "--quiet")
    code, said = at.run_here(*words)
    assert (code, said.count("regrow:")) == (75, 1), said
    assert f"{named} cannot be written: No space left on device (make room" in said, said
    assert not (at.folder / "out.jsonl").exists() and not (at.folder / "out.jsonl.partial").exists()
    before = len(heard.read_text().splitlines())
    code, said = at.run_here(*words)
    assert (code, said.count("regrow:")) == (75, 1) and "No space left on device" in said, said
    small("8m")
    (at.folder / "ballast").unlink(missing_ok=True)
    code, said = at.run_here(*words)
    assert code == 0, said
    assert at.answers() == {f"id-{number}": prompt for number, prompt in enumerate(asked)}
    if rows_kept == "all":
        assert len(heard.read_text().splitlines()) == before == len(asked), "a row was sent again"
    assert ("of 300 rows are in out.jsonl.journal" in said) == (rows_kept != "none")


def test_rows_that_begin_alike_go_to_the_same_worker_though_all_have_more_than_enough_to_do(at: SetUpNotes) -> None:
    for name, other in (("one", "two"), ("two", "one")):
        at.worker("--latency", "0.01", "--heard", str(at.folder / name), "--hold", f"0:{at.folder / other}")
    one, two = (each.url for each in at.workers)
    pool = Pool(PoolPolicy())
    for url in (one, two):
        pool.join(url, 0.0)
        pool.probed(url, "", 0.0, 0.0)
    opened: dict[str, list[str]] = {one: [], two: []}
    for number in range(1000):
        opened[pool.home(opening := f"Opening {number:03} ".encode())].append(opening.decode())
    openings = [*opened[one][:2], *opened[two][:2]]
    at.rows(*(f"{openings[number % 4]}and question {number}" for number in range(400)))
    code, said = at.run_here("--workers", f"{one},{two}", "--affinity", "12", "--per-worker", "4")
    assert code == 0, said
    assert len(at.answers()) == 400
    heard = {url: (at.folder / name).read_text().splitlines() for url, name in ((one, "one"), (two, "two"))}
    for url, lines in heard.items():
        at_home = [json.loads(line)[0][:12] in opened[url] for line in lines]
        while not at_home[-1]:
            at_home.pop()  # those of a slower one, once there are no more of its own
        assert at_home.count(False) <= 30, (
            "a worker is given what begins like what it has seen while there is such a row"
        )


def test_a_signal_has_the_list_read_at_once_even_where_it_seems_unchanged(at: SetUpNotes) -> None:
    at.rows(*prompts(400))
    first, second = (at.worker("--latency", "0.1") for _ in range(2))
    pool = at.folder / "pool.txt"
    lines = [f"{url} cap={cap} ".ljust(60, "#") + "\n" for url, cap in ((first.url, 2), (second.url, 32))]
    pool.write_text(lines[0])
    stamp = pool.stat()
    head = at.start("--workers-file", "pool.txt")
    until(lambda: at.journaled() >= 4)
    pool.write_text(lines[1])
    os.utime(pool, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    head.send_signal(signal.SIGHUP)
    until(lambda: first.url not in workers(at) and second.url in workers(at))
    code, said = at.end(head)
    assert code == 0 and f"worker {first.url} is no longer listed" in said, said
    shares = {each["url"]: each["rows"] for each in at.summary()["workers"]}
    assert 0 < shares[first.url] < 200 < shares[second.url]


def test_the_key_of_a_file_is_shown_to_workers_and_a_missing_one_is_their_complaint(at: SetUpNotes) -> None:
    at.rows("one", "two")
    url = at.worker("--key", "sesame").url
    (at.folder / "key").write_text("sesame\n")
    code, said = at.run_here("--workers", url, "--patience", "2s", "--timeout", "1s")
    assert code == 75 and "answered with status 401: it requires a key, see --api-key-file" in said, said
    code, said = at.run_here("--workers", url, "--api-key-file", "no-such-file")
    assert code == 2 and "--api-key-file no-such-file cannot be read" in said, said
    code, said = at.run_here("--workers", url, "--api-key-file", "key")
    assert code == 0, said
    assert at.answers() == {"id-0": "one", "id-1": "two"}


def test_workers_come_and_go_by_the_file_and_by_commands(at: SetUpNotes) -> None:
    rows = 1000  # many more than are done before the last worker may have a hundred at once
    at.rows(*prompts(rows))
    first, second, third = (at.worker("--latency", "0.2") for _ in range(3))
    pool = at.folder / "pool.txt"
    pool.write_text(f"{first.url} cap=2\n")
    head = at.start("--workers-file", "pool.txt")
    until(lambda: at.journaled() >= 4)
    pool.write_text(f"{second.url} cap=2\n")
    until(lambda: first.url not in workers(at) and second.url in workers(at))
    first.kill()
    workers(at, "--add", third.url, "--cap", "2")
    until(lambda: "serving" in workers(at).partition(third.url)[2].partition("\n")[0])
    workers(at, "--drain", second.url, "--grace", "5s")
    until(lambda: second.url not in workers(at))
    second.kill()
    workers(at, "--add", third.url, "--cap", "100")
    code, said = at.end(head)
    assert code == 0, said
    assert at.answers() == expected(rows)
    shares = {each["url"]: each for each in at.summary()["workers"]}
    assert all(shares[each.url]["rows"] for each in (first, second, third))
    assert sum(each["retried"] for each in shares.values()) == 0, "a worker that was asked to go lost rows"


def workers(at: SetUpNotes, *words: str) -> str:
    from click.testing import CliRunner

    from regrow_batch.command import batch

    result = CliRunner().invoke(batch, ["workers", str(at.folder / "out.jsonl"), *words])
    assert result.exception is None, result.exception
    return result.output


def test_asked_to_end_it_lets_rows_under_way_end_and_goes_on_later(at: SetUpNotes) -> None:
    at.rows(*prompts(400))  # more than are done before it is asked
    at.worker("--latency", "0.1", "--heard", str(at.folder / "heard"))
    head = at.start("--per-worker", "4")
    until(lambda: at.journaled() >= 8)
    head.send_signal(signal.SIGTERM)
    code, said = at.end(head)
    assert code == 75 and "asked to stop" in said
    assert at.journaled() == len((at.folder / "heard").read_text().splitlines()), "a row under way was thrown away"
    assert at.run_here("--workers", at.workers[0].url, "--per-worker", "64")[0] == 0
    assert at.answers() == expected(400)


def test_a_worker_that_streams_is_hung_up_on_when_its_answer_loops(at: SetUpNotes) -> None:
    at.rows("loop for ever", "a few words")
    at.worker("--heard", str(at.folder / "heard"))
    code, said = at.run_here("--end-loops", "--workers", at.workers[0].url)
    assert code == 0, said
    found = at.results()
    assert found["id-0"]["degenerate"] == {"kind": "exact loop", "period": 2, "ended_early": 1}
    assert found["id-1"]["response"]["body"]["choices"][0]["message"]["content"] == "a few words "
    assert "degenerate" not in found["id-1"]
    kept = found["id-0"]["response"]["body"]["choices"][0]["message"]["content"]
    assert 250 <= len(kept.split()) < 600
    assert "1 answers run in circles; this run has ended 1 early" in said


def test_workers_that_it_starts_itself_are_replaced_and_end_with_it(at: SetUpNotes) -> None:
    at.rows(*prompts(300))  # more than are done before the server is killed
    command = f"{sys.executable} {FAKE} {{port}} --latency 0.02 --seed 77"
    head = at.start("--spawn", command, "--per-worker", "2")
    until(lambda: at.journaled() >= 10)
    (mine,) = children(head.pid)
    os.kill(mine, signal.SIGKILL)
    until(lambda: children(head.pid) not in ([], [mine]))
    (other,) = children(head.pid)
    code, said = at.end(head)
    assert code == 0 and "was ended by SIGKILL; another is started" in said, said
    assert at.answers() == expected(300)
    assert not Path(f"/proc/{other}").exists()


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_the_head_imports_no_torch() -> None:
    code = "import sys, regrow.cli, regrow_batch.job; print([n for n in ('torch', 'numpy') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": SOURCE}, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_place_that_cannot_be_used_is_told_before_anything_is_sent(at: SetUpNotes) -> None:
    at.rows("one")
    (at.folder / "out.jsonl").write_text("my own")
    code, said = at.run_here("--workers", "http://127.0.0.1:9")
    assert code == 2 and "out.jsonl is there already, and no journal belongs to it" in said
    assert (at.folder / "out.jsonl").read_text() == "my own"
    assert json.loads((at.folder / "in.jsonl").read_text())["custom_id"] == "id-0"
