"""Findings of a rehearsal on a body: gradients that it leaves, and unprotected objects that it changes."""

import copy
import random
import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, LRScheduler, SequentialLR, StepLR
from torch.optim.swa_utils import AveragedModel

from regrow.core.errors import UsageError
from regrow.train.rehearsal.leftover_gradients import GatheredGradients, Leftovers
from regrow.train.rehearsal.rehearsal import beyond_a_message
from regrow.train.rehearsal.unprotected_changes import Unprotected
from regrow.train.state.protected import ProtectedState

Clear = Callable[[nn.Linear], None]


def clear_to_none(net: nn.Linear) -> None:
    net.zero_grad()


def clear_to_zero(net: nn.Linear) -> None:
    net.zero_grad(set_to_none=False)


def clear_by_hand(net: nn.Linear) -> None:
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)


def clear_nothing(net: nn.Linear) -> None:
    pass


def backward(net: nn.Linear, scale: float = 1.0) -> None:
    (net(torch.ones(1, 2)).sum() * scale).backward()


@pytest.mark.parametrize("clear", [clear_to_none, clear_to_zero, clear_by_hand])
@pytest.mark.parametrize("scale", [1.0, 3e38, float("nan")])
def test_a_body_that_clears_what_the_last_one_has_left_is_fine(clear: Clear, scale: float) -> None:
    net = nn.Linear(2, 1)
    backward(net, scale)
    left = Leftovers(net.parameters())
    assert left
    with left.refuse_to_add():
        clear(net)
        backward(net, scale)
    backward(net)  # and nobody looks any more


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_body_that_adds_to_what_the_last_one_has_left_is_refused(dtype: torch.dtype) -> None:
    net = nn.Linear(2, 1, dtype=dtype)
    net(torch.ones(1, 2, dtype=dtype)).sum().backward()
    with Leftovers(net.parameters()).refuse_to_add(), pytest.raises(UsageError, match="accumulate inside one step"):
        net(torch.ones(1, 2, dtype=dtype)).sum().backward()


def test_gradients_of_zeros_and_none_are_not_left() -> None:
    net = nn.Linear(2, 1)
    assert not Leftovers(net.parameters())
    backward(net)
    clear_to_zero(net)
    assert not Leftovers(net.parameters())


def over_two_steps(net: nn.Linear, between: Clear, *, updated: bool = False) -> bool:
    gathering = GatheredGradients()
    backward(net)
    gathering.ended(net.parameters(), updated=updated)
    gathering.begins()
    between(net)
    backward(net)
    gathering.ended(net.parameters(), updated=True)
    return gathering.found


def test_steps_that_add_to_what_the_last_one_has_left_are_found() -> None:
    assert over_two_steps(nn.Linear(2, 1), lambda _: None)


@pytest.mark.parametrize("clear", [clear_to_none, clear_to_zero, clear_by_hand])
def test_steps_that_clear_what_the_last_one_has_left_are_not(clear: Clear) -> None:
    assert not over_two_steps(nn.Linear(2, 1), clear)


def test_gradients_that_are_dropped_are_not_kept_alive() -> None:
    net, gathering = nn.Linear(2, 1), GatheredGradients()
    backward(net)
    assert net.weight.grad is not None
    left = weakref.ref(net.weight.grad)
    gathering.ended(net.parameters(), updated=False)
    gathering.begins()
    clear_to_none(net)
    assert left() is None


def test_gradients_that_are_left_by_an_update_are_nobodys() -> None:
    assert not over_two_steps(nn.Linear(2, 1), lambda _: None, updated=True)


class Trainer:
    """A script's own object."""

    def __init__(self, **things: Any) -> None:
        self.__dict__ |= things


def watched(objects: list[object], **locals: Any) -> Unprotected:
    frame: Any = SimpleNamespace(f_locals=locals, f_globals={})
    return Unprotected(ProtectedState(objects), objects, [frame])


def net_and_optimizer() -> tuple[nn.Linear, torch.optim.SGD]:
    net = nn.Linear(2, 1)
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def test_an_average_of_the_weights_that_nobody_protects_is_found_even_where_no_version_is_counted() -> None:
    net, optimizer = net_and_optimizer()
    ema = copy.deepcopy(net)
    looking = watched([net, optimizer], trainer=Trainer(ema=ema, net=net))
    looking.refuse_changed()
    for parameter in ema.parameters():
        parameter.data.mul_(0.9)
    with pytest.raises(UsageError, match=r"changes `trainer.ema` \(Linear\), which is not protected") as refused:
        looking.refuse_changed()
    assert "protect(..., ema=trainer.ema)" in str(refused.value)


def test_what_is_protected_may_change_under_any_name() -> None:
    net, optimizer = net_and_optimizer()
    first, second = ConstantLR(optimizer), StepLR(optimizer, 1)
    scheduler = SequentialLR(optimizer, [first, second], [3])
    objects: list[object] = [net, optimizer, scheduler]
    looking = watched(objects, model=nn.Sequential(net), warmup=first, decay=second, all=[net, scheduler])
    with torch.no_grad():
        net.weight.add_(1)
    optimizer.step()
    scheduler.step()
    looking.refuse_changed()


@pytest.mark.parametrize("held", [lambda it: {"it": it}, lambda it: [it], lambda it: Trainer(it=it)])
def test_a_scheduler_that_nobody_protects_is_found_in_what_holds_it(held: Callable[[LRScheduler], object]) -> None:
    net, optimizer = net_and_optimizer()
    scheduler = StepLR(optimizer, 3)
    looking = watched([net, optimizer], holder=held(scheduler))
    optimizer.step()
    scheduler.step()
    with pytest.raises(UsageError, match=r"changes `holder.*` \(StepLR\)"):
        looking.refuse_changed()


def test_what_waits_to_change_is_refused_before_it_does() -> None:
    net, optimizer = net_and_optimizer()
    for name, thing in {"decay": StepLR(optimizer, 3), "average": AveragedModel(net)}.items():
        looking = watched([net, optimizer], **{name: thing})
        looking.refuse_changed()
        with pytest.raises(UsageError, match=rf"`{name}` \({type(thing).__name__}\) follows what is protected"):
            looking.refuse_waiting()
        watched([net, optimizer, thing], **{name: thing}).refuse_waiting()


def test_a_scheduler_of_another_optimizer_or_within_what_is_protected_waits_for_nothing() -> None:
    net, optimizer = net_and_optimizer()
    _, other = net_and_optimizer()
    inner = StepLR(optimizer, 3)
    wrapper = Trainer(scheduler=inner, state_dict=inner.state_dict, load_state_dict=inner.load_state_dict)
    watched([net, optimizer, wrapper], wrapper=wrapper, inner=inner, other=StepLR(other, 3)).refuse_waiting()


def test_a_scaler_that_nobody_protects_is_found() -> None:
    net, optimizer = net_and_optimizer()
    scaler = torch.amp.GradScaler("cpu")
    backward(net)
    looking = watched([net, optimizer], scaler=scaler)
    scaler.scale(net(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    with pytest.raises(UsageError, match=r"changes `scaler` \(GradScaler\)"):
        looking.refuse_changed()


@pytest.mark.parametrize("kind", [torch.Generator, np.random.default_rng])
def test_a_generator_is_looked_at_by_itself(kind: Callable[[], Any]) -> None:
    net, optimizer = net_and_optimizer()
    noise = kind()
    looking = watched([net, optimizer], noise=noise)
    if isinstance(noise, torch.Generator):
        torch.randn(3, generator=noise)
    else:
        noise.random()
    looking.refuse_changed()
    with pytest.raises(UsageError, match=r"draws from `noise` \(Generator\)"):
        looking.refuse_drawn()


def seeds(noise: Any) -> None:
    noise.manual_seed(7) if isinstance(noise, torch.Generator) else noise.seed(7)


def draws(noise: Any) -> None:
    torch.randn(3, generator=noise) if isinstance(noise, torch.Generator) else noise.random()


def seeds_by_chance(noise: Any) -> None:
    noise.seed()


@pytest.mark.parametrize("kind", [torch.Generator, random.Random])
@pytest.mark.parametrize(
    ("body", "fine"),
    [
        ([seeds, draws], True),
        ([seeds, draws, seeds, draws], True),
        ([draws, seeds, draws], False),
        ([draws, seeds], False),
        ([seeds_by_chance, draws], False),
    ],
)
def test_a_generator_that_is_seeded_before_it_is_drawn_from_is_nobodys_state(
    kind: Callable[[], Any], body: list[Callable[[Any], None]], fine: bool
) -> None:
    noise = kind()
    holder = Trainer(noise=noise)
    looking = watched([*net_and_optimizer()], augment=holder)
    for does in body:
        does(noise)
    if fine:
        looking.refuse_drawn()
        assert looking.seeded == {"augment.noise"}
    else:
        with pytest.raises(UsageError, match=r"draws from `augment.noise`"):
            looking.refuse_drawn()
    assert sys.getprofile() is None


def test_a_generator_that_is_seeded_in_the_rehearsal_and_not_in_a_step_is_refused_there() -> None:
    noise = torch.Generator()
    looking = watched([*net_and_optimizer()], noise=noise)
    draws(noise)
    looking.refuse_unseeded(())
    with pytest.raises(UsageError, match=r"seeds in some steps only, and draws from, `noise`"):
        looking.refuse_unseeded({"noise"})
    looking = watched([*net_and_optimizer()], noise=noise)
    seeds(noise)
    draws(noise)
    looking.refuse_unseeded({"noise"})


def test_a_generator_in_a_slot_of_the_scripts_own_is_looked_at() -> None:
    class Erase:
        __slots__ = ("random",)

        def __init__(self) -> None:
            self.random = random.Random(0)

    net, optimizer = net_and_optimizer()
    transforms = (Erase(),)
    looking = watched([net, optimizer], transforms=transforms)
    transforms[0].random.random()
    with pytest.raises(UsageError, match=r"draws from `transforms\[0\].random` \(Random\)"):
        looking.refuse_drawn()


def test_odd_things_among_a_scripts_variables_do_no_harm() -> None:
    class Odd:
        __slots__ = ()

        def __len__(self) -> int:
            raise RuntimeError

    net, optimizer = net_and_optimizer()
    mine: list[Any] = [1]
    mine.append(mine)
    looking = watched(
        [net, optimizer],
        odd=Odd(),
        scalar=torch.tensor(1.0),
        lazy=nn.LazyLinear(3),
        sparse=nn.Embedding(3, 2, sparse=True),
        meta=nn.Linear(2, 2, device="meta"),
        empty=nn.Linear(0, 2),
        cycle=mine,
        module=sys,
        wide=list(range(10_000)),
    )
    looking.refuse_changed()


class Seen:
    """Counts samples by their names."""

    def __init__(self, names: int) -> None:
        self.state = {"seen": {f"sample {at}": at for at in range(names)}, "bank": torch.zeros(10_000)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_python_state_that_fits_in_no_message_is_told_with_the_object_that_has_it() -> None:
    net, optimizer = net_and_optimizer()
    small, large = Seen(3), Seen(1_000)
    state = ProtectedState([net, optimizer], {"few": small, "many": large})
    assert beyond_a_message(state) == ""
    told = beyond_a_message(state, most=10_000)
    assert "of them in many" in told
    assert "tensors or arrays" in told
    assert beyond_a_message(ProtectedState([net, optimizer], {"few": small}), most=10_000) == "", (
        "tensors are beside it"
    )


def test_states_of_generators_that_a_body_swaps_are_found_where_nobody_protects_what_holds_them() -> None:
    net = nn.Linear(2, 1)
    box = [{"torch": torch.get_rng_state(), "numpy": np.random.get_state()}]  # the same by another name
    states = {"dropout": box[0]}

    def swap() -> None:
        torch.rand(1)
        states["dropout"] = {"torch": torch.get_rng_state(), "numpy": np.random.get_state()}

    unprotected = Unprotected(ProtectedState([net]), [net], [sys._getframe()])
    unprotected.refuse_drawn()
    swap()
    with pytest.raises(UsageError, match=r"into `states\['dropout'\]\['torch'\]`.*protect\(\.\.\., states=states\)"):
        unprotected.refuse_drawn()


def test_a_state_of_a_generator_in_what_a_body_makes_anew_is_its_own() -> None:
    net, kept = nn.Linear(2, 1), {"torch": torch.get_rng_state()}
    unprotected = Unprotected(ProtectedState([net]), [net], [sys._getframe()])
    torch.rand(1)
    kept, other = {"torch": torch.get_rng_state()}, {"torch": torch.get_rng_state()}
    unprotected.refuse_drawn()
    assert kept.keys() == other.keys()


def test_states_of_generators_in_a_protected_object_may_be_swapped() -> None:
    class States(dict[str, Any]):
        def state_dict(self) -> dict[str, Any]:
            return dict(self)

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.update(state)

    net, box = nn.Linear(2, 1), [torch.get_rng_state()]  # what it was made of, by another name
    states = States(dropout=box[0])
    unprotected = Unprotected(ProtectedState([net]), [net, states], [sys._getframe()])
    torch.rand(1)
    states["dropout"] = torch.get_rng_state()
    unprotected.refuse_drawn()
    assert not torch.equal(box[0], states["dropout"])
