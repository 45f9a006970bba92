"""Results that are drawn once: what of them is kept, and how it is given again."""

import random
from typing import Any, cast
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from regrow.core.errors import UsageError
from regrow.core.ids import StepNo
from regrow.train.hooks.external import ExternalDraws
from regrow.train.worker.participation import Participation
from regrow.train.worker.standalone import StandaloneWorker

STEP = StepNo(3)


@pytest.fixture
def draws() -> ExternalDraws:
    made = ExternalDraws(cast(Participation, StandaloneWorker(0, 0, 1)))
    made.begins(STEP, rehearsal=False)
    return made


def ask(draws: ExternalDraws, make: Any, like: object = None, *, rehearsal: bool = False) -> Any:
    return draws.draw(STEP, make, like, rehearsal=rehearsal)


def test_values_come_again_bit_by_bit_and_are_nobodys_own(draws: ExternalDraws) -> None:
    value: dict[Any, Any] = {
        "tensors": [torch.randn(2, 3).t(), torch.tensor(1.5, dtype=torch.bfloat16), torch.zeros(0, 4)],
        "arrays": (np.arange(6, dtype=np.int16).reshape(2, 3), np.arange(100_000.0), np.float32(0.1)),
        7: [None, True, 2**80, -0.0, "text", b"bytes", (1, [2])],
    }
    first = ask(draws, lambda: value)
    first["tensors"][0].add_(1.0)
    draws.begins(STEP, rehearsal=False)
    again = ask(draws, lambda: pytest.fail("it was drawn twice"))
    for mine, other in zip(value["tensors"], again["tensors"], strict=True):
        assert mine.dtype == other.dtype and torch.equal(mine, other)
    for here, there in zip(value["arrays"], again["arrays"], strict=True):
        assert here.dtype == there.dtype and np.array_equal(here, there)
    assert again[7] == value[7] and str(again[7][3]) == "-0.0"


def test_calls_are_told_apart_and_the_next_step_draws_anew(draws: ExternalDraws) -> None:
    numbers = iter(range(10))
    assert [ask(draws, lambda: next(numbers)) for _ in range(2)] == [0, 1]
    draws.begins(STEP, rehearsal=False)
    assert [ask(draws, lambda: next(numbers)) for _ in range(3)] == [0, 1, 2]
    draws.begins(StepNo(STEP + 1), rehearsal=False)
    assert draws.draw(StepNo(STEP + 1), lambda: next(numbers), 0, rehearsal=False) == 3


def test_random_numbers_go_on_behind_a_result_as_they_did_when_it_was_drawn(draws: ExternalDraws) -> None:
    def make() -> float:
        return random.random() + float(np.random.rand()) + float(torch.rand(()))

    def rest() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    def seed() -> None:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)

    seed()
    plain = [make(), *rest()]
    seed()
    assert [ask(draws, make), *rest()] == plain
    draws.begins(STEP, rehearsal=False)
    seed()
    assert [ask(draws, make), *rest()] == plain


def test_a_rehearsal_draws_nothing(draws: ExternalDraws) -> None:
    like = [torch.zeros(2)]
    given = ask(draws, lambda: pytest.fail("it was drawn"), like, rehearsal=True)
    assert torch.equal(given[0], like[0]) and given[0] is not like[0]


def test_a_halt_ends_no_draw_in_its_middle() -> None:
    member = MagicMock(rank=0, world=1)
    member.node_store.return_value = None
    member.body.entered = True
    draws, seen = ExternalDraws(member), []
    ask(draws, lambda: seen.append(member.body.entered))
    assert seen == [False] and member.body.entered is True


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [1, object()]}, r"the result\.a\[1\]: object cannot be kept"),
        ([torch.ones(2).to_sparse()], r"the result\[0\]: a Tensor of layout torch\.sparse_coo cannot be kept"),
    ],
)
def test_other_values_are_refused_by_their_place(draws: ExternalDraws, value: object, place: str) -> None:
    with pytest.raises(UsageError, match=place):
        ask(draws, lambda: value)
