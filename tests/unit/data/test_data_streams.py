"""`StepLoader` over callables, sequences and other iterables."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from regrow.core.errors import UsageError
from regrow.data.loader import StepLoader


class Epochs:
    """Three batches an epoch: its epoch, its number, its rank and a random number."""

    def __init__(self) -> None:
        self.epoch, self.rank, self.num_replicas = 0, 0, 1
        self.opened = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        self.opened += 1
        for i in range(3):
            yield torch.tensor([self.epoch, i, self.rank, torch.rand(())])


class Counted(Epochs):
    def __len__(self) -> int:
        return 3


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def endless() -> Iterator[Tensor]:
    while True:
        yield torch.rand(2)


def test_a_callable_is_called_with_the_step() -> None:
    one = StepLoader(lambda step: torch.tensor([float(step), torch.rand(())]), seed=3)
    first = one.batch(7, 0, 2)
    assert first[0] == 7
    one.batch(8, 0, 2)
    assert torch.equal(one.batch(7, 0, 2), first)
    assert not torch.equal(one.batch(7, 1, 2), first)


def test_a_callable_is_asked_anew_where_the_body_wrote_into_its_batch() -> None:
    one = StepLoader(lambda step: torch.full((2,), float(step)), seed=3)
    one.batch(7, 0, 1).zero_()
    assert one.batch(7, 0, 1).tolist() == [7.0, 7.0]


def test_a_sequence_starts_over_at_its_end() -> None:
    one = StepLoader([10, 11, 12], seed=0)
    assert [one.batch(step, 0, 1) for step in (0, 2, 3, 10**9)] == [10, 12, 10, 10 + 10**9 % 3]


@pytest.mark.parametrize("kind", [Epochs, Counted])
def test_an_iterable_starts_over_with_the_next_epoch(kind: type[Epochs]) -> None:
    one = StepLoader(kind(), seed=0)
    seen = [one.batch(step, 1, 2)[:3].tolist() for step in range(7)]
    assert seen == [[step // 3, step % 3, 1] for step in range(7)]


@pytest.mark.parametrize("kind", [Epochs, Counted])
def test_a_newcomer_skips_to_the_batch_of_the_others(kind: type[Epochs]) -> None:
    walker = StepLoader(kind(), seed=0)
    walked = [walker.batch(step, 1, 2) for step in range(9)]
    for step in (2, 3, 8):
        assert torch.equal(StepLoader(kind(), seed=0).batch(step, 1, 2), walked[step])


def test_an_iterable_with_a_length_is_skipped_by_epochs() -> None:
    source = Counted()
    StepLoader(source, seed=0).batch(3_000_001, 0, 1)
    assert (source.opened, source.epoch) == (1, 1_000_000)


def test_an_iterable_is_started_over_for_a_new_place() -> None:
    one = StepLoader(Epochs(), seed=0)
    one.batch(4, 0, 2)
    one.seek(4, 1, 3)
    assert one.batch(4, 1, 3)[:3].tolist() == [1, 1, 1]


def test_a_generator_gives_newcomers_and_retries_the_same() -> None:
    walker = StepLoader(endless(), seed=0)
    walked = [walker.batch(step, 0, 2) for step in range(5)]
    torch.rand(7)
    assert torch.equal(walker.batch(4, 0, 2), walked[4])
    assert torch.equal(StepLoader(endless(), seed=0).batch(4, 0, 2), walked[4])


def test_a_generator_that_ends_too_early_is_named() -> None:
    one = StepLoader((torch.rand(1) for _ in range(2)), seed=0)
    one.batch(1, 0, 1)
    with pytest.raises(UsageError, match="the generator given to session.steps ended after 2 batches, before step 2"):
        one.batch(2, 0, 1)


def test_a_generator_cannot_go_back() -> None:
    one = StepLoader(endless(), seed=0)
    one.batch(3, 0, 1)
    with pytest.raises(UsageError, match="step 1 runs again"):
        one.batch(1, 0, 1)


def test_the_error_of_a_generator_is_told_again_by_the_retry() -> None:
    def failing() -> Iterator[int]:
        yield 0
        raise ValueError("shard 1 is torn")

    one = StepLoader(failing(), seed=0)
    one.batch(0, 0, 1)
    for _ in range(2):
        with pytest.raises(ValueError, match="shard 1 is torn"):
            one.batch(1, 0, 1)


def test_an_iterable_that_fails_once_is_started_over_for_the_retry() -> None:
    class Flaky:
        failed = False

        def __iter__(self) -> Iterator[int]:
            yield 0
            if not self.failed:
                self.failed = True
                raise ConnectionError("storage blinked")
            yield 1

    one = StepLoader(Flaky(), seed=0)
    one.batch(0, 0, 1)
    with pytest.raises(ConnectionError):
        one.batch(1, 0, 1)
    assert one.batch(1, 0, 1) == 1


@dataclass
class Own:
    """A batch of a type of the script's own."""

    x: Tensor


@pytest.mark.parametrize("source", [[torch.ones(2)], Epochs(), endless(), [Own(torch.ones(2))], iter([np.ones(2)])])
def test_a_body_that_writes_into_its_batch_gets_it_as_it_was_at_each_retry(source: Any) -> None:
    def values(batch: Any) -> Any:
        return batch.x if isinstance(batch, Own) else batch

    one = StepLoader(source, seed=0)
    batch = values(one.batch(0, 0, 1))
    before = batch.tolist()
    for _ in range(3):
        batch += 1
        batch = values(one.batch(0, 0, 1))
        assert batch.tolist() == before


def test_changing_the_containers_of_a_batch_does_no_harm() -> None:
    one = StepLoader(iter([{"x": torch.ones(2), "more": [torch.zeros(1)]}]), seed=0)
    batch = one.batch(0, 0, 1)
    batch["x"] = batch["x"] * 5
    batch["more"].clear()
    again = one.batch(0, 0, 1)
    assert again["x"].tolist() == [1.0, 1.0]
    assert len(again["more"]) == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterable_data_set_in_a_data_loader_is_followed(workers: int) -> None:
    one = StepLoader(DataLoader(Numbers(), batch_size=4, num_workers=workers), seed=0)
    seen = [one.batch(step, 0, 1).tolist() for step in (0, 1, 2, 2)]
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3], [0, 1, 2, 3]]
    one.close()


def test_a_len_that_is_wrong_is_named() -> None:
    class Wrong(Epochs):
        def __len__(self) -> int:
            return 5

    one = StepLoader(Wrong(), seed=0)
    with pytest.raises(UsageError, match=r"has a len\(\) of 5, but gave 3 batches in epoch 0"):
        one.batch(3, 0, 1)


class Empty:
    def __iter__(self) -> Iterator[int]:
        return iter(())


def test_an_iterable_without_batches_is_named() -> None:
    with pytest.raises(UsageError, match="the Empty given to session.steps has no batches"):
        StepLoader(Empty(), seed=0).batch(0, 0, 1)


@pytest.mark.parametrize("source", [None, 7, torch.ones(3), "batches", {"x": 1}, []])
def test_what_is_no_loader_is_refused(source: Any) -> None:
    with pytest.raises(UsageError) as refused:
        StepLoader(source, seed=0)
    assert refused.value.hint
