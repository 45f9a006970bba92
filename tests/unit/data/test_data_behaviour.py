"""Loaders are known by what they do: whether they can be read again, whether their order knows ranks; their names."""

import itertools
import random
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler

from regrow.core.errors import UsageError
from regrow.data.epochs import pass_length
from regrow.data.loader import StepLoader
from regrow.data.naming import name_of
from regrow.train.worker.fetching import Fetching

ROWS = 24


class Rows(Dataset[Tensor]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, at: int) -> Tensor:
        return torch.tensor([at])


class Through(DataLoader[Tensor]):
    """Torch's iteration, and something of its own around it."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield from super().__iter__()


class MadeBefore(DataLoader[Tensor]):
    """timm's `MultiEpochsDataLoader`: its one iterator is made with it, and gone on with."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.endless = itertools.chain.from_iterable(iter(lambda: DataLoader.__iter__(self), None))

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return itertools.islice(self.endless, len(self))


class OwnBatches(BatchSampler):
    """A class of its own that gives what torch's gives."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from super().__iter__()


def read(loader: Any, steps: int, *, shares: int, share: int) -> list[list[int]]:
    source = StepLoader(loader, seed=5)
    return [source.batch(step, share, shares).flatten().tolist() for step in range(steps)]


def assert_dealt(make: Callable[[], Any]) -> None:
    """Two ranks read each sample once an epoch, and one that comes in the middle reads what was read there."""
    shares = [read(make(), 6, share=share, shares=2) for share in (0, 1)]
    for epoch in (0, 1):
        seen = [at for share in shares for batch in share[3 * epoch : 3 * epoch + 3] for at in batch]
        assert sorted(seen) == list(range(ROWS))
    late = StepLoader(make(), seed=5)
    assert late.batch(4, 1, 2).flatten().tolist() == shares[1][4]
    assert pass_length(make(), (1, 2), seed=5) == 3


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_with_an_iteration_of_its_own_over_an_order_that_knows_no_ranks_is_dealt_out(workers: int) -> None:
    assert_dealt(lambda: Through(Rows(), batch_size=4, shuffle=True, num_workers=workers))


def test_a_batch_sampler_that_cuts_its_samplers_order_as_torchs_does_is_dealt_out_too() -> None:
    assert_dealt(lambda: DataLoader(Rows(), batch_sampler=OwnBatches(RandomSampler(Rows()), 4, drop_last=False)))


def test_an_order_that_knows_ranks_is_gone_through_as_it_is() -> None:
    def through(kind: type[DataLoader[Tensor]]) -> list[list[int]]:
        sampler: DistributedSampler[Any] = DistributedSampler(Rows(), num_replicas=2, rank=0, seed=3)
        return read(kind(Rows(), batch_size=4, sampler=sampler), 6, share=1, shares=2)

    assert through(Through) == through(DataLoader)


def test_one_that_does_not_ask_its_batch_sampler_is_refused_where_ranks_would_read_the_same() -> None:
    with pytest.raises(UsageError, match="MadeBefore does not ask its batch sampler .* so all 2 ranks"):
        read(MadeBefore(Rows(), batch_size=4, shuffle=True), 1, share=0, shares=2)
    assert len(read(MadeBefore(Rows(), batch_size=4), 3, share=0, shares=1)) == 3


# --- read a second time ---------------------------------------------------------------------------------------------


class OwnGenerator:
    def __init__(self) -> None:
        self.numbers = torch.Generator().manual_seed(1)

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield torch.rand(2, generator=self.numbers)


class Clock(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        numbers = random.Random(time.perf_counter_ns())
        while True:
            yield torch.tensor(numbers.random())


class CountsPasses(OwnGenerator):
    passes = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.passes += 1
        yield from (torch.tensor([self.passes, at]) for at in range(9))


class OwnOrder(RandomSampler):
    numbers = random.Random(7)

    def __iter__(self) -> Iterator[int]:
        order = list(range(ROWS))
        self.numbers.shuffle(order)
        return iter(order)


def counting(step: int, calls: Iterator[int] = itertools.count()) -> Tensor:  # noqa: B008 - one count for all calls
    return torch.tensor([step, next(calls)])


@pytest.mark.parametrize(
    "make",
    [
        OwnGenerator,
        CountsPasses,
        lambda: DataLoader(Clock(), batch_size=2),
        lambda: DataLoader(Clock(), batch_size=2, num_workers=1),
        lambda: DataLoader(Rows(), batch_size=4, sampler=OwnOrder(Rows())),
        lambda: MadeBefore(Rows(), batch_size=4, shuffle=True),
        lambda: counting,
    ],
)
def test_what_gives_other_samples_when_it_is_read_again_is_refused_by_name(make: Callable[[], Any]) -> None:
    loader = make()
    source = StepLoader(loader, seed=3)
    source.batch(0, 0, 1)
    with pytest.raises(UsageError, match=f"{re.escape(name_of(loader))} gave other samples for step 0 .* second time"):
        source.prove(0, 0, 1)
    source.close()


class GlobalGenerators:
    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(9):
            yield torch.tensor([torch.rand(()), float(np.random.rand()), random.random()])


class OneIterator:
    """Gives the same iterator to whoever iterates it."""

    def __init__(self) -> None:
        self.only = iter(OwnGenerator())

    def __iter__(self) -> Iterator[Tensor]:
        return self.only


class SetBack:
    """torchdata's `nodes.Loader`: its one iterator, set back to the beginning for whoever iterates it."""

    at = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.at = 0
        return self

    def __next__(self) -> Tensor:
        if self.at == 4:
            raise StopIteration
        self.at += 1
        return torch.tensor([self.at])


class Hidden:
    def __init__(self) -> None:
        self.inner = SetBack()

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.inner)


@pytest.mark.parametrize(
    "make",
    [
        GlobalGenerators,
        Hidden,
        OneIterator,
        lambda: iter(OwnGenerator()),
        lambda: itertools.islice(iter(Clock()), 9),
        lambda: map(torch.tensor, itertools.count()),
        lambda: [torch.rand(2), torch.rand(2), torch.rand(2)],
        lambda: lambda step: torch.rand(2) + step,
        lambda: DataLoader(Rows(), batch_size=4, shuffle=True, num_workers=1),
        lambda: DataLoader(Rows(), batch_size=4, sampler=RandomSampler(Rows(), replacement=True)),
        lambda: Through(Rows(), batch_size=4, shuffle=True),
        lambda: range(100),
    ],
)
def test_what_gives_the_same_again_or_gives_once_is_read_on_as_if_nobody_had_asked(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    asked, left = StepLoader(make(), seed=3), None
    first = asked.batch(0, 0, 1)
    assert asked.prove(0, 0, 1) == ""
    assert torch.equal(torch.as_tensor(asked.batch(0, 0, 1)), torch.as_tensor(first))
    rest = [asked.batch(step, 0, 1) for step in (1, 2)]
    asked.close()
    if not isinstance(left := make(), list | itertools.islice):
        other = StepLoader(left, seed=3)
        for step, batch in enumerate([first, *rest]):
            assert torch.equal(torch.as_tensor(other.batch(step, 0, 1)), torch.as_tensor(batch))
        other.close()


def test_a_data_set_that_augments_by_a_generator_of_its_own_is_told_not_refused() -> None:
    class Augments(Rows):
        numbers = np.random.default_rng(0)

        def __getitem__(self, at: int) -> Tensor:
            return torch.tensor([at, self.numbers.random()])

    source = StepLoader(DataLoader(Augments(), batch_size=4, shuffle=True), seed=3)
    source.batch(0, 0, 1)
    assert "the same samples of DataLoader over " in source.prove(0, 0, 1)


# --- loader workers that stay ---------------------------------------------------------------------------------------


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


@pytest.mark.parametrize("kind", [DataLoader, Through])
def test_workers_that_stay_end_with_a_pass_and_the_next_one_has_its_own(kind: type[DataLoader[Any]]) -> None:
    loader = kind(Stream(), batch_size=4, num_workers=1, persistent_workers=True)
    source = StepLoader(loader, seed=0)
    seen = [source.batch(step, 0, 1).tolist() for step in (0, 1, 2, 0, 5)]
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7]]
    source.close()
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    source.close()


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loader", "name"),
    [
        (iter(OwnGenerator()), "generator"),
        (itertools.count(), "itertools.count"),
        (map(str, []), "map"),
        (zip(strict=True), "zip"),
        (iter([]), "list_iterator"),
        (range(3), "range"),
        (len, "len"),
        ([].__iter__, "method-wrapper"),
        (memoryview(b""), "memoryview"),
        (torch.zeros, ".zeros"),
        (counting, f"{__name__}.counting"),
        (OwnGenerator(), f"{__name__}.OwnGenerator"),
    ],
)
def test_any_loader_has_a_name_and_is_known_by_it_where_it_calls_a_collective(loader: object, name: str) -> None:
    assert name_of(loader).endswith(name)
    fetching = Fetching()
    with fetching.of(loader), pytest.raises(UsageError, match="calls all_reduce while it fetches"):
        fetching.called("all_reduce", 2)
