"""A loop of epochs in a world of one: how long an epoch is, where it ends, and what is refused."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

import regrow
from regrow.core.errors import UsageError
from regrow.data.epochs import pass_length
from regrow.train.epochs import Epoch, Epochs
from regrow.train.session import Session
from regrow.train.state.naming import Protected, roster
from regrow.train.worker.standalone import StandaloneWorker

ROWS = TensorDataset(torch.arange(10.0).view(10, 1))


@pytest.fixture(autouse=True)
def no_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other tests in this process, whose groups are gone."""
    monkeypatch.setattr("regrow.comm.torch_private.device_mesh._KNOWN", [])


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(int, 1)


def sampled(dataset: Dataset[tuple[torch.Tensor, ...]], rank: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(dataset, 2, sampler=DistributedSampler(dataset, num_replicas=2, rank=rank))


@pytest.mark.parametrize(
    ("loader", "shares", "steps"),
    [
        (DataLoader(ROWS, batch_size=2), 1, 5),
        (DataLoader(ROWS, batch_size=2, shuffle=True), 2, 3),
        (DataLoader(ROWS, batch_size=2, drop_last=True), 2, 2),
        (regrow.DataLoader(ROWS, global_batch_size=5), 2, 2),
        (regrow.cached(DataLoader(ROWS, batch_size=3)), 1, 4),
        (sampled(ROWS, 0), 2, 3),
        ([1, 2, 3], 2, 3),
        (lambda step: step, 1, None),
        (DataLoader(Endless(), batch_size=2), 1, None),
        (iter([1, 2, 3]), 1, None),
    ],
)
def test_an_epoch_is_one_pass_of_all_ranks_over_the_data(loader: object, shares: int, steps: int | None) -> None:
    assert pass_length(loader, (0, shares), seed=3) == steps


def test_of_micro_batches_an_epoch_has_as_many_steps_as_there_are_whole_ones() -> None:
    assert pass_length([1, 2, 3, 4, 5], (0, 2), seed=3, micro=True) == 2
    assert pass_length(DataLoader(ROWS, batch_size=2), (0, 2), seed=3, micro=True) == 3


def test_plain_values_in_a_namespace_are_protected_like_an_object_with_a_state() -> None:
    kept = SimpleNamespace(best=2.5, bad=1)
    (thing,) = roster(Protected([kept], {})).objects.values()
    saved = thing.state_dict()
    kept.best, kept.more = 1.0, "new"
    thing.load_state_dict(saved)
    assert vars(kept) == {"best": 2.5, "bad": 1}


@pytest.mark.parametrize(("stands_at", "number"), [(-1, 0), (0, 0), (3, 0), (4, 1), (7, 1), (8, 1)])
def test_before_a_rank_knows_where_it_comes_in_its_epoch_is_the_first_one(stands_at: int, number: int) -> None:
    loop: Any = SimpleNamespace(worker=SimpleNamespace(step=stands_at), began=0)
    assert Epochs(loop, iter([]), length=4, until=8).number == number


class World:
    """A script's session, model and body, where nobody supervises it."""

    def __init__(self) -> None:
        self.session = Session(StandaloneWorker(0, 0, 1), seed=0)
        self._model = nn.Linear(1, 1)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1)
        self.session.protect(self._model, self._optimizer)

    def epochs(self, count: int = 3, loader: object = None) -> Iterator[Epoch]:
        return self.session.epochs(loader or [torch.ones(2, 1)] * 4, count)

    def train(self, step: regrow.Step) -> int:
        with step as x:
            self._optimizer.zero_grad()
            self._model(x).sum().backward()
            self._optimizer.step()
        return step.number


def test_a_script_goes_through_its_epochs_and_leaves_them_as_it_likes() -> None:
    world, seen = World(), []
    for epoch in world.epochs():
        seen.append((epoch.number, len(epoch), [world.train(step) for step in epoch], epoch.number))
        if epoch.number == 1:
            break
    assert seen == [(0, 4, [0, 1, 2, 3], 0), (1, 4, [4, 5, 6, 7], 1)]


def test_all_epochs_end_by_themselves_and_the_last_one_may_be_the_only_one() -> None:
    for count in (0, 1, 3):
        world = World()
        assert [[world.train(step) for step in epoch] for epoch in world.epochs(count)] == [
            [4 * epoch + step for step in range(4)] for epoch in range(count)
        ]


def test_an_epoch_that_is_passed_over_or_left_in_its_middle_or_gone_through_twice_is_refused() -> None:
    world = World()
    with pytest.raises(UsageError, match="epoch 0 was passed over"):
        list(world.epochs())

    world = World()
    with pytest.raises(UsageError, match="the steps of epoch 0 were left in their middle"):
        for epoch in world.epochs():
            for step in epoch:
                world.train(step)
                break

    world = World()
    with pytest.raises(UsageError, match="the steps of an epoch are gone through a second time"):
        for epoch in world.epochs():
            for _ in range(2):
                for step in epoch:
                    world.train(step)


def test_what_has_no_epochs_is_told_with_its_cure() -> None:
    with pytest.raises(UsageError, match=r"no known number of whole steps.*length="):
        World().epochs(loader=lambda step: step)
    with pytest.raises(UsageError, match="epochs=-1 is negative"):
        World().epochs(-1)


def test_what_has_no_state_is_told_what_has() -> None:
    with pytest.raises(UsageError, match=r"types.SimpleNamespace"):
        roster(Protected([object()], {}))
