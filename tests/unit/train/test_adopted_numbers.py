"""Numbers logged behind a step that happened on other ranks while this one's body was cut off."""

from types import SimpleNamespace
from typing import Any, cast

import torch

from regrow.core.ids import StepNo
from regrow.core.messages import facts
from regrow.train.announcing import Announcing
from regrow.train.preparation import Preparation
from regrow.train.step import Step


class Said:
    """Messages of a worker, by step."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        body = SimpleNamespace(own_time=0.0, in_flight=False)
        member: Any = SimpleNamespace(worker_id="w", generation=1, send=self.sent.append, body=body)
        self.announcing = Announcing(member)
        self._owner: Any = SimpleNamespace(
            rank=0, began=0, log=lambda step: None, shadow=SimpleNamespace(logged=lambda numbers: None)
        )

    def step(self, number: int, *, inside: Any = None, behind: Any = None, adopted: bool = False) -> dict[str, float]:
        step = Step(self._owner, StepNo(number), None)
        step.inside = True
        step.log(**(inside or {}))
        step.inside, step.committed = False, True
        self.announcing.committed(step, Preparation(cast(Any, None)), None, adopted=adopted)
        step.log(**(behind or {}))
        self.announcing.send()
        (last,) = [each for each in self.sent[-1:] if isinstance(each, facts.WorkerCommitted)]
        return last.metrics


def test_a_number_that_the_last_step_has_left_is_not_taken_for_the_adopted_ones() -> None:
    said, loss = Said(), torch.tensor(0.5)
    assert said.step(0, behind={"loss": loss}) == {"loss": 0.5}
    assert said.step(1, behind={"loss": loss, "other": 2.0}, adopted=True) == {"other": 2.0}


def test_what_an_adopted_body_has_logged_itself_counts() -> None:
    said = Said()
    said.step(0, inside={"loss": 0.5})
    assert said.step(1, inside={"loss": 0.5}, adopted=True) == {"loss": 0.5}


def test_a_step_that_was_not_cut_off_may_have_the_same_number_again() -> None:
    said = Said()
    said.step(0, behind={"rate": 0.1})
    assert said.step(1, behind={"rate": 0.1}) == {"rate": 0.1}


def test_what_is_logged_behind_a_workers_first_body_may_be_what_its_rehearsal_has_left() -> None:
    assert Said().step(8, inside={"rate": 0.1}, behind={"loss": 0.5}, adopted=True) == {"rate": 0.1}
