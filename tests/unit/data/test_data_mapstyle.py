"""`StepLoader` over map-style data sets: the batch is a function of seed, step and place."""

import contextlib
import multiprocessing
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data._utils import worker as torch_worker

from regrow.core.errors import UsageError
from regrow.data.loader import StepLoader
from regrow.data.order import GlobalOrder


class Noisy(Dataset[Tensor]):
    """Sample i: its index, and numbers from each random generator."""

    def __init__(self, size: int = 40) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        noise = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.tensor([float(index), *noise], dtype=torch.float64)


class NoisyBatches(Noisy):
    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self[index] for index in indices]


class Failing(Noisy):
    """Fails once at sample 7."""

    failed = False

    def __getitem__(self, index: int) -> Tensor:
        if index == 7 and not self.failed:
            self.failed = True
            raise ValueError("sample 7 is torn")
        return super().__getitem__(index)


def samples(batch: Tensor) -> list[int]:
    return [int(row[0]) for row in batch]


def loader(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(Noisy() if dataset is None else dataset, **{"batch_size": 4, "shuffle": True} | options)


@pytest.fixture
def opened() -> Iterator[Any]:
    """Makes step loaders that are closed at the end."""
    made: list[StepLoader] = []

    def make(source: Any, seed: int = 5) -> StepLoader:
        made.append(StepLoader(source, seed=seed))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("dataset", [Noisy(), NoisyBatches()])
@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"shuffle": False}])
def test_a_newcomer_at_step_n_gets_the_batch_of_those_who_walked_there(
    opened: Any, dataset: Any, options: dict[str, Any]
) -> None:
    walker = opened(loader(dataset, **options))
    walked = [walker.batch(step, 1, 3) for step in range(25)]
    for step in (0, 3, 24):
        assert torch.equal(opened(loader(dataset, **options)).batch(step, 1, 3), walked[step])


def test_the_ranks_share_out_the_global_order(opened: Any) -> None:
    order = GlobalOrder(40, 8, seed=5)
    ranks = [opened(loader()) for _ in range(2)]
    for step in range(12):
        parts = [samples(one.batch(step, rank, 2)) for rank, one in enumerate(ranks)]
        assert parts[0] == order.indices(step)[0::2]
        assert parts[1] == order.indices(step)[1::2]


def test_the_last_batch_of_an_epoch_gives_every_rank_as_many_samples(opened: Any) -> None:
    sizes = [len(opened(loader(Noisy(10), batch_size=3)).batch(1, rank, 3)) for rank in range(3)]
    assert sizes == [1, 1, 1]


def test_another_seed_gives_other_samples_and_other_noise(opened: Any) -> None:
    one, other = opened(loader(shuffle=False)).batch(0, 0, 1), opened(loader(shuffle=False), 6).batch(0, 0, 1)
    assert samples(one) == samples(other)
    assert not torch.equal(one, other)


def test_a_sample_has_new_noise_in_each_epoch(opened: Any) -> None:
    one = opened(loader(shuffle=False))
    assert samples(one.batch(0, 0, 1)) == samples(one.batch(10, 0, 1))
    assert not torch.equal(one.batch(0, 0, 1), one.batch(10, 0, 1))


def test_noise_belongs_to_the_sample_not_to_the_world(opened: Any) -> None:
    alone = {int(row[0]): row for row in opened(loader(batch_size=8)).batch(2, 0, 1)}
    for rank in range(4):
        for row in opened(loader(batch_size=2)).batch(2, rank, 4):
            assert torch.equal(row, alone[int(row[0])])


@pytest.mark.parametrize("how", ["body draws", "body writes", "body changes containers", "nothing"])
def test_a_retried_step_gets_an_identical_batch(opened: Any, how: str) -> None:
    class Dicts(Noisy):
        def __getitem__(self, index: int) -> Any:
            return {"x": super().__getitem__(index), "i": index}

    one = opened(loader(Dicts()))
    one.batch(0, 0, 2)
    batch = one.batch(1, 0, 2)
    before = batch["x"].clone()
    if how == "body draws":
        torch.rand(3)
    elif how == "body writes":
        batch["x"].div_(255)
    elif how == "body changes containers":
        batch["x"] = batch["x"] / 255
    again = one.batch(1, 0, 2)
    assert torch.equal(again["x"], before)
    assert set(again) == {"x", "i"}
    assert torch.equal(one.batch(2, 0, 2)["x"], opened(loader(Dicts())).batch(2, 0, 2)["x"])


def test_after_a_change_of_world_the_batch_is_that_of_the_new_place(opened: Any) -> None:
    one = opened(loader())
    for step in range(3):
        one.batch(step, 1, 2)
    one.seek(2, 0, 4)
    assert torch.equal(one.batch(2, 0, 4), opened(loader()).batch(2, 0, 4))


def test_loader_workers_give_what_the_main_process_gives(opened: Any) -> None:
    plain, ahead = opened(loader()), opened(loader(num_workers=2))
    for step in [0, 1, 2, 2, 7, 8, 1, 15]:
        assert torch.equal(plain.batch(step, 0, 2), ahead.batch(step, 0, 2))


def test_seeking_reuses_loader_workers_and_closing_ends_them() -> None:
    class Who(Noisy):
        def __getitem__(self, index: int) -> Tensor:
            info = get_worker_info()
            assert info is not None
            dataset: Any = info.dataset
            assert dataset.size == 40
            return torch.tensor([float(psutil.Process().pid)])

    one = StepLoader(loader(Who(), num_workers=1), seed=0)
    first = int(one.batch(0, 0, 2)[0])
    one.seek(11, 1, 2)
    assert int(one.batch(11, 1, 2)[0]) == first
    assert first in [child.pid for child in psutil.Process().children()]
    one.close()
    one.close()
    assert not psutil.pid_exists(first)


def _own_a_loader_worker(pids: Any) -> None:
    class Who(Noisy):
        def __getitem__(self, index: int) -> Tensor:
            return torch.tensor([float(psutil.Process().pid)], dtype=torch.float64)

    torch_worker.MP_STATUS_CHECK_INTERVAL = 3600.0  # type: ignore[attr-defined]  # torch's own watch on the parent
    one = StepLoader(loader(Who(), num_workers=1), seed=0)
    pids.send(int(one.batch(0, 0, 1)[0]))
    pids.recv()


def test_loader_workers_end_with_a_killed_worker() -> None:
    ours, theirs = multiprocessing.Pipe()
    owner = multiprocessing.get_context("fork").Process(target=_own_a_loader_worker, args=(theirs,))
    owner.start()
    assert ours.poll(60)
    child = psutil.Process(ours.recv())
    killed = time.monotonic()
    owner.kill()
    with contextlib.suppress(psutil.NoSuchProcess):  # it has gone while it was looked at
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < killed + 60:
            time.sleep(0.01)
    assert time.monotonic() < killed + 60
    owner.join(60)


def test_a_sample_that_fails_once_is_read_by_the_retry(opened: Any) -> None:
    one = opened(loader(Failing(), shuffle=False))
    one.batch(0, 0, 1)
    with pytest.raises(ValueError, match="sample 7 is torn"):
        one.batch(1, 0, 1)
    assert samples(one.batch(1, 0, 1)) == [4, 5, 6, 7]
    assert samples(one.batch(2, 0, 1)) == [8, 9, 10, 11]


def test_a_sampler_with_set_epoch_keeps_its_order_at_the_current_place(opened: Any) -> None:
    def distributed(rank: int, world: int) -> Any:
        return DistributedSampler(Noisy(), world, rank, seed=9)

    one = opened(loader(shuffle=False, sampler=distributed(0, 1)))
    for world, rank, step in [(2, 0, 0), (2, 0, 4), (2, 0, 5), (2, 0, 23), (4, 3, 24), (4, 3, 26), (3, 2, 7)]:
        expected = distributed(rank, world)
        per_epoch = -(-len(expected) // 4)
        expected.set_epoch(step // per_epoch)
        place = step % per_epoch
        assert samples(one.batch(step, rank, world)) == list(expected)[place * 4 : place * 4 + 4]


def test_a_batch_sampler_with_set_epoch_is_followed(opened: Any) -> None:
    class Reversed(Sampler[list[int]]):
        epoch, rank, num_replicas = 0, 0, 1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return 5

        def __iter__(self) -> Iterator[list[int]]:
            for i in range(5):
                yield [self.epoch, i, self.rank, self.num_replicas]

    one = opened(DataLoader(Noisy(), batch_sampler=Reversed()))
    assert samples(one.batch(13, 2, 4)) == [2, 3, 2, 4]
    assert samples(one.batch(14, 2, 4)) == [2, 4, 2, 4]
    assert samples(one.batch(15, 2, 4)) == [3, 0, 2, 4]


@pytest.mark.parametrize("own_generator", [False, True])
def test_a_sampler_that_knows_no_ranks_is_drawn_alike_and_dealt_out(opened: Any, own_generator: bool) -> None:
    def weighted() -> Any:
        generator = torch.Generator() if own_generator else None
        return loader(shuffle=False, sampler=WeightedRandomSampler([1.0] * 40, 24, generator=generator))

    walkers = [opened(weighted()) for _ in range(2)]
    for step in range(8):
        parts = [samples(one.batch(step, rank, 2)) for rank, one in enumerate(walkers)]
        assert parts[0] != parts[1]
        assert samples(opened(weighted()).batch(step, 1, 2)) == parts[1]
    alone = opened(loader(shuffle=False, sampler=weighted().sampler, batch_size=8))
    assert samples(alone.batch(7, 0, 1))[1::2] == parts[1]


def test_a_stock_batch_sampler_counts_as_its_sampler(opened: Any) -> None:
    data = Noisy()
    explicit = DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 4, False))
    assert torch.equal(opened(explicit).batch(3, 1, 2), opened(loader()).batch(3, 1, 2))


def test_a_sampler_whose_len_is_wrong_is_named(opened: Any) -> None:
    class Short(Sampler[int]):
        def __len__(self) -> int:
            return 40

        def __iter__(self) -> Iterator[int]:
            return iter(range(8))

    one = opened(loader(shuffle=False, sampler=Short()))
    one.batch(1, 0, 1)
    with pytest.raises(UsageError, match=r"promises 10 batches an epoch, but epoch 0 had 2.*__len__"):
        one.batch(2, 0, 1)


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        (loader(batch_size=None, shuffle=False), "batch_size=None"),
        (loader(Noisy(0), shuffle=False), "Noisy, is empty"),
        (loader(Noisy(3), drop_last=True), "less than one global batch of 4"),
        (Noisy(), "samples, not batches"),
    ],
)
def test_what_has_no_batches_is_refused_at_once(source: Any, cause: str) -> None:
    with pytest.raises(UsageError, match=cause) as refused:
        StepLoader(source, seed=0)
    assert refused.value.hint


def test_a_world_too_large_for_the_data_is_refused(opened: Any) -> None:
    one = opened(loader(Noisy(10), drop_last=True))
    one.batch(0, 0, 2)
    with pytest.raises(UsageError, match="less than one global batch of 16"):
        one.batch(1, 0, 4)
