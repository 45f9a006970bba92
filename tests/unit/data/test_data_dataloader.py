"""`regrow.DataLoader` and `regrow.cached`: torch's loader in all but what they add."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import data as torch_data
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    WeightedRandomSampler,
)

import regrow
from regrow.core.errors import UsageError
from regrow.data.dataloader import Cached, on_made
from regrow.data.described import CachedLoader, cached_loader
from regrow.data.fetched import Fetched, Source
from regrow.data.loader import StepLoader
from regrow.data.mixed import Mixture


class Numbers(Dataset[Tensor]):
    def __init__(self, size: int = 40) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), float(torch.rand(()))])


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


@pytest.fixture
def numbered() -> Iterator[list[tuple[Any, int]]]:
    """The loaders that are made from now on."""
    seen: list[tuple[Any, int]] = []
    on_made(lambda loader, number: seen.append((loader, number)))
    yield seen
    on_made(None)


def samples(batch: Tensor) -> list[int]:
    return [int(row[0]) for row in batch]


# --- as torch's ------------------------------------------------------------------------------------------------------


def test_it_takes_what_torchs_loader_takes_and_means_the_same() -> None:
    ours = inspect.signature(regrow.DataLoader.__init__).parameters
    for name, theirs in inspect.signature(torch_data.DataLoader.__init__).parameters.items():
        assert (ours[name].default, ours[name].kind) == (theirs.default, theirs.kind)
    added = [name for name in ours if name not in inspect.signature(torch_data.DataLoader.__init__).parameters]
    assert added == ["global_batch_size", "remainder", "version"]
    assert all(ours[name].kind is inspect.Parameter.KEYWORD_ONLY for name in added)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": 3, "drop_last": True},
        {"batch_size": 7, "shuffle": True},
        {"batch_size": None},
        {"batch_sampler": [[1, 2], [3]]},
        {"num_workers": 1, "batch_size": 5, "prefetch_factor": 3, "persistent_workers": True},
    ],
)
def test_iterated_by_itself_it_is_torchs_loader(options: dict[str, Any]) -> None:
    def read(kind: Any) -> list[Any]:
        torch.manual_seed(3)
        generator = torch.Generator().manual_seed(1)
        return [batch.tolist() for batch in kind(Numbers(11), generator=generator, **options)]

    assert read(regrow.DataLoader) == read(torch_data.DataLoader)


@pytest.mark.parametrize("options", [{"shuffle": True}, {"num_workers": 1}, {"drop_last": True}])
def test_in_steps_it_gives_what_torchs_loader_gives(options: dict[str, Any]) -> None:
    ours = StepLoader(regrow.DataLoader(Numbers(), 4, **options), seed=2)
    theirs = StepLoader(torch_data.DataLoader(Numbers(), 4, **options), seed=2)
    wrapped = StepLoader(regrow.cached(torch_data.DataLoader(Numbers(), 4, **options)), seed=2)
    for step in (0, 1, 7, 3):
        batch = theirs.batch(step, 1, 3)
        assert torch.equal(ours.batch(step, 1, 3), batch)
        assert torch.equal(wrapped.batch(step, 1, 3), batch)
        assert ours.record == theirs.record == wrapped.record
    for one in (ours, theirs, wrapped):
        one.close()


def test_a_cached_loader_iterates_as_the_one_it_wraps() -> None:
    loader = torch_data.DataLoader(Numbers(10), batch_size=4)
    wrapped = regrow.cached(loader, version="2")
    assert (len(wrapped), wrapped.loader, wrapped.version) == (3, loader, "2")
    assert [samples(batch) for batch in wrapped] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("kind", [regrow.DataLoader, lambda *args: regrow.cached(torch_data.DataLoader(*args))])
def test_an_iterable_data_set_is_followed(kind: Any) -> None:
    one = StepLoader(kind(Stream(), 4), seed=0)
    assert [one.batch(step, 0, 1).tolist() for step in (0, 1, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    assert (one.spec.kind, one.record.samples) == ("opaque", "")
    one.close()


# --- constant global batch -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", [None, WeightedRandomSampler([1.0] * 40, 30, generator=torch.Generator())])
@pytest.mark.parametrize("remainder", [None, "drop"])
def test_a_global_batch_is_the_same_set_in_any_world(sampler: Any, remainder: str | None) -> None:
    options = {"shuffle": True} if sampler is None else {"sampler": sampler}
    loader = regrow.DataLoader(Numbers(), global_batch_size=12, remainder=remainder, **options)

    def whole(step: int, world: int) -> list[int]:
        read = []
        for rank in range(world):
            one = StepLoader(loader, seed=4)
            read.append(samples(one.batch(step, rank, world)))
            one.close()
        assert max(map(len, read)) - min(map(len, read)) <= 1
        return sorted(index for part in read for index in part)

    for step in (0, 3, 7):
        alone = whole(step, 1)
        for world in (2, 3, 4):
            assert whole(step, world) == alone
        # The last batch of an epoch may have 4 samples: then one of them is read twice.
        assert set(whole(step, 5)) == set(alone)


def test_iterated_by_itself_its_batches_are_global_ones() -> None:
    loader = regrow.DataLoader(Numbers(30), global_batch_size=12, remainder="drop")
    assert [len(batch) for batch in loader] == [12, 12]


def test_wrapped_batches_are_all_full() -> None:
    one = StepLoader(regrow.DataLoader(Numbers(10), global_batch_size=4, remainder="wrap"), seed=0)
    assert [samples(one.batch(step, 0, 1)) for step in (2, 3)] == [[8, 9, 0, 1], [2, 3, 4, 5]]
    two = StepLoader(regrow.DataLoader(Numbers(10), batch_size=2, remainder="wrap"), seed=0)
    assert samples(two.batch(2, 1, 2)) == [9, 1]


def test_a_sample_that_a_batch_takes_from_the_next_epoch_has_the_noise_of_that_epoch() -> None:
    one = StepLoader(regrow.DataLoader(Numbers(3), global_batch_size=6, remainder="wrap"), seed=0)
    batch = one.batch(0, 0, 1)
    assert samples(batch) == [0, 1, 2, 0, 1, 2]
    assert not torch.equal(batch[:3], batch[3:])


def test_a_world_larger_than_the_global_batch_is_refused() -> None:
    one = StepLoader(regrow.DataLoader(Numbers(), global_batch_size=3), seed=0)
    with pytest.raises(UsageError, match="global batch of 3 samples is less than the 4 shares"):
        one.batch(0, 0, 4)


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"batch_size": 8, "global_batch_size": 32}, "batch_size=8 and global_batch_size=32 were both given"),
        ({"batch_size": None, "global_batch_size": 32}, "batch_size=None and global_batch_size=32"),
        ({"global_batch_size": 0}, "global_batch_size=0 is no number"),
        ({"global_batch_size": 2.5}, "global_batch_size=2.5 is no number"),
        ({"global_batch_size": 4, "batch_sampler": [[0]]}, "makes the batches itself"),
        ({"global_batch_size": 4, "sampler": DistributedSampler(Numbers(), 1, 0)}, "DistributedSampler"),
        ({"drop_last": True, "remainder": "keep"}, "drop_last=True"),
        ({"drop_last": True, "remainder": "wrap"}, "drop_last=True"),
        ({"remainder": "most"}, "remainder='most' is none of 'keep', 'drop', 'wrap'"),
        ({"remainder": "wrap", "sampler": SequentialSampler(range(40))}, "a sampler or batch_sampler has its own"),
        ({"dataset": Stream(), "remainder": "wrap"}, "an iterable data set has its own"),
        ({"dataset": Stream(), "global_batch_size": 4}, "iterable data set"),
        ({"dataset": Mixture({"a": Numbers()}, weights={"a": 1}), "remainder": "keep"}, "all full"),
        ({"dataset": Numbers(0)}, "Numbers, is empty"),
        ({"dataset": Numbers(0), "shuffle": True}, "Numbers, is empty"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(options: dict[str, Any], cause: str) -> None:
    with pytest.raises(UsageError, match=cause) as refused:
        regrow.DataLoader(**{"dataset": Numbers(), **options})
    assert refused.value.hint


@pytest.mark.parametrize(
    ("loader", "cause"),
    [
        ([1, 2], "given a list, which is not a DataLoader"),
        (Numbers(), "data set Numbers itself"),
        (regrow.DataLoader(Numbers()), "regrow.DataLoader, whose batches are cached already"),
        (regrow.cached(torch_data.DataLoader(Numbers())), "cached loader, whose batches are cached already"),
    ],
)
def test_what_cannot_be_cached_is_refused(loader: Any, cause: str) -> None:
    with pytest.raises(UsageError, match=cause) as refused:
        regrow.cached(loader)
    assert refused.value.hint


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_loaders_are_numbered_as_they_are_made(numbered: list[tuple[Any, int]]) -> None:
    first = regrow.DataLoader(Numbers())
    plain = torch_data.DataLoader(Numbers())
    second = regrow.cached(plain)
    with pytest.raises(UsageError):
        regrow.DataLoader(Numbers(0))
    third = regrow.DataLoader(Numbers())
    assert [loader for loader, _ in numbered] == [first, second, third]
    assert [number - first.number for _, number in numbered] == [0, 1, 2]
    assert [number for _, number in numbered] == [loader.number for loader in (first, second, third)]


def test_a_loader_of_a_scripts_own_class_is_complete_when_it_is_told(numbered: list[tuple[Any, int]]) -> None:
    class Padded(regrow.DataLoader[Tensor]):
        def __init__(self, pad: int) -> None:
            super().__init__(Numbers(), 2, collate_fn=self.pad)
            self.value = pad

        def pad(self, rows: list[Tensor]) -> Tensor:
            return torch.stack([*rows, torch.full((2,), float(self.value))])

    complete: list[int] = []
    on_made(lambda loader, number: complete.append(loader.value))
    one = StepLoader(Padded(9), seed=0)
    assert complete == [9]
    assert samples(one.batch(0, 0, 1)) == [0, 1, 9]


# --- where a cache plugs in ------------------------------------------------------------------------------------------


class Remembering:
    """A cache in miniature: what was fetched once comes from here."""

    def __init__(self, loader: CachedLoader) -> None:
        self.loader = loader
        self.inner: Source = loader.source(loader_workers=False)
        self.giving, self.spec = self.inner.giving, loader.spec
        self.made = 0
        self._kept: dict[tuple[int, int, int], Fetched] = {}

    def seek(self, step: int, rank: int, world: int) -> None:
        pass

    def fetch(self, step: int, rank: int, world: int) -> Fetched:
        if (step, rank, world) not in self._kept:
            self.made += 1
            fetched = self.inner.fetch(step, rank, world)
            self._kept[step, rank, world] = Fetched(fetched.batch, fetched.samples, "c" * 16)
        return self._kept[step, rank, world]

    def close(self) -> None:
        self.inner.close()


def test_a_cache_stands_before_the_loaders_own_source() -> None:
    caches: list[Remembering] = []

    def cache(loader: CachedLoader) -> Source:
        caches.append(Remembering(loader))
        return caches[-1]

    loader = regrow.DataLoader(Numbers(), 4, shuffle=True, num_workers=1, version="b")
    through, direct = StepLoader(loader, seed=6, cache=cache), StepLoader(loader, seed=6)
    for step in (0, 1, 0, 1):
        assert torch.equal(through.batch(step, 1, 2), direct.batch(step, 1, 2))
        assert through.record.samples == direct.record.samples
        assert through.record.digest == "c" * 16
    (one,) = caches
    assert one.made == 2
    assert (one.loader.number, one.loader.version, one.loader.seed) == (loader.number, "b", 6)
    assert one.loader.map_style
    assert one.loader.dataset is loader.dataset
    assert one.loader.spec == through.spec == direct.spec
    through.close()
    direct.close()


def test_only_loaders_that_ask_for_it_are_cached() -> None:
    def cache(loader: CachedLoader) -> Source:
        raise AssertionError("this is not to be cached")

    for loader in (torch_data.DataLoader(Numbers()), [1, 2], lambda step: step):
        StepLoader(loader, seed=0, cache=cache).batch(0, 0, 1)


def test_an_iterable_loader_can_only_be_walked() -> None:
    class Own(torch_data.DataLoader[Any]):
        def __iter__(self) -> Any:
            return iter([1, 2, 3])

    for loader in (regrow.DataLoader(Stream(), 4), regrow.cached(Own(Numbers()))):
        described = cached_loader(loader, seed=0)
        assert described is not None
        assert not described.map_style
        assert described.source().fetch(0, 0, 1).batch is not None


@pytest.mark.parametrize("place", [(0, 1), (3, 4)])
def test_the_parts_of_a_loader_are_the_same_in_all_ranks(place: tuple[int, int]) -> None:
    sampler: Any = DistributedSampler(Numbers(), place[1], place[0], seed=3)
    sampler.set_epoch(place[0])
    described = cached_loader(regrow.DataLoader(Numbers(), 4, sampler=sampler), seed=0)
    assert described is not None
    assert sampler in described.parts
    assert (sampler.rank, sampler.num_replicas, sampler.epoch, sampler.num_samples) == (0, 1, 0, 40)


@pytest.mark.parametrize("batched", [False, True])
def test_an_own_sampler_is_a_part_of_its_loader(batched: bool) -> None:
    sampler: Any = WeightedRandomSampler([1.0] * 40, 24)
    how = {"batch_sampler": BatchSampler(sampler, 4, False)} if batched else {"sampler": sampler}
    described = cached_loader(regrow.DataLoader(Numbers(), **how), seed=0)
    assert described is not None
    assert sampler in described.parts


@pytest.mark.parametrize("size", [20, 24])
def test_the_parts_of_a_random_sampler_tell_how_it_draws(size: int) -> None:
    sampler: Any = torch_data.RandomSampler(Numbers(), replacement=True, num_samples=size)
    described = cached_loader(regrow.DataLoader(Numbers(), 4, sampler=sampler), seed=0)
    assert described is not None
    assert size in described.parts


def test_the_names_of_the_package_are_those_of_their_homes() -> None:
    assert regrow.cached is regrow.data.cached
    assert regrow.data.Cached is Cached
    assert regrow.data.Mixture is Mixture
