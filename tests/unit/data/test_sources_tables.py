"""Parquet and Arrow files as data sets: every row once, by block, and errors that name the file."""

import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet
import pytest

from regrow.core.errors import DataError, UsageError
from regrow.data.sources.sets import Arrow, FileRows, Parquet

ROWS, BLOCK = 100, 7


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _table(numbers: range = range(ROWS)) -> pa.Table:
    return pa.table({"n": list(numbers), "text": [f"row {n}" for n in numbers], "ids": [[n, n + 1] for n in numbers]})


def _parquet(path: Path, table: pa.Table) -> None:
    pa.parquet.write_table(table, path, row_group_size=BLOCK)


def _feather(path: Path, table: pa.Table) -> None:
    pa.feather.write_feather(table, path, compression="uncompressed", chunksize=BLOCK)


def _compressed(path: Path, table: pa.Table) -> None:
    pa.feather.write_feather(table, path, compression="lz4", chunksize=BLOCK)


def _stream(path: Path, table: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=BLOCK)


Kind = tuple[type[Any], str, Callable[[Path, pa.Table], None]]
KINDS = [
    pytest.param((Parquet, "a.parquet", _parquet), id="parquet"),
    pytest.param((Arrow, "a.feather", _feather), id="feather"),
    pytest.param((Arrow, "a.feather", _compressed), id="compressed"),
    pytest.param((Arrow, "a.arrow", _stream), id="stream"),
]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    made: Kind = request.param
    return made


@pytest.fixture
def path(tmp_path: Path, kind: Kind) -> Path:
    kind[2](tmp_path / kind[1], _table())
    return tmp_path / kind[1]


def test_every_row_is_a_dict_of_python_values(kind: Kind, path: Path) -> None:
    dataset: FileRows = kind[0](path)
    assert [dataset[index] for index in range(len(dataset))] == _table().to_pylist()
    assert dataset[-1]["n"] == ROWS - 1
    with pytest.raises(IndexError):
        dataset[ROWS]


def test_a_transform_gets_the_row(kind: Kind, path: Path) -> None:
    dataset: FileRows = kind[0](path, lambda record: record["n"] * 2)
    assert dataset[3] == 6


def test_columns_are_chosen(kind: Kind, path: Path) -> None:
    assert kind[0](path, columns=["ids", "n"])[5] == {"ids": [5, 6], "n": 5}
    with pytest.raises(UsageError, match=r"has no column 'm' \(it has n, text, ids\)"):
        kind[0](path, columns=["m"])


def test_several_files_follow_each_other(kind: Kind, tmp_path: Path) -> None:
    suffix = Path(kind[1]).suffix
    for number in range(80):
        kind[2](tmp_path / f"{number:02}{suffix}", _table(range(number * 3, number * 3 + 3)))
    dataset: FileRows = kind[0](str(tmp_path / f"*{suffix}"))
    order = list(range(240))
    random.Random(1).shuffle(order)
    assert [dataset[index]["n"] for index in order] == order


def test_it_is_pickled_without_what_it_has_opened(kind: Kind, path: Path) -> None:
    dataset: FileRows = kind[0](path)
    assert dataset[50]["n"] == 50
    again = pickle.loads(pickle.dumps(dataset))
    assert (again[50]["n"], again.fingerprint()) == (50, dataset.fingerprint())


def test_a_url_is_read(kind: Kind, path: Path) -> None:
    url = f"memory://{path.parent.name}/{path.name}"
    with fsspec.open(url, "wb") as file:
        file.write(path.read_bytes())
    dataset: FileRows = kind[0](url)
    assert [dataset[index]["n"] for index in range(ROWS)] == list(range(ROWS))


def test_the_fingerprint_changes_with_file_and_columns(kind: Kind, path: Path) -> None:
    first = kind[0](path).fingerprint()
    assert kind[0](path).fingerprint() == first
    assert kind[0](path, columns=["n"]).fingerprint() != first
    os.utime(path, ns=(0, 5))
    assert kind[0](path).fingerprint() != first


def test_a_data_set_without_rows_is_said_at_once(kind: Kind, tmp_path: Path) -> None:
    kind[2](tmp_path / kind[1], _table(range(0)))
    with pytest.raises(UsageError, match=f"no rows in .*{kind[1]}"):
        kind[0](tmp_path / kind[1])


@pytest.mark.parametrize("content", [b"", b"not a table at all, but long enough to have a footer"])
def test_a_file_of_something_else_is_named(kind: Kind, tmp_path: Path, content: bytes) -> None:
    (tmp_path / kind[1]).write_bytes(content)
    with pytest.raises(DataError, match=f"{kind[1]} cannot be read: "):
        kind[0](tmp_path / kind[1])


def test_a_name_of_another_kind_is_refused(kind: Kind, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("n\n1\n")
    with pytest.raises(UsageError, match=r"a.csv is none of \."):
        kind[0](tmp_path / "a.csv")


def test_arrow_files_are_mapped_where_they_lie_and_the_rest_is_copied_once(kind: Kind, path: Path) -> None:
    dataset: FileRows = kind[0](path)
    cache = Path(os.environ["XDG_CACHE_HOME"])
    copies = list(cache.rglob("*.arrow"))
    in_place = kind[0] is Arrow and kind[2] is not _compressed
    assert len(copies) == (0 if in_place else 1)
    maps = Path("/proc/self/maps").read_text()
    assert str(path if in_place else copies[0]) in maps
    assert dataset[1]["n"] == 1
    assert [kind[0](path)[2]["n"], len(list(cache.rglob("*.arrow")))] == [2, len(copies)]
