"""The adapter of Megatron-Core against a stand-in with the names and signatures that were read; never run on it."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from regrow.core.errors import UsageError
from regrow_recipes.adapters import read_names
from regrow_recipes.adapters.megatron import Shards


class Chunk:
    """A chunk of the model in Megatron's `DistributedDataParallel`."""

    def __init__(self, order: list[str]) -> None:
        self.order = order

    def start_param_sync(self, *, force_sync: bool = False) -> None:
        self.order.append("gather" if force_sync else "gather late")

    def zero_grad_buffer(self) -> None:
        self.order.append("zero")


class Optimizer:
    """A `DistributedOptimizer` that holds the second half of one bf16 parameter."""

    def __init__(self, chunks: list[Chunk], order: list[str]) -> None:
        self.order, self.model_chunks = order, chunks
        self.ddp_config = SimpleNamespace(num_distributed_optimizer_instances=1)
        self.parameter = torch.nn.Parameter(torch.zeros(6, dtype=torch.bfloat16))
        self.main = torch.nn.Parameter(torch.arange(3.0))
        held = {"param_map": {self.parameter: {"param": SimpleNamespace(start=3, end=6)}}}
        self.gbuf_ranges = [{(torch.bfloat16, torch.float32): [held]}]
        self.optimizer = torch.optim.Adam([self.main], lr=0.1)

    def _get_main_param_and_optimizer_states(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        assert parameter is self.parameter
        return {"param": self.main, **self.optimizer.state[self.main]}

    def _copy_main_params_to_model_params(self) -> None:
        self.order.append("copy")
        self.parameter.data[3:] = self.main.data.bfloat16()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step_with_ready_grads(self) -> bool:
        self.order.append("update")
        self.main.grad = torch.ones(3)
        self.optimizer.step()
        for chunk in self.model_chunks:
            chunk.start_param_sync()
        return True

    def step(self) -> bool:
        self.order.append("reduce and clip")
        return self.step_with_ready_grads()


class Scheduler:
    """An `OptimizerParamScheduler`."""

    def __init__(self) -> None:
        self.num_steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, told: dict[str, int]) -> None:
        self.num_steps = told["num_steps"]


class World:
    """One rank of a training."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.chunks = [Chunk(self.order)]
        self.optimizer = Optimizer(self.chunks, self.order)
        self.scheduler = Scheduler()
        self.shards = Shards(self.chunks, self.optimizer, self.scheduler)

    def train(self) -> list[str]:
        """A step; what happened in it, in order."""
        del self.order[:]
        step: Any = SimpleNamespace(update=lambda: self.order.append("border"))
        with self.shards.step(step):
            self.order.append("forward and backward")
            self.optimizer.step()
            self.scheduler.num_steps += 8
        return list(self.order)


@pytest.fixture
def world() -> World:
    return World()


def test_parameters_are_gathered_first_in_the_next_body_and_not_behind_the_update(world: World) -> None:
    body = ["zero", "forward and backward", "reduce and clip", "border", "update"]
    assert world.train() == body
    assert world.train() == ["copy", "gather", *body]
    assert world.optimizer.model_chunks == world.chunks


@pytest.mark.parametrize("behind", [0, 1], ids=["fresh", "behind"])
def test_a_rank_that_is_told_the_pieces_goes_on_as_the_other_would_have(world: World, behind: int) -> None:
    for _ in range(3):
        world.train()
    told, other = world.shards.state_dict(), World()
    for _ in range(behind):
        other.train()
    other.shards.load_state_dict(told)
    ((place, kept),) = told["pieces"].items()
    assert place.endswith("[3:6]")
    assert sorted(kept) == ["exp_avg", "exp_avg_sq", "param", "step"]
    assert other.train() == world.train()
    assert torch.equal(other.optimizer.main, world.optimizer.main)
    assert torch.equal(other.optimizer.parameter, world.optimizer.parameter)
    assert other.scheduler.num_steps == world.scheduler.num_steps == 32
    assert not torch.equal(kept["param"], world.optimizer.main), "what was told follows the training"


def test_before_the_first_update_there_are_no_moments_to_go_back_to(world: World) -> None:
    told = world.shards.state_dict()
    world.train()
    world.shards.load_state_dict(told)
    assert torch.equal(world.optimizer.main, torch.arange(3.0))
    assert world.optimizer.optimizer.state[world.optimizer.main] == {}


def test_other_pieces_are_refused(world: World) -> None:
    world.train()
    told = world.shards.state_dict()
    told["pieces"] = {"elsewhere": {}}
    with pytest.raises(UsageError, match="the same parallel sizes"):
        world.shards.load_state_dict(told)


def test_an_update_outside_a_step_is_refused(world: World) -> None:
    with pytest.raises(UsageError, match=r"shards\.step\(step\)"):
        world.optimizer.step()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda one: delattr(one, "gbuf_ranges"), "use_distributed_optimizer=True"),
        (lambda one: setattr(one.ddp_config, "num_distributed_optimizer_instances", 2), "--buddy-every K"),
        (lambda one: setattr(one, "grad_scaler", object()), "bf16"),
    ],
)
def test_what_keeps_its_state_otherwise_is_refused(change: Any, says: str) -> None:
    order: list[str] = []
    optimizer = Optimizer([Chunk(order)], order)
    change(optimizer)
    with pytest.raises(UsageError, match=says):
        Shards([Chunk(order)], optimizer, Scheduler())


def test_it_says_once_that_nobody_has_run_it(caplog: pytest.LogCaptureFixture) -> None:
    read_names.tell_untested.cache_clear()
    with caplog.at_level(logging.WARNING, logger="regrow"):
        World()
        World()
    assert caplog.text.count("megatron.core was written by reading it at d98e8a6 and has not been run on it") == 1
