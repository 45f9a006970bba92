"""State that a step may change besides parameters: all of it comes back and travels."""

from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from regrow.core.ids import StepNo
from regrow.train.state.audit import ScriptPart
from regrow.train.state.moment import Scope
from regrow.train.state.protected import ProtectedState


class Thing:
    """An object of a script's own that keeps whatever it is given."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Annealed(nn.Module):
    """A module with a temperature that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.temperature, self.name, self.calls = 1.0, "annealed", (0, True)

    def forward(self, x: Any) -> Any:
        self.temperature *= 1.5
        self.calls = (self.calls[0] + 1, True)
        return self.inner(x) / self.temperature


def begun(*objects: Any, scope: Scope | None = None) -> ProtectedState:
    state = ProtectedState(objects)
    state.state_at = StepNo(0)
    if scope is not None:
        state.habits.learn(ScriptPart.EARLY, scope.parameters | scope.objects)
    state.begin()
    return state


def copied(holder: ProtectedState, receiver: ProtectedState) -> None:
    inventory = holder.inventory(holder.state_at)
    for name, tensor in receiver.prepare(inventory).items():
        tensor.detach().copy_(holder.tensor(name).detach())
    receiver.finish()


def test_an_array_in_an_objects_state_is_rolled_back_in_place() -> None:
    queue = np.arange(6.0)
    thing = Thing(queue=queue, rows=[np.zeros(2)])
    state = begun(thing)
    queue += 1
    thing.state["rows"][0] += 5
    state.rollback()
    assert thing.state["queue"] is queue
    assert queue.tolist() == [0, 1, 2, 3, 4, 5]
    assert thing.state["rows"][0].tolist() == [0, 0]


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_a_large_queue_is_rolled_back_once_it_is_known_to_change(kind: str) -> None:
    queue: Any = torch.zeros(300_000) if kind == "tensor" else np.zeros(300_000)
    thing = Thing(queue=queue)
    state = begun(thing, scope=Scope(objects=frozenset({"thing"})))
    for _ in range(2):
        queue[7] = 3
        state.rollback()
        assert thing.state["queue"] is queue
        assert not queue.any()


def test_parameters_that_change_before_the_update_are_rolled_back_also_behind_the_versions() -> None:
    key, replaced = nn.Linear(2, 2), nn.Linear(2, 2)
    before = [p.detach().clone() for p in (*key.parameters(), *replaced.parameters())]
    scope = Scope(frozenset({"model.weight", "model.bias", "model1.weight", "model1.bias"}))
    state = begun(key, replaced, scope=scope)
    for _ in range(2):
        other = torch.full((2, 2), 7.0)
        key.weight.data.mul_(0.5)
        key.bias.data.mul_(0.5)
        replaced.weight.data = other
        replaced.bias.data = replaced.bias.data + 1
        state.rollback()
        now = [*key.parameters(), *replaced.parameters()]
        assert all(torch.equal(p, was) for p, was in zip(now, before, strict=True))
        assert (other == 7).all(), "the memory that was put below a parameter is another's"


@pytest.mark.parametrize("host", [False, True])
def test_a_moment_of_everything_goes_back_past_updates(host: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    lbfgs = torch.optim.LBFGS(nn.Linear(1, 1).parameters())
    thing = Thing(seen=Counter(a=1), average=torch.zeros(400_000))
    state = ProtectedState([model, optimizer, lbfgs, thing])

    def train() -> None:
        loss = model(torch.randn(4, 3)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        thing.state["seen"]["a"] += 1
        thing.state["average"] += 1

    moment = state.moment()
    for round in range(3):
        before, kept = state.digest(), len(optimizer.state)
        moment.take(state.everything(host=host))
        for _ in range(2):
            train()
            assert state.digest() != before
            moment.put_back()
            assert state.digest() == before, f"round {round}"
            assert len(optimizer.state) == kept
        train()


def test_a_defaultdict_stays_one_when_it_travels_and_when_it_is_rolled_back() -> None:
    def thing() -> Thing:
        return Thing(seen=defaultdict(int, a=1), nested=defaultdict(lambda: defaultdict(list)), plain={"k": 1})

    holder, receiver = thing(), thing()
    holder.state["seen"]["b"] += 2
    holder.state["nested"]["x"]["y"].append(1)
    receiver.state["nested"]["z"]["y"].append(1)
    giving, taking = begun(holder), begun(receiver)
    copied(giving, taking)
    assert receiver.state == holder.state
    receiver.state["seen"]["new"] += 1
    receiver.state["nested"]["x"]["other"].append(2)
    assert type(receiver.state["plain"]) is dict
    taking.begin()
    receiver.state["seen"]["more"] += 1
    taking.rollback()
    assert dict(receiver.state["seen"]) == {"a": 1, "b": 2, "new": 1}
    receiver.state["seen"]["yet another"] += 1


def test_a_large_array_travels_as_a_tensor_of_any_size() -> None:
    big = np.arange(200_000, dtype=np.int32).reshape(400, 500)[:, ::2]
    text = np.full(40_000, "word")
    holder, receiver = Thing(big=big, text=text), Thing()
    state = begun(holder)
    copied(state, begun(receiver))
    assert np.array_equal(receiver.state["big"], big)
    assert receiver.state["big"].dtype == np.int32
    assert np.array_equal(receiver.state["text"], text)
    receiver.state["big"] += 1
    assert len(state.inventory(StepNo(0)).python) < 2000


def test_train_eval_and_requires_grad_are_rolled_back_and_handed_over() -> None:
    def model() -> nn.Sequential:
        return nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Linear(2, 2))

    holder, newcomer = model(), model()
    state = begun(holder)
    holder.eval()
    holder[0].weight.requires_grad_(False)
    state.rollback()
    assert all(module.training for module in holder.modules())
    assert holder[0].weight.requires_grad
    holder[1].eval()
    holder[2].bias.requires_grad_(False)
    newcomer[0].weight.requires_grad_(False)
    copied(state, begun(newcomer))
    assert [module.training for module in newcomer] == [True, False, True]
    assert [p.requires_grad for p in newcomer.parameters()] == [True, True, True, False]


def test_evaluation_by_one_rank_alone_is_no_difference_between_replicas() -> None:
    model = nn.Linear(1, 1)
    state = begun(model)
    before = state.digest()
    model.eval()
    assert state.digest() == before


def test_a_plain_attribute_counts_once_a_step_was_seen_to_change_it() -> None:
    holder, newcomer = Annealed(), Annealed()
    state = begun(holder)
    before = state.modes.attributes()
    holder(torch.ones(1, 2))
    assert state.modes.learn(before) == [("model", "temperature"), ("model", "calls")]
    assert state.modes.learn(before) == []
    state.begin()
    holder(torch.ones(1, 2))
    state.rollback()
    assert (holder.temperature, holder.calls) == (1.5, (1, True))
    newcomer.name = "its own"
    copied(state, begun(newcomer))
    assert (newcomer.temperature, newcomer.calls, newcomer.name) == (1.5, (1, True), "its own")


def test_generators_draw_the_same_in_a_step_that_is_run_again() -> None:
    state = ProtectedState([torch.Generator(), nn.Linear(1, 1)], {"noise": np.random.default_rng(3)})
    generator = state._roster.generators["generator"]
    noise = state._roster.generators["noise"]
    assert isinstance(generator, torch.Generator)
    assert isinstance(noise, np.random.Generator)

    def drawn(*parts: int) -> list[float]:
        state.reseed(*parts)
        return [float(torch.rand(1, generator=generator)), float(noise.random())]

    assert drawn(1, 2, 3) == drawn(1, 2, 3)
    assert all(one != other for one, other in zip(drawn(1, 2, 3), drawn(1, 2, 4), strict=True))


def test_private_counts_are_learnt_and_flags_of_what_is_made_once_are_not() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self._updates, self._rate, self._made = 0, 0.5, False

    model = Lazy()
    state = begun(model)
    before = state.modes.attributes()
    model._updates, model._rate, model._made = 1, 0.25, True
    assert state.modes.learn(before) == [("model", "_updates"), ("model", "_rate")]
    state.modes.undo(before)
    assert (model._updates, model._rate, model._made) == (0, 0.5, True)


class AddingScheduler:
    """As Megatron's: what it loads is added to what it has counted, and the rate follows at once."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.num_steps = optimizer, 0

    def step(self, increment: int = 1) -> None:
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            group["lr"] = 1.0 / (1 + self.num_steps)

    def state_dict(self) -> dict[str, int]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step(state["num_steps"])


def scheduled(steps: int) -> tuple[ProtectedState, AddingScheduler]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = AddingScheduler(optimizer)
    scheduler.step(steps)
    return begun(model, optimizer, scheduler), scheduler


@pytest.mark.parametrize("stepped", [False, True], ids=["at once", "after its step"])
def test_a_scheduler_that_adds_what_it_loads_comes_back_with_its_rate(stepped: bool) -> None:
    state, scheduler = scheduled(3)
    if stepped:
        scheduler.step()
    state.rollback()
    assert scheduler.num_steps == 3
    assert scheduler.optimizer.param_groups[0]["lr"] == 1 / 4


def test_a_scheduler_that_adds_what_it_loads_travels_to_one_that_has_counted() -> None:
    holder, _ = scheduled(5)
    receiver, there = scheduled(2)
    copied(holder, receiver)
    assert there.num_steps == 5
    assert there.optimizer.param_groups[0]["lr"] == 1 / 6


class Untold:
    """Counts its calls of `state_dict`, so that it never tells what it was given."""

    def __init__(self) -> None:
        self._asked = 0

    def state_dict(self) -> dict[str, int]:
        self._asked += 1
        return {"asked": self._asked}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._asked = state["asked"]


def test_an_object_that_does_not_take_over_its_state_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    state = begun(nn.Linear(2, 2), Untold())
    with caplog.at_level("WARNING", "regrow"):
        state.rollback()
        state.begin()
        state.rollback()
    assert [each.getMessage().split(":")[0] for each in caplog.records] == ["untold"]


class OwnBuffers(nn.Module):
    """As Megatron's `DistributedDataParallel`: an attribute of its own in the place of a method of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(2)
        self.buffers = [torch.zeros(3)]  # type: ignore[assignment]

    def forward(self, x: Any) -> Any:
        return self.inner(x)


def test_a_module_may_call_something_else_its_buffers() -> None:
    module = OwnBuffers()
    state = begun(module)
    module(torch.randn(4, 2))
    state.rollback()
    assert module.inner.num_batches_tracked == torch.tensor(0)
    assert state.buffers_of_no([module]) == set()
