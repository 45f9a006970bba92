import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from regrow.comm.torch_private.internals import HashStore
from regrow.core.errors import StateError, UsageError
from regrow.core.ids import NO_STATE, StepNo
from regrow.train.state.audit import ScriptPart
from regrow.train.state.frozen import FrozenState
from regrow.train.state.naming import Protected
from regrow.train.state.protected import ProtectedState

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw-loop": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw-tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, dampening=0.1),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.01, history_size=3),
}


class Average:
    """An object of a script's own, with tensors in its state."""

    def __init__(self, model: Any) -> None:
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.seen = 0

    def update(self, model: Any) -> None:
        self.seen += 1
        for name, p in model.named_parameters():
            self.shadow[name].lerp_(p.detach(), 0.1)

    def state_dict(self) -> Any:
        return {"shadow": self.shadow, "seen": self.seen}

    def load_state_dict(self, state: Any) -> None:
        self.shadow, self.seen = state["shadow"], state["seen"]


class Training:
    def __init__(self, make: Any = OPTIMIZERS["adamw"], seed: Any = 0) -> None:
        torch.manual_seed(seed)
        layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 5), nn.Linear(5, 5)]
        layers[-1].bfloat16().float()
        self.model: Any = nn.Sequential(*layers)
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer: Any = make(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.average = Average(self.model)
        self.state = ProtectedState([self.model, self.optimizer, self.scheduler], {"ema": self.average})
        self.state.state_at = StepNo(0)
        self.losses: list[float] = []

    def forward(self, step: Any) -> Any:
        torch.manual_seed(1000 + step)
        return self.model(torch.randn(8, 1, 6, 6)).pow(2).mean()

    def step(self, step: Any) -> None:
        def closure() -> Any:
            self.optimizer.zero_grad()
            loss = self.forward(step)
            loss.backward()
            return loss

        if isinstance(self.optimizer, torch.optim.LBFGS):
            loss = self.optimizer.step(closure)  # type: ignore[no-untyped-call]
        else:
            loss = closure()
            self.optimizer.step()
        self.scheduler.step()
        self.average.update(self.model)
        self.optimizer.zero_grad()
        self.losses.append(loss.item())


def copied(holder: Any, receiver: Any) -> None:
    """Hydrate without a network."""
    inventory = holder.inventory(holder.state_at)
    targets = receiver.prepare(inventory)
    assert receiver.state_at == NO_STATE
    for name, tensor in targets.items():
        tensor.detach().copy_(holder.tensor(name).detach())
    receiver.finish()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_newcomer_that_never_stepped_trains_on_bitwise_like_its_holder(make: Any) -> None:
    holder, newcomer = Training(make), Training(make, seed=5)
    for step in range(3):
        holder.step(step)
    holder.state.state_at = StepNo(3)
    copied(holder.state, newcomer.state)
    assert newcomer.state.state_at == 3
    assert newcomer.state.digest() == holder.state.digest()
    for step in range(3, 6):
        holder.step(step)
        newcomer.step(step)
    assert newcomer.losses == holder.losses[3:]
    assert newcomer.state.digest() == holder.state.digest()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_receiver_ahead_of_its_holder_drops_the_state_the_holder_lacks(make: Any) -> None:
    holder, ahead = Training(make), Training(make)
    ahead.step(0)
    ahead.step(1)
    copied(holder.state, ahead.state)
    assert ahead.state.digest() == holder.state.digest()
    assert [len(v) for v in ahead.optimizer.state.values()] == [len(v) for v in holder.optimizer.state.values()]
    holder.step(0)
    ahead.step(0)
    assert ahead.state.digest() == holder.state.digest()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_after_a_rehearsal_that_is_restored_the_run_is_bitwise_the_same(make: Any) -> None:
    plain, rehearsed = Training(make), Training(make)
    before = rehearsed.state.digest()
    kept = rehearsed.state.capture()
    rehearsed.step(90)
    rehearsed.step(91)
    assert rehearsed.state.digest() != before
    rehearsed.state.restore(kept)
    assert rehearsed.state.digest() == before
    assert len(rehearsed.optimizer.state) == len(plain.optimizer.state)
    assert all(p.grad is None for p in rehearsed.model.parameters())
    rehearsed.losses.clear()
    for step in range(3):
        plain.step(step)
        rehearsed.step(step)
    assert rehearsed.losses == plain.losses
    assert rehearsed.state.digest() == plain.state.digest()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_update_is_noticed_and_a_forward_pass_is_not_one(make: Any) -> None:
    training = Training(make)
    training.step(0)
    training.state.begin()
    training.forward(1).backward()
    assert not training.state.parameters_changed()
    training.step(1)
    assert training.state.parameters_changed()
    training.state.begin()
    assert not training.state.parameters_changed()


def test_an_update_that_another_hook_forbids_counts_as_none() -> None:
    training = Training()
    training.step(0)

    def forbid(*_: Any) -> None:
        raise RuntimeError("given up")

    training.optimizer.register_step_pre_hook(forbid)
    fused = ProtectedState([training.model, training.optimizer])
    fused.begin()
    with pytest.raises(RuntimeError, match="given up"):
        training.optimizer.step()
    assert not fused.parameters_changed()


@pytest.mark.parametrize("to_none", [True, False], ids=["none", "zeros"])
def test_rollback_puts_back_all_that_a_body_changes_before_its_update(to_none: Any) -> None:
    training = Training()
    training.step(0)
    if not to_none:
        for p in training.model.parameters():
            p.grad = torch.zeros_like(p)
    training.state.begin()
    before = training.state.digest()
    for _ in range(2):
        training.forward(1).backward()
        training.scheduler.step()
        training.average.seen += 1
        training.optimizer.param_groups[0]["lr"] = 7.0
        training.optimizer.param_groups[0]["new"] = 1
        assert training.state.digest() != before
        training.state.rollback()
        assert training.state.digest() == before
        for p in training.model.parameters():
            assert (p.grad is None) if to_none else not p.grad.any()


def test_rollback_puts_back_running_statistics_though_batch_norm_counts_no_versions() -> None:
    training = Training()
    norm = training.model[1]
    version, before = norm.running_mean._version, norm.running_mean.clone()
    training.state.begin()
    training.forward(0)
    assert not torch.equal(norm.running_mean, before)
    assert norm.running_mean._version == version, "if torch counts these now, rollback.py can be simpler"
    training.state.rollback()
    assert torch.equal(norm.running_mean, before)


def test_rollback_puts_back_buffers_that_are_replaced_large_or_not_contiguous() -> None:
    module: Any = nn.Module()
    module.register_buffer("replaced", torch.ones(2))
    module.register_buffer("large", torch.zeros(100_000))
    module.register_buffer("crooked", torch.arange(6.0).reshape(2, 3).t())
    module.register_buffer("scalar", torch.tensor(3, dtype=torch.int64))
    module.register_buffer("brief", torch.ones(3, dtype=torch.bfloat16))
    module.register_buffer("empty", torch.empty(0))
    module.register_buffer("hidden", torch.ones(1), persistent=False)
    state = ProtectedState([module])
    before = state.digest()
    for _ in range(2):
        state.begin()
        module.replaced = module.replaced + 1
        module.large.add_(1)
        module.crooked.mul_(2)
        module.scalar.add_(1)
        module.brief.add_(1)
        module.hidden.add_(1)
        assert state.digest() != before
        state.rollback()
        assert state.digest() == before


def test_what_was_hydrated_is_what_the_next_rollback_goes_back_to() -> None:
    holder, receiver = Training(), Training(seed=3)
    receiver.state.begin()
    holder.step(0)
    holder.state.state_at = StepNo(1)
    copied(holder.state, receiver.state)
    with pytest.raises(StateError, match="begin"):
        receiver.state.rollback()
    receiver.state.begin()
    receiver.forward(1).backward()
    receiver.state.rollback()
    assert receiver.state.digest() == holder.state.digest()


def test_names_are_those_of_distributed_checkpoints() -> None:
    training = Training()
    training.step(0)
    names = [entry.name for entry in training.state.inventory(StepNo(0)).entries]
    assert {"model.0.weight", "model.1.running_mean", "optim.0.weight.exp_avg", "optim.3.bias.step"} <= set(names)
    assert "ema.shadow.0.weight" in names
    assert names == sorted(names)


def test_wrapped_models_have_the_names_of_the_model_inside() -> None:
    inner = nn.Linear(2, 2)
    compiled: Any = torch.compile(inner)
    assert {e.name for e in _entries([compiled])} == {"model.weight", "model.bias"}
    assert {e.name for e in _entries([inner, compiled])} == {"model.weight", "model.bias"}
    assert {e.name for e in _entries([nn.Sequential(compiled)])} == {"model.0.weight", "model.0.bias"}


def test_a_model_inside_ddp_has_the_names_of_the_model_itself() -> None:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        inner = nn.Linear(2, 2)
        assert {e.name for e in _entries([nn.parallel.DistributedDataParallel(inner)])} == {
            "model.weight",
            "model.bias",
        }
    finally:
        torch.distributed.destroy_process_group()


def test_several_modules_and_optimizers_get_numbers_or_names() -> None:
    first, second, third = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0, momentum=0.5) for m in (first, second)]
    for module in (first, second):
        module(torch.ones(1, 1)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    names = {entry.name for entry in _entries([first, *optimizers, second], critic=third)}
    assert {"model.weight", "model1.weight", "critic.weight"} <= names
    assert {"optim.weight.momentum_buffer", "optim1.model1.weight.momentum_buffer"} <= names


def test_a_tied_parameter_travels_once_and_stays_tied() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    assert [entry.name for entry in _entries([model])] == ["model.0.weight"]


def test_a_parameter_of_no_module_is_protected_through_its_optimizer() -> None:
    loose = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([loose], lr=0.1)
    state = ProtectedState([optimizer])
    assert [entry.name for entry in state.inventory(NO_STATE).entries] == ["optim.group0.0.parameter"]
    assert state.parameters()[0] is loose


def test_an_averaged_model_and_a_modules_extra_state_are_protected() -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"count": self.count}

        def set_extra_state(self, state: Any) -> None:
            self.count = state["count"]

    def make(count: Any) -> Any:
        model = Extra(2, 2)
        model.count = count
        return model, ProtectedState([model], {"ema": AveragedModel(nn.Linear(2, 2))})

    (_, holder), (other, receiver) = make(3), make(4)
    assert any(entry.name == "ema.n_averaged" for entry in holder.inventory(NO_STATE).entries)
    copied(holder, receiver)
    assert other.count == 3


def test_the_digest_depends_on_neither_the_order_of_creation_nor_on_strides() -> None:
    one, other = Training(), Training()
    one.step(0)
    other.step(0)
    for p in reversed(list(other.model.parameters())):
        values = other.optimizer.state.pop(p)
        other.optimizer.state[p] = dict(reversed(values.items()))
    other.model.to(memory_format=torch.contiguous_format)
    assert one.state.digest() == other.state.digest()
    other.optimizer.state[next(other.model.parameters())]["step"].add_(1)
    assert one.state.digest() != other.state.digest()


def test_the_layout_tells_models_apart_but_not_their_values() -> None:
    assert Training(seed=1).state.layout() == Training(seed=2).state.layout()
    assert ProtectedState([nn.Linear(2, 3)]).layout() != ProtectedState([nn.Linear(2, 4)]).layout()


def test_a_part_makes_another_holding_of_what_it_names_alone() -> None:
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    first, second = (
        ProtectedState([], {"inner": optimizer}, part=f"rank{rank}", earlier=[Protected([model], {})])
        for rank in (0, 1)
    )
    assert first.layout() != second.layout() and first.parted()
    assert not ProtectedState([model, optimizer]).parted()
    names = [entry.name for entry in first.inventory(NO_STATE).entries]
    momentum = ["rank0.inner.bias.momentum_buffer", "rank0.inner.weight.momentum_buffer"]
    assert names == ["model.bias", "model.weight", *momentum]


@pytest.mark.parametrize(
    ("receiver", "complaint"),
    [
        (lambda: [nn.Linear(2, 4)], r"model\.weight is float32\[4, 2\] here and float32\[3, 2\] in the state"),
        (lambda: [nn.Linear(2, 3).double()], r"model\.weight is float64\[3, 2\] here and float32"),
        (lambda: [nn.Linear(2, 3, bias=False)], r"model\.bias is in the state that was offered, but not"),
        (lambda: [nn.Sequential(nn.Linear(2, 3))], r"model\.0\.weight is in this worker's script, but not"),
    ],
    ids=["shape", "dtype", "surplus", "missing"],
)
def test_state_of_another_model_is_refused_with_the_tensors_name_and_nothing_changes(
    receiver: Any, complaint: Any
) -> None:
    holder = ProtectedState([nn.Linear(2, 3)])
    holder.state_at = StepNo(4)
    state = ProtectedState(receiver())
    state.state_at = StepNo(2)
    before = state.digest()
    with pytest.raises(StateError, match=complaint):
        state.prepare(holder.inventory(StepNo(4)))
    assert state.digest() == before
    assert state.state_at == 2


def test_other_parameter_groups_or_objects_are_refused_with_a_cure() -> None:
    def build(groups: Any, scheduler: Any) -> Any:
        model = nn.Linear(2, 2)
        split = [{"params": [p]} for p in model.parameters()] if groups else model.parameters()
        optimizer = torch.optim.AdamW(split)
        extra = [torch.optim.lr_scheduler.StepLR(optimizer, 1)] if scheduler else []
        return ProtectedState([model, optimizer, *extra])

    with pytest.raises(StateError, match="parameter groups differ"):
        build(False, True).prepare(build(True, True).inventory(NO_STATE))
    with pytest.raises(StateError, match="protect the same objects"):
        build(False, False).prepare(build(False, True).inventory(NO_STATE))


def test_state_at_another_step_is_not_given_out() -> None:
    training = Training()
    training.state.state_at = StepNo(7)
    with pytest.raises(StateError, match="state@8 was asked for; the state of this worker stands at step 7"):
        training.state.inventory(StepNo(8))
    training.state.state_at = NO_STATE
    with pytest.raises(StateError, match="is torn"):
        training.state.inventory(StepNo(7))


def test_what_has_no_state_and_names_that_clash_are_usage_errors() -> None:
    with pytest.raises(UsageError, match="a int, which has no state_dict"):
        ProtectedState([3])
    with pytest.raises(UsageError, match="'model'"):
        ProtectedState([nn.Linear(1, 1)], {"model": nn.Linear(1, 1)})
    with pytest.raises(UsageError, match="'regrow'"):
        ProtectedState([], {"regrow": nn.Linear(1, 1)})


def test_a_tensor_without_plain_memory_is_refused_by_name() -> None:
    module = nn.Module()
    module.register_buffer("graph", torch.eye(3).to_sparse())
    with pytest.raises(StateError, match=r"model\.graph"):
        ProtectedState([module]).inventory(NO_STATE)


class Scaled(torch.Tensor):
    """Numbers of eight bits and their scale, as torchao has them."""

    numbers: torch.Tensor
    scale: torch.Tensor

    def __new__(cls, numbers: torch.Tensor, scale: torch.Tensor) -> "Scaled":
        made = torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype)
        made.numbers, made.scale = numbers, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].numbers, args[0].scale)
        raise NotImplementedError(func)


def test_a_tensor_made_of_others_is_refused_by_name() -> None:
    module = nn.Module()
    module.register_buffer("weight", Scaled(torch.ones(3, dtype=torch.int8), torch.ones(1)))
    with pytest.raises(StateError, match=r"model\.weight is a Scaled"):
        ProtectedState([module]).inventory(NO_STATE)


def test_gradients_of_a_capture_come_back_bitwise() -> None:
    training = Training()
    training.forward(0).backward()
    grads = [copy.deepcopy(p.grad) for p in training.model.parameters()]
    kept = training.state.capture()
    training.step(0)
    training.state.restore(kept)
    assert all(torch.equal(p.grad, g) for p, g in zip(training.model.parameters(), grads, strict=True))


def _entries(objects: Any, **named: Any) -> Any:
    return ProtectedState(objects, named).inventory(NO_STATE).entries


class Calls(torch.overrides.TorchFunctionMode):
    """Calls of torch, with their further arguments."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((func.__name__, args[1:2]))
        return func(*args, **(kwargs or {}))


def test_the_rehearsals_copy_of_the_state_lies_on_the_host_and_no_other_is_made() -> None:
    training = Training()
    training.optimizer.zero_grad(set_to_none=True)
    with Calls() as calls:
        captured = training.state.capture()
    copied = [args for name, args in calls.seen if name == "to"]
    assert copied == [("cpu",)] * len(captured.values) != []
    assert not [name for name, _ in calls.seen if name in ("clone", "empty_like", "deepcopy")]


def stepped_once() -> tuple[nn.Linear, ProtectedState]:
    """A network that an optimizer has stepped."""
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = ProtectedState([net, optimizer], {})
    state.state_at = StepNo(0)
    return net, state


def test_newcomers_read_a_copy_of_what_a_body_writes_early_and_in_place_what_only_an_update_changes() -> None:
    net, state = stepped_once()
    state.habits.learn(ScriptPart.EARLY, ["model.weight"])
    frozen = FrozenState(state, lambda: None)
    frozen.freeze(StepNo(0))
    before = net.weight.detach().clone()
    with torch.no_grad():
        net.weight.fill_(9.0)
    assert torch.equal(frozen.tensor("model.weight"), before)
    assert frozen.tensor("model.bias").data_ptr() == net.bias.data_ptr()


def test_nothing_is_read_in_place_where_the_next_body_may_be_undone_as_a_whole() -> None:
    net, state = stepped_once()
    frozen = FrozenState(state, lambda: None)
    frozen.freeze(StepNo(0), whole_body=True)
    before = net.weight.detach().clone()
    with torch.no_grad():
        net.weight.fill_(9.0)
    assert torch.equal(frozen.tensor("model.weight"), before)


class Noisy(torch.optim.Optimizer):
    """As Opacus's: an optimizer by its class, which wraps one and never makes itself one."""

    def __init__(self, wrapped: torch.optim.Optimizer) -> None:
        self.original_optimizer = wrapped

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.original_optimizer.step()


def test_a_wrapper_that_takes_no_hooks_is_refused_with_what_it_wraps() -> None:
    model = nn.Linear(2, 2)
    noisy = Noisy(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match=r"a Noisy wraps .* its \.original_optimizer"):
        ProtectedState([model, noisy])
