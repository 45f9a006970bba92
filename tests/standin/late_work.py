"""Checks of protected state that a script writes on a stream of its own, or into page-locked memory: see `ahead.py`.

A stream stands still behind a gate, so what is enqueued there comes late for certain.
"""

import threading
from collections.abc import Callable
from typing import Any

CHECKS: dict[str, Callable[[], None]] = {}
DEVICE = "standin:0"
EARLY_S = 0.3
"""Time in which a host that does not wait has long read what it should have waited for."""


def check(run: Callable[[], None]) -> Callable[[], None]:
    """A function that shows something."""
    CHECKS[run.__name__] = run
    return run


class Average:
    """An average of something, small enough to be remembered at each step."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value.copy_(state["value"])


def made(value: Any) -> Any:
    """Protected state with this tensor, besides a model on the device."""
    import torch

    from regrow.train.state.protected import ProtectedState

    model = torch.nn.Linear(4, 4).to(DEVICE)
    torch.accelerator.synchronize()
    return ProtectedState([model], {"average": Average(value)})


def beside(gate: Any, call: Callable[[], object]) -> None:
    """Make a call that begins while the gate is closed, and may end behind it."""
    failed: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001  raised again below
            failed.append(error)

    calling = threading.Thread(target=run)
    with gate:
        calling.start()
        calling.join(EARLY_S)
    calling.join()
    if failed:
        raise failed[0]


@check
def what_a_stream_of_the_scripts_own_writes_is_remembered_without_a_wait_and_put_back_behind_it() -> None:
    import torch
    from tests.standin import device

    steering, side, value = device.load(), torch.Stream(device=DEVICE), torch.zeros(4, device=DEVICE)
    state = made(value)
    state.follow([side])
    state.begin()
    state.rollback()
    torch.accelerator.synchronize()
    before = steering.waits()
    with side:
        gate = steering.gate()
        gate.__enter__()
        value.add_(1)  # of the step before
    state.begin()
    assert steering.waits() == before, "the host has waited"
    with side:
        gate.__exit__(None, None, None)
    torch.accelerator.synchronize()
    value.add_(5)
    with side:
        gate = steering.gate()
        gate.__enter__()
        value.add_(7)  # of the body that is given up
    state.rollback()
    with side:
        gate.__exit__(None, None, None)
    torch.accelerator.synchronize()
    assert value.tolist() == [1.0] * 4


@check
def what_is_still_on_its_way_into_page_locked_memory_is_waited_for_before_it_is_remembered() -> None:
    import torch
    from tests.standin import device

    here, there = torch.zeros(4, pin_memory=True), torch.ones(4, device=DEVICE)
    state = made(here)
    state.follow([])
    gate = device.load().gate()

    def begin() -> None:
        here.copy_(there, non_blocking=True)
        state.begin()

    beside(gate, begin)
    here.add_(5)
    state.rollback()
    assert here.tolist() == [1.0] * 4


@check
def all_streams_of_a_device_are_waited_for_before_state_is_sent_or_written() -> None:
    import torch
    from tests.standin import device

    from regrow.core.ids import StepNo

    side, value = torch.Stream(device=DEVICE), torch.zeros(4, device=DEVICE)
    state, copies = made(value), list[Any]()
    state.state_at = StepNo(3)

    def copy() -> None:
        state.inventory(StepNo(3))
        copies.append(state.tensor("average.value").cpu())

    with side:
        gate = device.load().gate()
        gate.__enter__()
        value.add_(1)
    calling = threading.Thread(target=copy)
    calling.start()
    calling.join(EARLY_S)
    with side:
        gate.__exit__(None, None, None)
    calling.join()
    assert [each.tolist() for each in copies] == [[1.0] * 4]
