"""Micro-batches of `StepLoader`: the batch of (step, share) is the same whoever asks for it, in whatever world."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, WeightedRandomSampler, get_worker_info

import regrow
from regrow.core.errors import UsageError
from regrow.core.messages.data import BatchRecord, OrderSpec
from regrow.data.cache.entry import digest_of
from regrow.data.loader import StepLoader
from regrow.data.micro import batch_size_of, samples_in
from regrow.data.order import GlobalOrder, keys_of, samples_digest
from regrow.data.walks import ShareWalk

SHARES = 6


class Noisy(Dataset[Tensor]):
    """Sample i: its index, a random number, and which process read it."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Tensor:
        info = get_worker_info()
        where = 0 if info is None else torch.utils.data.get_worker_info().seed % 1000  # type: ignore[union-attr]
        return torch.tensor([float(index), float(torch.rand(())), float(where)], dtype=torch.float64)


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(Noisy(), **{"batch_size": 2, "shuffle": True} | options)


@pytest.fixture
def opened() -> Iterator[Any]:
    made: list[StepLoader] = []

    def make(source: Any, deal: range | None = None) -> StepLoader:
        made.append(StepLoader(source, seed=5, micro=True))
        if deal is not None:
            made[-1].follow(ShareWalk(tuple(deal)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def content(batch: Tensor) -> list[list[float]]:
    rows: list[list[float]] = batch[:, :2].tolist()
    return rows


SAMPLERS = {
    "shuffled": lambda: loader(),
    "in order": lambda: loader(shuffle=False),
    "weighted": lambda: loader(shuffle=False, sampler=WeightedRandomSampler(torch.ones(50), 50)),  # type: ignore[arg-type]
    "distributed": lambda: loader(shuffle=False, sampler=DistributedSampler(Noisy(), num_replicas=1, rank=0)),
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_share_does_not_depend_on_how_shares_are_dealt(opened: Any, kind: str) -> None:
    """Over the end of an epoch, which is after four steps or five."""
    alone = opened(SAMPLERS[kind](), range(SHARES))
    walked = {(step, share): content(alone.batch(step, share, SHARES)) for step in range(6) for share in range(SHARES)}
    for deal in (range(0, 3), range(3, 6), range(2, 4), range(1, 6, 2)):
        some = opened(SAMPLERS[kind](), deal)
        for step in range(6):
            assert [content(some.batch(step, share, SHARES)) for share in deal] == [
                walked[step, share] for share in deal
            ]


def test_the_shares_together_are_the_global_order(opened: Any) -> None:
    order, one = GlobalOrder(50, 2 * SHARES, seed=5), opened(loader(), range(SHARES))
    for step in range(3):
        parts = [[int(row[0]) for row in one.batch(step, share, SHARES)] for share in range(SHARES)]
        assert parts == [order.indices(step)[share::SHARES] for share in range(SHARES)]


def test_each_share_is_recorded_with_its_samples_and_content(opened: Any) -> None:
    one = opened(loader(), range(2, 4))
    spec: OrderSpec = one.spec
    for step in range(2):
        batches = [one.batch(step, share, SHARES) for share in (2, 3)]
        assert one.records(step, [(share, SHARES) for share in (2, 3, 4)]) == [
            BatchRecord(share, SHARES, digest_of(batch), samples_digest(keys_of(spec, step, share, SHARES)))
            for share, batch in zip((2, 3), batches, strict=True)
        ]
    assert one.records(0, [(share, SHARES) for share in (2, 3)]) == []
    assert one.batch(1, 2, SHARES) is not None and len(one.records(1, [(share, SHARES) for share in (2, 3)])) == 2


def test_a_newcomer_in_the_middle_gets_the_same(opened: Any) -> None:
    walker, newcomer = opened(loader(), range(2, 4)), opened(loader(), range(2, 4))
    for step in range(4):
        walked = [content(walker.batch(step, share, SHARES)) for share in (2, 3)]
    newcomer.seek(3, 2, SHARES)
    assert [content(newcomer.batch(3, share, SHARES)) for share in (2, 3)] == walked


def test_another_deal_goes_on_with_the_next_step(opened: Any) -> None:
    one, alone = opened(loader(), range(0, 3)), opened(loader(), range(SHARES))
    for share in range(3):
        one.batch(0, share, SHARES)
    one.follow(ShareWalk((2, 3, 4, 5)))
    assert [content(one.batch(1, share, SHARES)) for share in range(2, 6)] == [
        content(alone.batch(1, share, SHARES)) for share in range(2, 6)
    ]


def test_a_step_that_runs_again_gets_what_it_had_and_the_rest(opened: Any) -> None:
    one, alone = opened(loader(), range(3)), opened(loader(), range(3))
    first = one.batch(2, 0, SHARES)
    before = content(first)
    first.zero_()
    one.batch(2, 1, SHARES)
    assert content(one.batch(2, 0, SHARES)) == before
    assert [content(one.batch(2, share, SHARES)) for share in range(3)] == [
        content(alone.batch(2, share, SHARES)) for share in range(3)
    ]


def test_loader_workers_run_ahead_and_are_started_once(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    real = torch.multiprocessing.get_context().Process

    def counting(*args: Any, **options: Any) -> Any:
        started.append(real(*args, **options))
        return started[-1]

    monkeypatch.setattr(torch.multiprocessing, "Process", counting)
    one, plain = opened(loader(num_workers=2), range(2, 5)), opened(loader(), range(2, 5))
    for step in range(5):
        for share in range(2, 5):
            batch = one.batch(step, share, SHARES)
            assert content(batch) == content(plain.batch(step, share, SHARES))
            assert batch[0, 2] != 0.0 or batch[1, 2] != 0.0
    assert len(started) == 2


def test_a_callable_is_asked_for_step_and_share(opened: Any) -> None:
    one = opened(lambda step, share: (step, share, float(torch.rand(()))))
    again = opened(lambda step, share: (step, share, float(torch.rand(()))))
    assert one.batch(3, 4, SHARES)[:2] == (3, 4)
    assert one.batch(3, 5, SHARES) == again.batch(3, 5, SHARES)
    assert one.batch(3, 5, SHARES)[2] != one.batch(3, 4, SHARES)[2]


@pytest.mark.parametrize("kind", ["list", "iterable", "iterator"])
def test_batches_in_a_row_are_numbered_through_all_shares(opened: Any, kind: str) -> None:
    class Endless:
        def __iter__(self) -> Iterator[int]:
            return iter(range(100))

    source: Any = {"list": list(range(100)), "iterable": Endless(), "iterator": iter(range(100))}[kind]
    one = opened(source, range(2, 4))
    assert [one.batch(step, share, SHARES) for step in (0, 1) for share in (2, 3)] == [2, 3, SHARES + 2, SHARES + 3]
    assert one.batch(1, 2, SHARES) == SHARES + 2


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(3, 2), 3),
        ((torch.zeros(4, 2), torch.zeros(5)), 4),
        ({"ids": [torch.zeros(2, 9)]}, 2),
        ([torch.zeros(()), torch.zeros(7)], 7),
    ],
)
def test_samples_are_counted(batch: Any, samples: int) -> None:
    assert samples_in(batch) == samples


@pytest.mark.parametrize("batch", ["text", 3, [], (torch.zeros(()),)])
def test_what_has_no_samples_to_count_is_an_error(batch: Any) -> None:
    with pytest.raises(UsageError, match="weight"):
        samples_in(batch)


def test_the_usual_size_of_a_batch() -> None:
    assert batch_size_of(loader(), SHARES) == 2
    assert batch_size_of(regrow.DataLoader(Noisy(), global_batch_size=13), SHARES) == 3
    assert batch_size_of(iter([]), SHARES) == 1
