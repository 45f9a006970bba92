"""Loaders."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from tests.harm.frame import WIDTH, Batch, Trial, backward, batch, ddp, mlp, mse
from tests.harm.table import BATCHES_OF_A_RANK, habit
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

ROWS = TensorDataset(*batch(3, 60))


def train(t: Trial, loader: Any, *, until: int | None = None) -> dict[str, Any]:
    """The plain loop, for habits that are not in it."""
    model = ddp(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    t.session.protect(model, optimizer)
    for step in t.steps(loader, until=until):
        with step as (x, y):
            loss = mse(model(x), y)
            step.log(loss=loss)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


@habit("a shuffled `DataLoader`, over several epochs", fixed=BATCHES_OF_A_RANK)
def shuffled_loader(t: Trial) -> dict[str, Any]:
    return train(t, DataLoader(ROWS, batch_size=4, shuffle=True))


@habit("a `DataLoader` with worker processes", fixed=BATCHES_OF_A_RANK)
def loader_with_workers(t: Trial) -> dict[str, Any]:
    return train(t, DataLoader(ROWS, batch_size=4, shuffle=True, num_workers=2, persistent_workers=True))


@habit("`DistributedSampler`, whose `set_epoch` regrow calls", fixed=BATCHES_OF_A_RANK)
def distributed_sampler(t: Trial) -> dict[str, Any]:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    sampler: DistributedSampler[Any] = DistributedSampler(ROWS, num_replicas=world, rank=rank)
    return train(t, DataLoader(ROWS, batch_size=4, sampler=sampler))


@habit("`WeightedRandomSampler`", alone=False, fixed=BATCHES_OF_A_RANK)
def weighted_sampler(t: Trial) -> dict[str, Any]:
    weights = [1.0 + at % 3 for at in range(60)]
    return train(t, DataLoader(ROWS, batch_size=4, sampler=WeightedRandomSampler(weights, 60)))


@habit("a sampler with a generator of its own", fixed=BATCHES_OF_A_RANK)
def sampler_with_generator(t: Trial) -> dict[str, Any]:
    sampler = RandomSampler(ROWS, generator=torch.Generator().manual_seed(3))
    return train(t, DataLoader(ROWS, batch_size=4, sampler=sampler))


@habit("a data set that augments by random numbers", fixed=BATCHES_OF_A_RANK)
def random_augmentation(t: Trial) -> dict[str, Any]:
    class Augmented(Dataset[Batch]):
        def __len__(self) -> int:
            return 60

        def __getitem__(self, at: int) -> Batch:
            x, y = ROWS[at]
            return x + 0.1 * torch.randn(WIDTH), y

    return train(t, DataLoader(Augmented(), batch_size=4, shuffle=True))


@habit("a streaming set (`IterableDataset`) that shards itself by rank", alone=False, fixed=BATCHES_OF_A_RANK)
def streaming_set(t: Trial) -> dict[str, Any]:
    class Stream(IterableDataset[Batch]):
        def __iter__(self) -> Iterator[Batch]:
            world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
            for at in itertools.count(rank, world):
                x, y = batch(at, 1)
                yield x[0], y[0]

    return train(t, DataLoader(Stream(), batch_size=4))


@habit("a list of batches, gone through again and again", fixed=BATCHES_OF_A_RANK)
def list_of_batches(t: Trial) -> dict[str, Any]:
    return train(t, [batch(100 + at) for at in range(5)])


@habit("an object with `__iter__` that draws its batches from a generator of its own", fixed=BATCHES_OF_A_RANK)
def iterable_object(t: Trial) -> dict[str, Any]:
    class Drawn:
        def __iter__(self) -> Iterator[Batch]:
            numbers = torch.Generator().manual_seed(5)
            for _ in range(6):
                x = torch.randn(4, WIDTH, generator=numbers)
                yield x, x.sum(1, keepdim=True)

    return train(t, Drawn())


@habit("two loaders zipped together", fixed=BATCHES_OF_A_RANK)
def zipped_loaders(t: Trial) -> dict[str, Any]:
    class Zipped:
        def __iter__(self) -> Iterator[Batch]:
            left = (batch(at)[0] for at in range(8))
            right = (batch(at)[1] for at in range(8))
            return zip(left, right, strict=True)

    return train(t, Zipped())


@habit("`itertools.islice` of an endless generator function's batches", fixed=BATCHES_OF_A_RANK)
def sliced_generator(t: Trial) -> dict[str, Any]:
    def endless() -> Iterator[Batch]:
        yield from map(batch, itertools.count(t.session.rank * 1000))

    return train(t, itertools.islice(endless(), 100))


@habit(
    "the body takes its batches from an iterator of its own, `next(batches)`",
    refused="takes from `batches` (_SingleProcessDataLoaderIter), an iterator of the script's own",
    instead="`session.steps(loader)`: the step brings its batch; several of them by a function of the step's number",
)
def iterator_of_ones_own(t: Trial) -> dict[str, Any]:
    batches = iter(DataLoader(ROWS, batch_size=1))
    model = ddp(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    t.session.protect(model, optimizer)
    for step in t.steps(lambda number: number):
        with step:
            x, y = next(batches)
            loss = mse(model(x), y)
            step.log(loss=loss)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
    return {"model": model, "optimizer": optimizer}
