"""An optimizer that steps and is not protected is refused, with the cure that fits its parameters."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from regrow.core.errors import UsageError
from regrow.train.state.protected import ProtectedState
from regrow.train.state.unprotected import UnprotectedOptimizers


@contextmanager
def watched(*objects: object) -> Iterator[None]:
    state = ProtectedState(list(objects))
    seen = UnprotectedOptimizers(lambda: state, body=lambda: True, training=lambda: False)
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
