"""Readers and writers of state are threads: what a script has enqueued on its own stream is done before them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from regrow.core.ids import StepNo
from regrow.train.state.frozen import FrozenState
from regrow.train.state.protected import ProtectedState
from regrow.train.worker.recovery import Recovery


class Stream:
    """A device whose work is done only when it is waited for: until then its tensors hold what they held before."""

    enqueues = True

    def __init__(self) -> None:
        self.pending: list[Any] = []
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1
        while self.pending:
            self.pending.pop(0)()


def filled(tensor: torch.Tensor, value: float) -> Any:
    def work() -> None:
        with torch.no_grad():
            tensor.fill_(value)

    return work


@pytest.mark.parametrize("whole_body", [False, True])
def test_an_update_that_is_only_enqueued_is_done_before_the_state_can_be_read(whole_body: bool) -> None:
    model = nn.BatchNorm1d(2)
    stream = Stream()
    frozen = FrozenState(ProtectedState((model, torch.optim.SGD(model.parameters(), lr=0.1)), {}), stream.wait)
    assert model.running_mean is not None
    stream.pending = [filled(model.weight, 3.0), filled(model.running_mean, 5.0)]
    frozen.freeze(StepNo(0), whole_body=whole_body)
    names = [entry.name for entry in frozen.inventory(StepNo(0)).entries]
    read = {name.rpartition(".")[2]: frozen.tensor(name) for name in names if name.endswith(("weight", "running_mean"))}
    assert read["weight"].tolist() == [3.0, 3.0] and read["running_mean"].tolist() == [5.0, 5.0]
    assert stream.waits == 2, "copies are enqueued as well, and readers must find them whole"


def test_what_a_newcomer_has_enqueued_is_done_before_the_state_arrives() -> None:
    weight, stream = torch.zeros(2), Stream()
    stream.pending = [filled(weight, 7.0)]  # the end of its rehearsal
    control = SimpleNamespace(is_over=lambda generation: False)
    unused: Any = SimpleNamespace(env=SimpleNamespace(begins=False))
    recovery = Recovery(unused, control, unused, unused, unused, unused, unused, unused, stream, form_s=1.0)  # type: ignore[arg-type]
    reception: Any = SimpleNamespace(run=filled(weight, 1.0), cancel=lambda: None)
    recovery._run(SimpleNamespace(generation=1), reception)  # type: ignore[arg-type]
    stream.wait()
    assert weight.tolist() == [1.0, 1.0]
