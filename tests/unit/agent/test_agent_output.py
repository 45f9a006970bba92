import os
import time
from pathlib import Path

import pytest

from regrow.agent.output import OutputPump
from regrow.core.ids import Rank, WorkerId

WORKER = WorkerId("w0")


class Stage:
    """A pump that shows into files, and one worker's pipes."""

    def __init__(self, folder: Path, rank: int | None, *, forward: bool = True, headed: bool = False) -> None:
        self.folder = folder
        self.out = os.open(folder / "out", os.O_RDWR | os.O_CREAT)
        self.pump = OutputPump(folder / "logs", forward=forward, shown=(self.out, self.out))
        self.pump.start()
        reader, self.stdout = os.pipe()
        error_reader, self.stderr = os.pipe()
        self.pump.add(WORKER, None if rank is None else Rank(rank), (reader, error_reader), headed=headed)

    def say(self, text: bytes) -> None:
        while text:
            text = text[os.write(self.stdout, text) :]

    def end(self) -> bytes:
        os.close(self.stdout)
        os.close(self.stderr)
        self.pump.finish(WORKER)
        self.pump.close(within=10.0)
        os.close(self.out)
        return (self.folder / "out").read_bytes()


def test_every_line_carries_its_rank(tmp_path: Path) -> None:
    stage = Stage(tmp_path, 3)
    stage.say(b"one\ntwo\n\n")
    assert stage.end() == b"[rank 3] one\n[rank 3] two\n[rank 3] \n"
    assert (tmp_path / "logs/rank3.log").read_bytes() == b"one\ntwo\n\n"


def test_an_unfinished_line_is_shown_at_the_end(tmp_path: Path) -> None:
    stage = Stage(tmp_path, 0)
    stage.say(b"no newline")
    assert stage.end() == b"[rank 0] no newline\n"
    assert (tmp_path / "logs/rank0.log").read_bytes() == b"no newline"


@pytest.mark.parametrize("told", [True, False])
def test_a_file_that_begins_with_a_line_of_ours_does_so_however_early_a_worker_prints(
    tmp_path: Path, told: bool
) -> None:
    stage = Stage(tmp_path, 0, headed=True)
    stage.say(b"early\n")
    time.sleep(0.1)  # so that a pump that takes it has taken it
    if told:
        stage.pump.head(WORKER, "worker w0")
    assert stage.end() == b"[rank 0] early\n", "it is not lost where nobody says a word"
    lines = (tmp_path / "logs/rank0.log").read_bytes().splitlines()
    assert [line[:3] for line in lines] == [b"===", b"ear"] if told else [b"ear"]


def test_a_line_of_megabytes_and_binary_junk_survive(tmp_path: Path) -> None:
    stage = Stage(tmp_path, 0)
    junk = bytes(byte for byte in range(256) if byte != 10) * 12_000
    stage.say(junk + b"\n")
    assert stage.end() == b"[rank 0] " + junk + b"\n"
    assert (tmp_path / "logs/rank0.log").read_bytes() == junk + b"\n"


def test_a_standby_is_heard_when_it_takes_a_rank(tmp_path: Path) -> None:
    stage = Stage(tmp_path, None)
    stage.say(b"warming up\n")
    log = tmp_path / f"logs/standby-{WORKER}.log"
    while not log.exists() or b"warming" not in log.read_bytes():
        os.sched_yield()
    stage.pump.place(WORKER, Rank(2))
    ranks = tmp_path / "logs/rank2.log"
    while not ranks.exists() or b"takes rank" not in ranks.read_bytes():
        os.sched_yield()
    stage.say(b"at work\n")
    assert stage.end() == b"[rank 2] at work\n"
    words = ranks.read_bytes()
    assert 0 == words.index(b"warming up\n") < words.index(b"takes rank 2") < words.index(b"at work\n")
    assert not log.exists(), "one file an incident, for ever, otherwise"


def test_logs_of_standbys_that_never_had_a_rank_do_not_pile_up(tmp_path: Path) -> None:
    read, written = os.pipe()
    pump = OutputPump(tmp_path, forward=False, shown=(written, written))
    pump.start()
    for number in range(12):
        pipes = os.pipe(), os.pipe()
        for _, end in pipes:
            os.write(end, b"built\n")
            os.close(end)
        pump.add(WorkerId(f"w{number}"), None, (pipes[0][0], pipes[1][0]))
        pump.finish(WorkerId(f"w{number}"))
    pump.close(within=60.0)
    os.close(read)
    os.close(written)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"standby-w{n}.log" for n in range(4, 12))


def test_what_a_fenced_worker_writes_is_kept_but_not_shown(tmp_path: Path) -> None:
    stage = Stage(tmp_path, 0)
    stage.pump.hush(WORKER)
    stage.pump.keep(WORKER, "ours\n")
    while not (tmp_path / "logs/rank0.log").exists():
        os.sched_yield()
    stage.say(b"stacks\n")
    assert stage.end() == b""
    assert (tmp_path / "logs/rank0.log").read_bytes() == b"ours\nstacks\n"


def test_nothing_is_shown_where_nothing_is_to_be_forwarded(tmp_path: Path) -> None:
    stage = Stage(tmp_path, 0, forward=False)
    stage.say(b"x\n")
    assert stage.end() == b""
    assert (tmp_path / "logs/rank0.log").read_bytes() == b"x\n"


def test_a_reader_who_leaves_stops_nothing(tmp_path: Path) -> None:
    stage = Stage(tmp_path, 0)
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, stage.out)
    os.close(writer)
    stage.say(b"x\n" * 100_000)
    stage.end()
    assert (tmp_path / "logs/rank0.log").read_bytes() == b"x\n" * 100_000
