"""Hugging Face `datasets` as they are: map-style data sets with a fingerprint of their own."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from regrow.data.dataloader import DataLoader
from regrow.data.loader import StepLoader
from regrow.data.sources.sets import Arrow

os.environ.setdefault("HF_HUB_OFFLINE", "1")
datasets: Any = pytest.importorskip("datasets")


def _numbers(count: int = 40) -> Any:
    return datasets.Dataset.from_dict({"n": list(range(count)), "text": [f"row {n}" for n in range(count)]})


def _steps(dataset: Any, count: int, world: int = 1, **words: Any) -> list[Any]:
    loader = StepLoader(DataLoader(dataset, batch_size=4, shuffle=True, **words), seed=3)
    try:
        return [loader.batch(step, rank, world) for step in range(count) for rank in range(world)]
    finally:
        loader.close()


def test_a_data_set_is_read_like_any_other() -> None:
    batches = _steps(_numbers(), 10)
    assert sorted(n for batch in batches for n in batch["n"].tolist()) == list(range(40))
    assert all(text == f"row {n}" for batch in batches for n, text in zip(batch["n"], batch["text"], strict=True))


def test_any_world_reads_the_same_samples() -> None:
    alone, two = _steps(_numbers(), 10), _steps(_numbers(), 5, world=2)
    assert {n for batch in alone for n in batch["n"].tolist()} == {n for batch in two for n in batch["n"].tolist()}


@pytest.mark.parametrize("workers", [0, 2])
def test_formats_and_mapped_columns_reach_the_batch(workers: int) -> None:
    dataset = _numbers().map(lambda row: {"twice": row["n"] * 2}, load_from_cache_file=False).with_format("torch")
    for batch in _steps(dataset, 2, num_workers=workers):
        assert torch.equal(batch["twice"], batch["n"] * 2)


def test_what_it_saves_is_read_as_arrow_files(tmp_path: Path) -> None:
    _numbers().save_to_disk(str(tmp_path / "saved"), num_shards=3)
    saved = Arrow(str(tmp_path / "saved" / "*.arrow"))
    assert [saved[index]["n"] for index in range(len(saved))] == list(range(40))


def test_its_fingerprint_tells_versions_apart() -> None:
    assert _numbers()._fingerprint == _numbers()._fingerprint
    assert _numbers().map(lambda row: {"m": 1}, load_from_cache_file=False)._fingerprint != _numbers()._fingerprint
