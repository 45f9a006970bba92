"""JSON Lines as a data set: every line that is not blank, once, and errors that name the place."""

import gzip
import json
import os
import pickle
import random
import re
import sys
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest

from regrow.core.errors import DataError, RegrowError, UsageError
from regrow.core.process.extras import install_line
from regrow.data.sources import rows
from regrow.data.sources.files import SourceFile
from regrow.data.sources.sets import JsonLines


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "regrow" / "data"


def _write(path: Path, numbers: range, blank: str = "") -> Path:
    text = "".join(json.dumps({"n": number}) + "\n" + blank for number in numbers)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def _numbers(dataset: JsonLines) -> list[int]:
    return [dataset[index]["n"] for index in range(len(dataset))]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.json.gz"])
@pytest.mark.parametrize("blank", ["", "\n", " \t\n\n", "\r\n"])
def test_every_line_that_is_not_blank_is_a_sample(tmp_path: Path, name: str, blank: str) -> None:
    dataset = JsonLines(_write(tmp_path / name, range(50), blank))
    assert _numbers(dataset) == list(range(50))
    assert dataset[-1] == {"n": 49}
    with pytest.raises(IndexError):
        dataset[50]


def test_files_come_in_the_order_given_and_those_of_a_glob_by_name(tmp_path: Path) -> None:
    for name, numbers in (("b.jsonl", range(3, 5)), ("a.jsonl", range(3)), ("c.jsonl.gz", range(5, 6))):
        _write(tmp_path / name, numbers)
    assert _numbers(JsonLines(str(tmp_path / "*.jsonl*"))) == [0, 1, 2, 3, 4, 5]
    assert _numbers(JsonLines([tmp_path / "c.jsonl.gz", tmp_path / "a.jsonl"])) == [5, 0, 1, 2]


def test_a_line_without_its_newline_and_a_byte_order_mark_are_no_matter(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"n": 0}\n{"n": 1}')
    assert _numbers(JsonLines(tmp_path / "a.jsonl")) == [0, 1]


def test_what_python_writes_beyond_the_standard_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"x": float("inf"), "big": 10**30, "odd": "\ud800"}))
    assert JsonLines(tmp_path / "a.jsonl")[0] == {"x": float("inf"), "big": 10**30, "odd": "\ud800"}


def test_a_transform_gets_the_dict(tmp_path: Path) -> None:
    dataset = JsonLines(_write(tmp_path / "a.jsonl", range(3)), transform=lambda record: record["n"] * 10)
    assert [dataset[0], dataset[2]] == [0, 20]


@pytest.mark.parametrize("protocol", ["file", "memory"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_url_is_read(tmp_path: Path, protocol: str, name: str) -> None:
    path = _write(tmp_path / name, range(9))
    url = f"file://{path}"
    if protocol == "memory":
        url = f"memory://{tmp_path.name}/{name}"
        with fsspec.open(url, "wb") as file:
            file.write(path.read_bytes())
    dataset = JsonLines(url)
    assert _numbers(dataset) == list(range(9))
    assert _numbers(JsonLines(url.replace("a.json", "?.json"))) == list(range(9))


@pytest.mark.parametrize("block", [1, 7, 64])
def test_lines_are_found_wherever_blocks_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(rows, "_BLOCK", block)
    dataset = JsonLines(_write(tmp_path / "a.jsonl", range(30), " \n\n"))
    assert _numbers(dataset) == list(range(30))
    (tmp_path / "b.jsonl").write_bytes(b"\n \n{}\n" * 5 + b"oops")
    with pytest.raises(DataError, match="b.jsonl, line 16: "):
        JsonLines(tmp_path / "b.jsonl")[5]


# --- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"n": oops}', "Expecting value at column 7; the line starts {"),
        (b'{"n": 1', "the line starts {"),
        (b'{"n": "\xff"}', "not UTF-8"),
        (b"\0" * 64, "it has zero bytes in the place of text"),
        (b"\0" * 64 + b'{"n": 1}', "it has zero bytes in the place of text"),
        (b"[1, 2]", "it holds an array, not an object"),
        (b"null", "it holds null, not an object"),
        (b"12", "it holds a number, not an object"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_malformed_line_is_named_by_file_and_line(tmp_path: Path, name: str, line: bytes, said: str) -> None:
    text = b'{"n": 0}\n\n  \n{"n": 1}\n' + line + b'\n{"n": 2}\n'
    path = tmp_path / name
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    dataset = JsonLines(path)
    assert (dataset[1], dataset[3]) == ({"n": 1}, {"n": 2})
    with pytest.raises(DataError) as raised:
        dataset[2]
    assert f"{path}, line 5: " in str(raised.value)
    assert said in str(raised.value)
    assert len(str(raised.value)) < 400


def test_a_json_array_is_told_from_json_lines(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[\n{"n": 0}\n]\n')
    with pytest.raises(DataError, match="one JSON array"):
        JsonLines(tmp_path / "a.json")[0]


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        ("none.jsonl", "there is no file .*none.jsonl"),
        ("none*.jsonl", r"no file matches .*none\*.jsonl"),
        (".", "is a folder"),
        ("empty.jsonl", "no rows in .*empty.jsonl"),
        ("blank.jsonl", "no rows in .*blank.jsonl"),
        ([], "no files were given"),
        ("odd://x/a.jsonl", "odd://x/a.jsonl cannot be used"),
        ("memory://nowhere/a.jsonl", "there is no file"),
    ],
)
def test_what_is_not_there_is_said_when_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paths: Any, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "blank.jsonl").write_text("\n \n\t\n")
    with pytest.raises(UsageError, match=said):
        JsonLines(paths)


def test_an_empty_file_beside_others_is_no_matter(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("")
    _write(tmp_path / "b.jsonl", range(2))
    assert _numbers(JsonLines(str(tmp_path / "*.jsonl"))) == [0, 1]


def test_a_damaged_gzip_file_is_named(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl.gz", range(1000))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"a.jsonl.gz cannot be read: "):
        JsonLines(path)


# --- copies ------------------------------------------------------------------------------------------------------


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were gone through."""
    names: list[str] = []
    plain = SourceFile.open

    def noted(self: SourceFile, **words: Any) -> Any:
        names.append(self.name)
        return plain(self, **words)

    monkeypatch.setattr(SourceFile, "open", noted)
    return names


def test_lines_are_copied_once(tmp_path: Path, read: list[str]) -> None:
    path = _write(tmp_path / "a.jsonl", range(100))
    datasets = [JsonLines(path) for _ in range(3)]
    again = pickle.loads(pickle.dumps(datasets[0]))
    assert [_numbers(dataset) for dataset in (*datasets, again)] == [list(range(100))] * 4
    assert read == [str(path)]


def test_what_was_opened_stays_as_it_was_and_the_next_start_reads_the_new(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", range(100))
    dataset = JsonLines(path)
    _write(path, range(7))
    assert _numbers(dataset) == list(range(100))
    assert _numbers(JsonLines(path)) == list(range(7))
    path.unlink()
    assert dataset[99] == {"n": 99}


def test_a_pickled_data_set_does_not_carry_its_lines(tmp_path: Path) -> None:
    dataset = JsonLines(_write(tmp_path / "a.jsonl", range(10_000)))
    assert dataset[0] == {"n": 0}
    assert len(pickle.dumps(dataset)) < 2000


def test_two_files_of_one_name_do_not_share_a_copy(tmp_path: Path) -> None:
    paths = [tmp_path / "x" / "a.jsonl", tmp_path / "y" / "a.jsonl"]
    for number, path in enumerate(paths):
        path.parent.mkdir()
        _write(path, range(number * 10, number * 10 + 5))
        os.utime(path, ns=(0, 0))
    assert [_numbers(JsonLines(path))[0] for path in paths] == [0, 10]


def test_without_a_folder_for_the_copy_it_says_what_to_give(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RegrowError, match="cache_dir="):
        JsonLines(_write(tmp_path / "a.jsonl", range(9)), cache_dir=tmp_path / "file" / "cache")


def test_the_fingerprint_changes_with_the_files(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", range(100))
    first = JsonLines(path).fingerprint()
    assert JsonLines(path).fingerprint() == first
    other = _write(tmp_path / "b.jsonl", range(100))
    os.utime(other, ns=(0, path.stat().st_mtime_ns))
    assert JsonLines(other).fingerprint() != first
    os.utime(path, ns=(0, 5))
    assert JsonLines(path).fingerprint() != first


def test_threads_read_beside_each_other(tmp_path: Path) -> None:
    for number in range(10):
        _write(tmp_path / f"{number:03}.jsonl", range(number * 30, number * 30 + 30))
    dataset = JsonLines(str(tmp_path / "*.jsonl"))
    wrong: list[int] = []

    def read(seed: int) -> None:
        order = list(range(300))
        random.Random(seed).shuffle(order)
        wrong.extend(index for index in order if dataset[index]["n"] != index)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_file_that_changes_while_it_is_gone_through_is_not_remembered(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = _write(tmp_path / name, range(100))
    plain = SourceFile.open

    def changing(self: SourceFile, **words: Any) -> Any:
        opened = plain(self, **words)
        _write(path, range(200))
        return opened

    with monkeypatch.context() as patch:
        patch.setattr(SourceFile, "open", changing)
        with pytest.raises(DataError, match=f"{name} has .* bytes now"):
            JsonLines(path)
    assert not list(cache.rglob("*.arrow"))
    assert _numbers(JsonLines(path)) == list(range(200))


def test_without_datasets_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write(tmp_path / "a.jsonl", range(9))
    monkeypatch.delitem(sys.modules, "regrow.data.sources.rows")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=rf"need Hugging Face datasets, .* \({re.escape(install_line('data'))}\)"):
        JsonLines(path)
