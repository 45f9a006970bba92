"""The cache's view of these data sets: the same data have one identity; other data or another transform another."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from rich.console import Console
from torch.utils.data import default_collate

import regrow.data
from regrow.core.messages.data import OrderSpec, SourceSpec
from regrow.data.cache.identity import describe
from regrow.data.packing.packer import PackOptions, pack

Make = Callable[[Path, Any], Any]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _json_lines(folder: Path, transform: Any) -> Any:
    return regrow.data.JsonLines(folder / "a.jsonl", transform)


def _parquet(folder: Path, transform: Any) -> Any:
    return regrow.data.Parquet(folder / "a.parquet", transform)


def _arrow(folder: Path, transform: Any) -> Any:
    return regrow.data.Arrow(folder / "a.feather", transform)


def _rows(count: int) -> list[dict[str, str]]:
    return [{"text": f"row {number}"} for number in range(count)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, _rows(20))))
    pa.parquet.write_table(pa.Table.from_pylist(_rows(20)), tmp_path / "a.parquet")
    pa.feather.write_feather(pa.Table.from_pylist(_rows(20)), tmp_path / "a.feather")
    return tmp_path


def _identity(dataset: Any) -> bytes:
    return describe(dataset, default_collate, OrderSpec("ordered", 1, [SourceSpec("", len(dataset))], 2), 1).value


def _first(record: dict[str, str]) -> str:
    return record["text"][0]


def _last(record: dict[str, str]) -> str:
    return record["text"][-1]


@pytest.mark.parametrize("make", [_json_lines, _parquet, _arrow])
def test_files_have_an_identity(folder: Path, make: Make) -> None:
    dataset = make(folder, _first)
    first = _identity(dataset)
    assert dataset[3] == "r"
    assert _identity(dataset) == first  # reading changes nothing
    assert _identity(make(folder, _first)) == first
    assert _identity(make(folder, _last)) != first
    for path in folder.glob("a.*"):
        os.utime(path, ns=(0, 0))
    assert _identity(make(folder, _first)) != first


def test_a_packed_corpus_has_an_identity_wherever_it_lies(folder: Path) -> None:
    for name in ("one", "two"):
        pack(PackOptions([str(folder / "a.jsonl")], folder / name, "bytes", workers=1), Console(quiet=True))
    first = _identity(regrow.data.PackedTokens(folder / "one", 8))
    assert _identity(regrow.data.PackedTokens(folder / "two", 8)) == first
    assert _identity(regrow.data.PackedTokens(folder / "one", 8, stride=4)) != first
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, _rows(21))))
    pack(PackOptions([str(folder / "a.jsonl")], folder / "three", "bytes", workers=1), Console(quiet=True))
    assert _identity(regrow.data.PackedTokens(folder / "three", 8)) != first


def test_hugging_face_data_sets_have_an_identity() -> None:
    datasets: Any = pytest.importorskip("datasets")
    first = _identity(datasets.Dataset.from_list(_rows(20)))
    assert _identity(datasets.Dataset.from_list(_rows(20))) == first
    mapped = datasets.Dataset.from_list(_rows(20)).map(lambda row: {"text": "x"}, load_from_cache_file=False)
    assert _identity(mapped) != first
