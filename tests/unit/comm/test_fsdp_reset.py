"""FSDP2 after a step that was given up, by the ways that versions of torch have: their own, ours, or none."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from regrow.comm.torch_private import fsdp, fsdp_reset
from regrow.comm.torch_private.internals import HashStore
from regrow.core.errors import UsageError
from regrow.train.gradients.wrappers import Modules


@pytest.fixture
def sharded() -> Iterator[nn.Module]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model)
        yield model
    finally:
        dist.destroy_process_group()


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch 2.11 and 2.12."""
    monkeypatch.delattr(FSDPModule, "reset_iter_state", raising=False)


@pytest.mark.usefixtures("without")
def test_a_job_without_fsdp_recovers_with_a_torch_that_cannot_reset_it() -> None:
    modules = Modules([nn.Linear(2, 2)], recovers=True)
    modules.reset(RuntimeError("a step was given up"))
    fsdp.reset_unfinished([])


def losses(model: nn.Module, x: torch.Tensor) -> list[float]:
    found = []
    for _ in range(2):
        loss = model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.add_(parameter.grad, alpha=-0.1)
                parameter.grad = None
        found.append(float(loss.detach()))
    return found


class Given(RuntimeError):
    """Ends a step in its middle."""


def interrupted(model: nn.Module, x: torch.Tensor, where: str) -> None:
    def cut(*_: Any) -> None:
        raise Given

    def cut_backward(module: nn.Module, given: Any, output: torch.Tensor) -> None:
        output.register_hook(cut)  # type: ignore[no-untyped-call]

    layers = cast(nn.Sequential, model)
    if where == "forward":
        handle = layers[2].register_forward_pre_hook(cut)
    else:
        handle = layers[0].register_forward_hook(cut_backward)
    try:
        model(x).square().mean().backward()
    finally:
        handle.remove()


def under_way(root: FSDPModule) -> bool:
    iteration = cast(Any, root)._get_fsdp_state()._state_ctx
    return iteration.iter_forward_root is not None or iteration.post_backward_final_callback_queued


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.usefixtures("without")
def test_our_own_reset_leaves_nothing_of_a_step_that_ended_in_its_middle(sharded: nn.Module, where: str) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    before = [parameter.detach().clone() for parameter in sharded.parameters()]
    undisturbed = losses(sharded, x)
    with torch.no_grad():
        for parameter, former in zip(sharded.parameters(), before, strict=True):
            parameter.copy_(former)
    roots = fsdp.roots([sharded])
    fsdp.refuse_what_cannot_run_again(roots)
    with pytest.raises(Given):
        interrupted(sharded, x, where)
    assert under_way(roots[0]), "nothing to reset: this test would prove nothing"
    fsdp.reset_unfinished(roots)
    assert not under_way(roots[0])
    for parameter in sharded.parameters():
        parameter.grad = None
    assert losses(sharded, x) == undisturbed


@pytest.mark.usefixtures("without")
def test_what_neither_way_can_reset_is_refused_before_the_training(
    sharded: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsdp_reset, "_OF_GROUP", ("_to_sharded", "_gone"))
    with pytest.raises(
        UsageError,
        match=r"FSDP2 of torch \S+ cannot run a step again: it has neither FSDPModule.reset_iter_state nor "
        r"FSDPParamGroup._gone \(install torch 2.13 or newer, or wrap the model in DistributedDataParallel\)",
    ):
        Modules([sharded], recovers=True)
    Modules([sharded])  # outside a job nothing is given up
    Modules([nn.Linear(2, 2)], recovers=True)


def test_a_group_of_the_versions_that_have_one_for_each_module_is_found() -> None:
    one = SimpleNamespace(_fsdp_param_group="one")
    assert fsdp._groups(one) == ["one"]
    assert fsdp._groups(SimpleNamespace(_fsdp_param_group=None)) == []
    assert fsdp._groups(SimpleNamespace(_fsdp_param_groups=["a", "b"])) == ["a", "b"]
