"""Data sets in files, read by many processes at once: copies are made once, and no open file is shared by a fork."""

import gzip
import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from torch.utils.data import DataLoader, Dataset

from regrow.data.packing.packer import PackOptions, pack
from regrow.data.sources import rows
from regrow.data.sources.files import SourceFile
from regrow.data.sources.sets import Arrow, JsonLines, Parquet
from regrow.data.tokens import PackedTokens

WORKERS = {"fork": 2, "spawn": 1}
"""One that is spawned imports torch for itself, which takes seconds."""
forking = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "regrow" / "data"


@pytest.fixture
def zipped(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps({"n": n}) + "\n" for n in range(20_000)).encode()))
    return path


def _open_counting(path: Path, start: Any, answer: Connection) -> None:
    read = []
    plain = SourceFile.open

    def counted(self: SourceFile, **words: Any) -> Any:
        read.append(1)
        return plain(self, **words)

    setattr(SourceFile, "open", counted)  # noqa: B010
    start.wait(60)
    dataset = JsonLines(path)
    answer.send((len(read), len(dataset), dataset[19_999]))


def test_of_many_processes_one_copies(zipped: Path) -> None:
    start = forking.Barrier(4)
    pipes = [forking.Pipe(duplex=False) for _ in range(4)]
    processes = [forking.Process(target=_open_counting, args=(zipped, start, pipe[1])) for pipe in pipes]
    for process in processes:
        process.start()
    answers = []
    for pipe, process in zip(pipes, processes, strict=True):
        assert pipe[0].poll(60)
        answers.append(pipe[0].recv())
        process.join(30)
    assert sum(read for read, _, _ in answers) == 1
    assert {(size, record["n"]) for _, size, record in answers} == {(20_000, 19_999)}


def _stop_in_the_middle(path: Path, answer: Connection) -> None:
    def halfway(number: int, file: SourceFile) -> Any:
        tables = plain(number, file)
        yield next(tables)
        yield next(tables).slice(0, 1000)
        answer.send("halfway")
        signal.pause()

    plain = rows._read_lines
    rows._read_lines = halfway
    JsonLines(path)


def test_one_that_is_killed_while_it_copies_leaves_no_half_copy(zipped: Path) -> None:
    here, there = forking.Pipe(duplex=False)
    process = forking.Process(target=_stop_in_the_middle, args=(zipped, there))
    process.start()
    assert here.poll(60)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(30)
    dataset = JsonLines(zipped)
    assert (len(dataset), dataset[19_999]) == (20_000, {"n": 19_999})


def _json_lines(folder: Path) -> Dataset[Any]:
    (folder / "a.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(64)))
    return JsonLines(folder / "a.jsonl")


def _parquet(folder: Path) -> Dataset[Any]:
    pa.parquet.write_table(pa.table({"n": range(64)}), folder / "a.parquet", row_group_size=5)
    return Parquet(folder / "a.parquet")


def _arrow(folder: Path) -> Dataset[Any]:
    pa.feather.write_feather(pa.table({"n": range(64)}), folder / "a.feather", chunksize=5)
    return Arrow(folder / "a.feather")


@pytest.mark.parametrize("made", [_json_lines, _parquet, _arrow])
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_loader_workers_read_what_the_script_has_opened(
    tmp_path: Path, made: Callable[[Path], Dataset[Any]], start: str
) -> None:
    dataset = made(tmp_path)
    assert dataset[0] == {"n": 0}  # opened here, before the workers are
    loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=WORKERS[start], multiprocessing_context=start)
    assert sorted(n for batch in loader for n in batch["n"].tolist()) == list(range(64))


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_loader_workers_read_a_packed_corpus(tmp_path: Path, start: str) -> None:
    from rich.console import Console

    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "abcdefgh" * 8}))
    pack(PackOptions([str(tmp_path / "a.jsonl")], tmp_path / "corpus", "bytes", workers=1), Console(quiet=True))
    dataset = PackedTokens(tmp_path / "corpus", 4)
    assert dataset[0]["tokens"].tolist() == list(b"abcde")
    loader = DataLoader(dataset, batch_size=5, num_workers=WORKERS[start], multiprocessing_context=start)
    assert [row for batch in loader for row in batch["tokens"].tolist()] == [
        dataset[index]["tokens"].tolist() for index in range(len(dataset))
    ]
