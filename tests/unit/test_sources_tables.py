"""Parquet and Arrow files as data sets: every row once, by block, and errors that name the file."""

import builtins
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
from regrow.data.sources.arrow import Arrow
from regrow.data.sources.parquet import Parquet
from regrow.data.sources.tables import Tables

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
    dataset: Tables = kind[0](path)
    assert [dataset[index] for index in range(len(dataset))] == _table().to_pylist()
    assert dataset[-1]["n"] == ROWS - 1
    with pytest.raises(IndexError):
        dataset[ROWS]


def test_a_batch_is_read_at_once_and_in_its_order(kind: Kind, path: Path) -> None:
    dataset: Tables = kind[0](path, keep=1)
    wanted = [random.Random(0).randrange(ROWS) for _ in range(50)]
    assert [record["n"] for record in dataset.__getitems__(wanted)] == wanted


def test_with_a_transform_samples_are_read_one_by_one(kind: Kind, path: Path) -> None:
    dataset: Tables = kind[0](path, lambda record: record["n"] * 2)
    assert dataset[3] == 6
    assert not hasattr(dataset, "__getitems__")


def test_columns_are_chosen(kind: Kind, path: Path) -> None:
    assert kind[0](path, columns=["ids", "n"])[5] == {"ids": [5, 6], "n": 5}
    with pytest.raises(UsageError, match=r"has no column 'm' \(it has n, text, ids\)"):
        kind[0](path, columns=["m"])


def test_several_files_follow_each_other(kind: Kind, tmp_path: Path) -> None:
    suffix = Path(kind[1]).suffix
    for number in range(80):
        kind[2](tmp_path / f"{number:02}{suffix}", _table(range(number * 3, number * 3 + 3)))
    dataset: Tables = kind[0](str(tmp_path / f"*{suffix}"))
    order = list(range(240))
    random.Random(1).shuffle(order)
    assert [dataset[index]["n"] for index in order] == order


def test_it_is_pickled_without_what_it_has_opened(kind: Kind, path: Path) -> None:
    dataset: Tables = kind[0](path)
    assert dataset[50]["n"] == 50
    again = pickle.loads(pickle.dumps(dataset))
    assert (again[50]["n"], again.fingerprint()) == (50, dataset.fingerprint())


def test_a_url_is_read(kind: Kind, path: Path) -> None:
    url = f"memory://{path.parent.name}/{path.name}"
    with fsspec.open(url, "wb") as file:
        file.write(path.read_bytes())
    dataset: Tables = kind[0](url)
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
    with pytest.raises(DataError, match=f"{kind[1]} cannot be read as"):
        kind[0](tmp_path / kind[1])


def test_a_name_of_another_kind_is_refused(kind: Kind, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("n\n1\n")
    with pytest.raises(UsageError, match=r"a.csv is none of \."):
        kind[0](tmp_path / "a.csv")


@pytest.mark.parametrize("opened", [False, True])
def test_a_file_that_shrank_is_named_with_both_sizes(kind: Kind, path: Path, opened: bool) -> None:
    dataset: Tables = kind[0](path, keep=1)
    size = path.stat().st_size
    if opened:
        assert dataset[0]["n"] == 0
    os.truncate(path, size // 3)
    with pytest.raises(DataError, match=f"{path} has {size // 3} bytes now, but had {size} when it was opened"):
        dataset[ROWS - 1]


def test_a_process_keeps_the_last_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _parquet(tmp_path / "a.parquet", _table())
    read: list[int] = []
    plain = pa.parquet.ParquetFile.read_row_group

    def counted(self: Any, group: int, **words: Any) -> Any:
        read.append(group)
        return plain(self, group, **words)

    monkeypatch.setattr(pa.parquet.ParquetFile, "read_row_group", counted)
    dataset = Parquet(tmp_path / "a.parquet", keep=2)
    for index in [0, 1, BLOCK, 0, BLOCK + 1, 2 * BLOCK, BLOCK, 0]:
        assert dataset[index]["n"] == index
    assert read == [0, 1, 2, 0]


def test_pyarrow_is_asked_for_where_it_is_missing(path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = builtins.__import__

    def without(name: str, *rest: Any, **words: Any) -> Any:
        if name.partition(".")[0] == "pyarrow":
            raise ModuleNotFoundError(f"No module named {name!r}")
        return plain(name, *rest, **words)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"need pyarrow, which is not installed \(pip install 'regrow\[data\]'\)"):
        kind[0](path)
