"""`regrow.data.Mixture`: several data sets in one loader."""

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils import data as torch_data
from torch.utils.data import Dataset, IterableDataset

import regrow
from regrow.core.errors import UsageError
from regrow.data.loader import StepLoader
from regrow.data.mixed import Mixture
from regrow.data.order import keys_of


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class Named(Dataset[str]):
    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return f"{self.name}{index}"


def mixture(**options: Any) -> Mixture:
    return Mixture({"w": Named("w", 30), "c": Named("c", 20)}, **{"weights": {"c": 1, "w": 3}} | options)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_mixture_is_read_as_its_order_says(workers: int) -> None:
    loader = regrow.DataLoader(mixture(), 8, shuffle=True, num_workers=workers)
    one = StepLoader(loader, seed=3)
    for step in (0, 5, 1):
        expected = ["wc"[source] + str(index) for _, (source, index) in keys_of(one.spec, step, 1, 2)]
        assert one.batch(step, 1, 2) == expected
    assert [(source.name, source.size) for source in one.spec.sources] == [("w", 30), ("c", 20)]
    assert one.spec.weights == [(0, [3.0, 1.0])]
    one.close()


def test_a_mixture_in_a_plain_loader_is_mixed_too() -> None:
    plain = StepLoader(torch_data.DataLoader(mixture(), 8, shuffle=True), seed=3)
    assert plain.batch(4, 0, 2) == StepLoader(regrow.DataLoader(mixture(), 8, shuffle=True), seed=3).batch(4, 0, 2)


def test_a_mixture_by_schedule() -> None:
    schedule = [(0, {"w": 1, "c": 0}), (2, {"w": 0, "c": 1})]
    one = StepLoader(regrow.DataLoader(mixture(weights=schedule), global_batch_size=4), seed=0)
    assert [one.batch(step, 0, 1) for step in (1, 2)] == [["w4", "w5", "w6", "w7"], ["c0", "c1", "c2", "c3"]]


def test_iterated_by_itself_a_mixture_is_one_source_after_another() -> None:
    whole = [sample for batch in regrow.DataLoader(mixture(), 16) for sample in batch]
    assert whole == [f"w{i}" for i in range(30)] + [f"c{i}" for i in range(20)]
    with pytest.raises(IndexError):
        mixture()[50]


@pytest.mark.parametrize(
    ("sources", "weights", "cause"),
    [
        ({}, {}, "no sources"),
        ({"a": Named("a", 0)}, {"a": 1}, "source 'a' .* is empty"),
        ({"a": Stream()}, {"a": 1}, "source 'a' .* is no map-style data set"),
        ({"a": Named("a", 3)}, {"a": 1, "b": 2}, "differ in 'b'"),
        ({"a": Named("a", 3)}, [(4, {"a": 1})], "no weights for step 0"),
        ({"a": Named("a", 3)}, [(0, {"a": 1}), (1e4, {"a": 2})], "begin at step 10000.0"),
    ],
)
def test_mixtures_that_cannot_be_are_refused(sources: Any, weights: Any, cause: str) -> None:
    with pytest.raises(UsageError, match=cause) as refused:
        Mixture(sources, weights=weights)
    assert refused.value.hint
