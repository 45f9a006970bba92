"""Decisions of the Accelerate adapter: how often a prepared scheduler goes on."""

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR, StepLR

from regrow_recipes.adapters.accelerate import _as_often_as_accelerate as as_often_as_accelerate

UPDATES, PROCESSES = 6, 2


def schedule(kind: str) -> LRScheduler:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    if kind == "one cycle":
        return OneCycleLR(optimizer, max_lr=0.1, epochs=1, steps_per_epoch=UPDATES * PROCESSES)
    return CosineAnnealingLR(optimizer, UPDATES * PROCESSES) if kind == "cosine" else StepLR(optimizer, 3)


@pytest.mark.parametrize("kind", ["one cycle", "cosine", "steps"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_update_of_two_processes_is_two_steps_of_it_and_its_state_is_a_plain_ones(kind: str) -> None:
    ours, plain = schedule(kind), schedule(kind)
    as_often_as_accelerate(ours, PROCESSES)
    as_often_as_accelerate(ours, PROCESSES)  # prepared twice
    for _ in range(UPDATES):
        ours.step()
        for _ in range(PROCESSES):
            plain.step()
    assert ours.get_last_lr() == plain.get_last_lr()
    assert type(ours).__name__ == type(plain).__name__
    told, expected = ours.state_dict(), plain.state_dict()
    assert told.keys() == expected.keys()
    assert all(told[name] == expected[name] for name in ("last_epoch", "_step_count"))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_behind_its_last_step_a_cycle_stands_still() -> None:
    ours = schedule("one cycle")
    as_often_as_accelerate(ours, PROCESSES)
    for _ in range(3 * UPDATES):
        ours.step()
    assert ours.last_epoch == UPDATES * PROCESSES


def test_one_process_has_the_scheduler_as_it_is() -> None:
    ours = schedule("steps")
    as_often_as_accelerate(ours, 1)
    assert type(ours) is StepLR
