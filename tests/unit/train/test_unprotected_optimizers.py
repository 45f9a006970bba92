"""An optimizer that steps and is not protected is refused, with the cure that fits its parameters."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from regrow.core.errors import UsageError
from regrow.train.rehearsal.unprotected_optimizers import UnprotectedOptimizers
from regrow.train.state.protected import ProtectedState


@contextmanager
def watched(*objects: object, told: list[UsageError] | None = None) -> Iterator[None]:
    state = ProtectedState(list(objects))

    def goes_on(error: UsageError) -> bool:
        if told is not None:
            told.append(error)
        return told is not None

    seen = UnprotectedOptimizers(lambda: state, body=lambda: True, training=lambda: False, goes_on=goes_on)
    try:
        yield
    finally:
        seen.close()


def slices(net: nn.Linear) -> list[nn.Parameter]:
    """Half of each parameter, in the same memory: what a rank of two updates where optimizers are sharded."""
    return [nn.Parameter(each.detach().view(-1)[: each.numel() // 2]) for each in net.parameters()]


def test_slices_of_protected_parameters_are_called_so_with_the_cure() -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(slices(net), lr=0.1)
    with watched(net), pytest.raises(UsageError) as refused:
        optimizer.step()
    assert "ParameterList(slices), optimizer, part=" in str(refused.value)


def test_parameters_of_another_model_are_to_be_protected_with_it() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with watched(nn.Linear(2, 2)), pytest.raises(UsageError, match="give it and its module to protect"):
        optimizer.step()


def test_slices_that_are_protected_with_their_optimizer_step() -> None:
    net = nn.Linear(2, 2)
    own = nn.ParameterList(slices(net))
    optimizer = torch.optim.SGD(own, lr=0.1)
    with watched(net, own, optimizer):
        optimizer.step()


def test_one_that_steps_when_steps_count_is_told_once_and_steps() -> None:
    other, told = nn.Linear(2, 2), list[UsageError]()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other(torch.ones(1, 2)).sum().backward()
    before = other.bias.detach().clone()
    with watched(nn.Linear(2, 2), told=told):
        optimizer.step()
        optimizer.step()
    assert [each.cause.split(" steps")[0] for each in told] == ["an optimizer (SGD)"]
    assert not torch.equal(other.bias, before)
