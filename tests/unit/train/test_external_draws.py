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
LOST = "is known on another node, or was lost with its agent"


class Agent(dict[str, bytes]):
    """Keys of a node's agent."""

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def delete_key(self, key: str) -> bool:
        return self.pop(key, None) is not None

    def list_keys(self) -> list[str]:
        return list(self)

    def steps(self) -> list[int]:
        """Those of which there are copies."""
        return sorted({int(key.split("/")[3]) for key in self if key.count("/") == 4})

    def set(self, key: str, value: bytes) -> None:
        self[key] = value


class Worker:
    """Draws of a worker of a job of several nodes, which stands in a generation; its script draws in each step."""

    def __init__(self, agent: Agent, generation: int, *, newcomer: bool = True, nproc: int = 2) -> None:
        self.member = MagicMock(rank=0, world=2, step=STEP, nproc=nproc, one_node=False, newcomer=newcomer)
        self.member.groups.generation = generation
        self.member.training.finished = False
        self.member.node_store.return_value = agent
        self.draws = ExternalDraws(self.member)
        self.draws.draw(StepNo(0), lambda: None, None, rehearsal=True)
        self.draws.arrives()
        if newcomer:
            self.draws.regrouped(None)

    def runs(self, *steps: int, value: object = 1.0, calls: int = 1) -> list[Any]:
        """Results of their draws."""
        results = []
        for step in map(StepNo, steps):
            self.draws.begins(step, rehearsal=False)
            results += [self.draws.draw(step, lambda: value, None, rehearsal=False) for _ in range(calls)]
        return results

    def told(self, *, doubts: bool = True) -> list[str]:
        notes = [call.args[0] for call in self.member.send.call_args_list]
        return [note.text for note in notes if note.doubts is doubts]


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
    member = MagicMock(rank=0, world=1, nproc=1)
    member.groups.generation = 1
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


def test_what_a_rank_has_drawn_elsewhere_since_it_was_here_is_doubted() -> None:
    here, there = Agent(), Agent()
    Worker(here, 1, newcomer=False).runs(9, 10)
    Worker(there, 2).runs(11)
    back = Worker(here, 3)
    back.runs(11, 12)
    assert len(back.told()) == 1 and "in step 11" in back.told()[0] and LOST in back.told()[0]


def test_more_draws_in_a_step_than_were_begun_here_are_doubted_as_well() -> None:
    here = Agent()
    Worker(here, 1, newcomer=False).runs(10, value=1.0)
    back = Worker(here, 3)
    assert back.runs(10, value=2.0) == [1.0] and not back.told()
    assert back.runs(10, value=2.0, calls=2) == [1.0, 2.0]
    assert len(back.told()) == 1 and LOST in back.told()[0]


def test_a_worker_that_is_lost_before_it_draws_hides_no_draw_of_those_before_it() -> None:
    here, empty = Agent(), Agent()
    Worker(here, 1, newcomer=False).runs(9, 10)
    for agent in (here, empty):  # another has drawn in step 11 elsewhere, in generation 2
        Worker(agent, 3).draws.begins(StepNo(11), rehearsal=False)
        back = Worker(agent, 4)
        back.runs(11)
        assert len(back.told()) == 1 and LOST in back.told()[0]


def test_a_worker_that_is_lost_in_a_step_that_is_run_again_hides_no_copy() -> None:
    here = Agent()
    first = Worker(here, 1, newcomer=False)
    first.runs(11, 12, value=1.0)
    Worker(here, 2).draws.begins(StepNo(11), rehearsal=False)
    back = Worker(here, 3)
    assert back.runs(11, 12, 13, value=2.0) == [1.0, 1.0, 2.0] and not back.told()
    back.draws.begins(StepNo(10), rehearsal=False)
    last = Worker(here, 4)
    last.runs(10)
    assert "there is no copy of it" in last.told()[0]


def test_a_rank_that_was_here_in_the_generation_before_has_drawn_here_alone() -> None:
    here = Agent()
    Worker(here, 1, newcomer=False).runs(9, 10)
    Worker(here, 2)  # it is lost before its first step
    back = Worker(here, 3)
    back.runs(11, 12)
    survivor = Worker(here, 4, newcomer=False)
    survivor.runs(13)
    survivor.member.groups.generation = 5
    survivor.draws.regrouped(None)
    last = Worker(here, 6)
    last.runs(14)
    assert not back.told() and not survivor.told() and not last.told()


def test_no_copy_outlives_its_step_by_two_when_its_worker_is_replaced_or_has_another_rank() -> None:
    here = Agent()
    Worker(here, 1, newcomer=False).runs(3, 4)
    assert here.steps() == [3, 4]
    second = Worker(here, 2)
    second.runs(5)
    assert here.steps() == [4, 5]
    second.member.rank = 1
    second.runs(6, 7)
    assert here.steps() == [6, 7]


def test_ranks_of_a_node_copy_at_most_a_quarter_of_its_table_and_survivors_keep_more() -> None:
    here, value = Agent(), bytes(10 << 20)
    first = Worker(here, 1, newcomer=False, nproc=8)
    assert first.runs(3, value=value, calls=2) == first.runs(3, value=b"anew", calls=2) == [value, value]
    assert sum(map(len, here.values())) < (1 << 30) // 4 // 8 // 2
    assert "more than 17 MB: the rest is not copied" in first.told(doubts=False)[0] and not first.told()
    second = Worker(here, 2, nproc=8)
    assert second.runs(3, value=b"anew", calls=2) == [value, b"anew"]
    assert "there is no copy of it" in second.told()[0]


def test_sets_are_results_too(draws: ExternalDraws) -> None:
    assert ask(draws, lambda: [{1, 2}, frozenset("a")], [set(), frozenset()]) == [{1, 2}, frozenset("a")]
