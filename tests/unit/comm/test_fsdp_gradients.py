"""The parameter groups of FSDP2 whose gradients are summed over micro-batches."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from regrow.comm.torch_private import fsdp_gradients


def group(*trains: bool) -> SimpleNamespace:
    parameters = [torch.nn.Parameter(torch.zeros(2), requires_grad=each) for each in trains]
    return SimpleNamespace(
        fsdp_params=[SimpleNamespace(sharded_param=each, offload_to_cpu=False) for each in parameters]
    )


def test_a_group_of_frozen_parameters_has_nothing_to_sum_up(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [group(False, False), group(True, False), group()]
    monkeypatch.setattr(fsdp_gradients, "groups_of", lambda root: groups)
    sums = fsdp_gradients.sums_of([cast(Any, object())])
    assert [len(each.parameters) for each in sums] == [1]
