"""Batches that are sliced out of a mapped corpus: what torch would make of its samples, and only where that is so."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.corpora import tiny_corpus
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import RandomSampler, default_collate

import regrow
from regrow.core.errors import DataError
from regrow.core.messages.data import BatchRecord
from regrow.data.cache.entry import digest_of
from regrow.data.described import cached_loader
from regrow.data.inplace import InPlaceSource, is_in_place
from regrow.data.loader import StepLoader
from regrow.data.mapstyle import MapStyleSource
from regrow.data.mixed import Mixture
from regrow.data.tokens import PackedTokens
from regrow.data.walks import ShareWalk

TOKENS, LENGTH = 3000, 12
KINDS: list[dict[str, Any]] = [
    {},
    {"stride": 5},
    {"stride": 31},
    {"boundaries": True},
    {"dtype": None},
    {"dtype": torch.int32, "boundaries": True},
]


@pytest.fixture(scope="module", params=["uint16", "uint32"])
def corpus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_corpus(tmp_path_factory.mktemp("corpus") / "tokens", TOKENS, dtype=request.param)


@pytest.mark.parametrize("words", KINDS)
def test_a_batch_is_what_torch_makes_of_its_samples(corpus: Path, words: dict[str, Any]) -> None:
    dataset = PackedTokens(corpus, LENGTH, **words)
    assert len(dataset.corpus.shards) > 3
    indices = [*np.random.default_rng(1).permutation(len(dataset)).tolist(), 0, -1]
    made, expected = dataset.batch(indices), default_collate([dataset[index] for index in indices])
    assert list(made) == list(expected)
    assert all(made[name].dtype == expected[name].dtype for name in made)
    assert all(torch.equal(made[name], expected[name]) for name in made)
    assert digest_of(made) == digest_of(expected)
    for strange in (len(dataset), -len(dataset) - 1):
        with pytest.raises(IndexError, match=f"sample {strange} of"):
            dataset.batch([0, strange])


def test_a_write_into_a_batch_stays_there(corpus: Path) -> None:
    dataset = PackedTokens(corpus, LENGTH, dtype=None)
    before = dataset.batch([3])["tokens"].clone()
    dataset.batch([3])["tokens"].zero_()
    assert torch.equal(dataset.batch([3])["tokens"], before)
    assert torch.equal(dataset[3]["tokens"], before[0])


def _mixture(corpus: Path, other: int = LENGTH) -> Mixture:
    sources = {"a": PackedTokens(corpus, LENGTH), "b": PackedTokens(corpus, other, stride=3)}
    return Mixture(sources, weights={"a": 2, "b": 1})


def _loaders(corpus: Path) -> dict[str, Any]:
    dataset = PackedTokens(corpus, LENGTH)
    short = PackedTokens(corpus, LENGTH, stride=250)
    return {
        "shuffled": regrow.DataLoader(dataset, batch_size=5, shuffle=True),
        "in order": regrow.DataLoader(dataset, batch_size=5),
        "a global batch": regrow.DataLoader(dataset, global_batch_size=15, shuffle=True, remainder="wrap"),
        "epochs": regrow.DataLoader(short, batch_size=2, shuffle=True, remainder="drop"),
        "torch's": TorchLoader(dataset, batch_size=5, shuffle=True),
        "a sampler": TorchLoader(dataset, batch_size=5, sampler=RandomSampler(dataset, replacement=True)),
        "a mixture": regrow.DataLoader(_mixture(corpus), batch_size=5, shuffle=True),
        "cached": regrow.cached(TorchLoader(dataset, batch_size=5, shuffle=True)),
    }


@pytest.mark.parametrize(
    "kind", ["shuffled", "in order", "a global batch", "epochs", "torch's", "a sampler", "a mixture", "cached"]
)
def test_steps_read_the_same_as_through_a_pipeline_of_samples(corpus: Path, kind: str) -> None:
    loader = _loaders(corpus)[kind]
    inner = getattr(loader, "loader", loader)
    ours, pipeline = InPlaceSource(inner, seed=3), MapStyleSource(inner, seed=3)
    assert ours.spec == pipeline.spec
    for step, rank, world in [(0, 0, 1), (1, 0, 1), (1, 0, 3), (2, 2, 3), (7, 1, 2), (8, 1, 2), (8, 1, 2), (4, 0, 1)]:
        ours.seek(step, rank, world)
        mine, its = ours.fetch(step, rank, world), pipeline.fetch(step, rank, world)
        assert mine.samples == its.samples
        assert digest_of(mine.batch) == digest_of(its.batch)
    assert isinstance(StepLoader(loader, seed=3)._source, InPlaceSource)
    assert isinstance(StepLoader(loader, seed=3, micro=True)._source, InPlaceSource)
    assert cached_loader(loader, seed=3) is None, "there is nothing for a cache to keep"


@pytest.mark.parametrize("kind", ["shuffled", "a mixture"])
def test_micro_batches_are_those_of_a_pipeline_of_samples(corpus: Path, kind: str) -> None:
    loader, walk = _loaders(corpus)[kind], ShareWalk((2, 3))
    one, pipeline = StepLoader(loader, seed=3, micro=True), MapStyleSource(loader, seed=3)
    one.follow(walk)
    place = (4, 2, 6)
    one.seek(*place)
    for _ in range(5):
        expected = pipeline.fetch(*place)
        assert digest_of(one.batch(*place)) == digest_of(expected.batch)
        assert one.record == BatchRecord(place[1], 6, digest_of(expected.batch), expected.samples)
        place = walk.after(place)
    assert [record.share for record in one.records(6, [(2, 6), (3, 6)])] == [2]


class Cut(PackedTokens):
    """Samples of a script's own making."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: part[:3] for name, part in super().__getitem__(index).items()}


def test_what_a_script_computes_on_the_way_is_computed(corpus: Path) -> None:
    dataset = PackedTokens(corpus, LENGTH)
    computed = [
        regrow.DataLoader(Cut(corpus, LENGTH), batch_size=5),
        regrow.DataLoader(dataset, batch_size=5, collate_fn=lambda samples: samples),
        regrow.DataLoader(dataset, batch_size=5, worker_init_fn=lambda worker: None),
        regrow.DataLoader(_mixture(corpus, other=LENGTH + 1), batch_size=5),
        regrow.DataLoader(Mixture({"a": dataset, "b": list(range(9))}, weights={"a": 1, "b": 1}), batch_size=5),
    ]
    assert [is_in_place(loader) for loader in computed] == [False] * len(computed)
    assert all(cached_loader(loader, seed=3) is not None for loader in computed)


def test_a_damaged_corpus_is_named(tmp_path: Path) -> None:
    folder = tiny_corpus(tmp_path / "corpus", TOKENS)
    source = InPlaceSource(regrow.DataLoader(PackedTokens(folder, LENGTH), batch_size=100), seed=3)
    shard = folder / "tokens-000000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(DataError, match=f"{shard} has"):
        source.fetch(0, 0, 1)
