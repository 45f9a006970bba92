"""The micro-batches of one step, in a world of one: gradients, weights, numbers, random numbers, and wrong bodies."""

import gc
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import regrow
from regrow.core.errors import UsageError
from regrow.core.ids import StepNo
from regrow.data.order import order_of
from regrow.train.dealers import dealer
from regrow.train.gradients.wrappers import Modules
from regrow.train.microbatches import Dealer, MicroBatches
from regrow.train.state.protected import ProtectedState
from regrow.train.step import Step
from regrow_recipes.adapters.accelerate import _named_as_here as named_as_here

SIZES = (1, 3, 2, 5, 4)
ALL = len(SIZES)
Count = int | dict[int, int]
ODD = 331
"""A width that no other tensor of this process has."""


def batch_of(step: int, share: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(100 * step + share)
    return torch.randn(SIZES[share % len(SIZES)], 4, generator=source, dtype=torch.float64)


class CallHeader:
    """Stand-in for the step."""

    rehearsed = False

    def __init__(self) -> None:
        self.numbers: dict[str, float] = {}

    def log(self, **metrics: float) -> None:
        self.numbers |= metrics

    def receive(self, numbers: dict[str, float]) -> None:
        self.heard = {**getattr(self, "heard", {}), **numbers}

    def read(self, what: str, batch: torch.Tensor) -> None:
        self.has_read = [*getattr(self, "has_read", []), what]


class World:
    """A model with one replica, and its dealer."""

    def __init__(self, net: nn.Module, *, count: Count = ALL, invariant: bool = False, loader: Any = None) -> None:
        self.net, self.step = net, CallHeader()
        state, modules = ProtectedState([net]), Modules([net])
        self.dealer: Dealer = dealer(loader or batch_of, state, modules, seed=3, count=count, invariant=invariant)

    def enter(self, number: int = 0) -> MicroBatches:
        micros = self.dealer.batch(number, 0, 1)
        micros.enter(self.step)  # type: ignore[arg-type]
        return micros

    def run(self, number: int = 0, *, weight: Any = None) -> MicroBatches:
        micros = self.enter(number)
        for micro in micros:
            loss = self.net(micro.batch).square().mean()
            micro.log(loss=loss, size=len(micro.batch))
            micro.backward(loss, weight=None if weight is None else weight(micro))
        return micros


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("invariant", [False, True])
def test_the_gradient_is_that_of_the_mean_over_all_samples(invariant: bool) -> None:
    world, other = World(net(), invariant=invariant), net()
    for number in range(2):
        world.run(number)
        everything = torch.cat([batch_of(number, share) for share in range(len(SIZES))])
        loss = other(everything).square().mean()
        wanted = torch.autograd.grad(loss, list(other.parameters()))
        assert len(gradients(world.net)) == len(wanted)
        for found, right in zip(gradients(world.net), wanted, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-13, atol=1e-15)
        assert world.step.numbers["loss"] == pytest.approx(float(loss.detach()), rel=1e-14)
        assert world.step.numbers["size"] == pytest.approx(sum(n * n for n in SIZES) / sum(SIZES))


@pytest.mark.parametrize("invariant", [False, True])
def test_weights_may_be_tokens(invariant: bool) -> None:
    world, other = World(net(), invariant=invariant), net()
    world.run(weight=lambda micro: 10 * micro.index)
    losses = [other(batch_of(0, share)).square().mean() for share in range(len(SIZES))]
    loss = sum(10 * at * each for at, each in enumerate(losses)) / sum(10 * at for at in range(len(SIZES)))
    wanted = torch.autograd.grad(loss, list(other.parameters()))
    for found, right in zip(gradients(world.net), wanted, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("weight", [1.5, -1, True, "many", torch.zeros(2)])
def test_a_weight_that_is_no_count_is_refused(weight: Any) -> None:
    with pytest.raises(UsageError, match="is no count"):
        World(net()).run(weight=lambda micro: weight)


def test_weights_that_add_up_to_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="no micro-batch of step 0 has any weight"):
        World(net()).run(weight=lambda micro: 0)


def test_large_weights_are_exact() -> None:
    """Up to 2**53, in sum too; in single precision 2**24 + 1 would be lost."""
    world = World(nn.Linear(4, 1).double(), count=2)
    micros = world.enter()
    for micro in micros:
        micro.log(first=float(micro.index == 0))
        micro.backward(world.net(micro.batch).sum(), weight=2**24 + 1 if micro.index == 0 else 2**24)
    assert world.step.numbers["first"] == (2**24 + 1) / (2**25 + 1)


def test_a_gradient_left_by_another_step_does_not_count() -> None:
    world = World(net())
    world.run()
    first = [each.clone() for each in gradients(world.net)]
    world.run()
    assert all(torch.equal(*pair) for pair in zip(first, gradients(world.net), strict=True))


class Draws(nn.Module):
    """Notes a random number at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.drawn: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.drawn.append(float(torch.rand(())))
        return self.weight * x


def test_random_numbers_belong_to_the_micro_batch() -> None:
    model = Draws()
    world = World(model)
    world.run()
    after = float(torch.rand(()))
    assert len(set(model.drawn)) == len(SIZES)
    once, model.drawn = model.drawn, []
    torch.rand(5)
    world.run()
    assert model.drawn == once
    assert float(torch.rand(())) == after
    model.drawn = []
    world.run(1)
    assert set(model.drawn).isdisjoint(once)


def test_a_rehearsal_runs_two_of_them_and_logs_nothing() -> None:
    world = World(net())
    world.step.rehearsed = True
    assert [micro.index for micro in _through(world)] == [0, 1]
    assert world.step.numbers == {}


def _through(world: World) -> list[Any]:
    seen = []
    for micro in world.enter():
        micro.backward(world.net(micro.batch).square().mean())
        seen.append(micro)
    return seen


def test_an_update_before_the_last_micro_batch_is_refused() -> None:
    world = World(net())
    for micro in world.enter():
        micro.backward(world.net(micro.batch).square().mean())
        if micro.index == 1:
            break
    with pytest.raises(UsageError, match="updates after 2 of its 5 micro-batches"):
        world.dealer.check_complete()


def test_an_update_without_a_backward_is_refused() -> None:
    world = World(net())
    for _ in world.enter():
        break
    with pytest.raises(UsageError, match=r"micro-batch 0 of step 0 was left without micro\.backward"):
        world.dealer.check_complete()
    world.run().leave()
    world.dealer.check_complete()


def test_an_accelerators_are_called_what_its_script_calls_them() -> None:
    world = World(net())
    micros = named_as_here(world.enter())
    assert repr([micros.backward, micros.all]) == "['accelerator.backward(loss)', 'accelerator.batches(micros)']"
    for _ in micros:
        break
    with pytest.raises(UsageError, match=r"was left without accelerator\.backward\(loss\)"):
        world.dealer.check_complete()


def test_micro_batches_are_gone_through_once() -> None:
    world = World(net())
    micros = world.run()
    with pytest.raises(UsageError, match="twice"):
        next(iter(micros))
    micros.leave()
    with pytest.raises(UsageError, match="asked for"):
        next(iter(world.dealer.batch(1, 0, 1)))


def test_a_micro_batch_that_is_unpacked_names_its_data() -> None:
    micros: Any = World(net()).enter()
    with pytest.raises(UsageError, match=r"`x, y = micro\.batch`"):
        for _x, _y in micros:
            pass


def test_a_log_after_the_backward_is_refused() -> None:
    world = World(net())
    micro = next(iter(world.enter()))
    micro.backward(world.net(micro.batch).square().mean())
    with pytest.raises(UsageError, match="logs after its backward"):
        micro.log(loss=1.0)


def test_all_log_the_same_names() -> None:
    world = World(net())
    with pytest.raises(UsageError, match="log different names"):
        for micro in world.enter():
            micro.log(**{f"loss{micro.index % 2}": 1.0})
            micro.backward(world.net(micro.batch).square().mean())


def test_a_loss_must_be_a_scalar() -> None:
    world = World(net())
    micro = next(iter(world.enter()))
    with pytest.raises(UsageError, match="shape"):
        micro.backward(world.net(micro.batch).expand(2, 1))


@pytest.mark.parametrize("count", [0, -2])
def test_a_step_has_micro_batches(count: int) -> None:
    with pytest.raises(UsageError, match="nothing to compute"):
        World(net(), count=count)


def test_what_speaks_in_every_forward_needs_even_shares() -> None:
    world = World(nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4)), count=5)
    world.dealer.seek(0, 0, 5)
    with pytest.raises(UsageError, match="unevenly to 2 replicas, and 1 reduces"):
        world.dealer.seek(0, 0, 2)


def test_a_step_without_micro_batches_says_so() -> None:
    session: Any = SimpleNamespace(rank=0, began=0)
    step = Step(session, StepNo(0), "a batch")
    with pytest.raises(UsageError, match="step 0 has no micro-batches"):
        _ = step.microbatches


def test_a_step_that_is_unpacked_names_the_way_to_its_batch() -> None:
    session: Any = SimpleNamespace(rank=0, began=0)
    step: Any = Step(session, StepNo(0), ("x", "y"))
    with pytest.raises(UsageError, match=r"`with step as \(x, y\):`"):
        _x, _y = step
    assert not step.entered


def test_ranks_without_a_wrapper_that_reduces_are_refused() -> None:
    world = World(net())
    micros = world.dealer.batch(0, 0, 2)
    micros.enter(world.step)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="nothing reduces their gradients"):
        next(iter(micros))


# --- invariant mode ------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ODD))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x.sum()


def wide_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) and each.numel() == ODD for each in gc.get_objects())


@pytest.fixture
def frozen() -> Iterator[None]:
    """Freeze the present objects, so that `gc` does not look through them again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("count", [8, 13, 32])
def test_no_more_than_log2_gradients_are_kept_beside_the_present_one(count: int) -> None:
    world, most = World(Wide(), count=count, invariant=True), 0
    before = wide_tensors()
    for micro in world.enter():
        most = max(most, wide_tensors() - before)
        micro.backward(world.net(micro.batch.float()).square().mean())
    assert 1 <= most <= math.ceil(math.log2(count))
    assert wide_tensors() == before + 1, "more than the gradient is left"


def test_the_sum_is_that_of_the_tree() -> None:
    class Values(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x[0, 0]

    values = [1e16, 1.0, 1.0, 1.0]
    loader = [torch.full((1, 1), value, dtype=torch.float64) for value in values]
    world = World(Values(), count=4, invariant=True, loader=loader)
    for micro in world.enter():
        micro.backward(world.net(micro.batch))
    # Each is scaled by 1/4, which is exact.
    assert float(gradients(world.net)[0]) == ((1e16 + 1.0) + (1.0 + 1.0)) / 4
    assert float(gradients(world.net)[0]) != sum(values) / 4


def test_a_parameter_that_nobody_uses_has_a_gradient_of_zeros() -> None:
    world = World(Wide(), invariant=True)
    for micro in world.enter():
        micro.backward(world.net(micro.batch.float()).square().mean())
    assert world.net.get_parameter("unused").grad is not None
    assert float(world.net.get_parameter("unused").grad.abs().sum()) == 0.0  # type: ignore[union-attr]


def test_running_statistics_are_refused_unless_they_stand_still() -> None:
    with pytest.raises(UsageError, match="BatchNorm1d whose running statistics change"):
        World(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), invariant=True)
    World(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), invariant=True)
    World(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False)), invariant=True)


def test_a_buffer_that_is_written_to_is_refused() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.get_buffer("seen").add_(1)
            return x @ self.weight

    with pytest.raises(UsageError, match="the buffer seen was written to"):
        World(Counting(), invariant=True).run()


def test_more_threads_than_one_are_refused() -> None:
    torch.set_num_threads(2)
    with pytest.raises(UsageError, match="2 threads"):
        World(net(), invariant=True)


def test_a_gradient_that_comes_in_parts_is_refused() -> None:
    """Reentrant checkpoints of a shared parameter add to its gradient twice, so the order of the sum would differ."""
    model = nn.Linear(4, 4).double()
    world = World(model, invariant=True)
    micro = next(iter(world.enter()))
    x = micro.batch.requires_grad_()
    for _ in range(2):
        x = checkpoint(model, x, use_reentrant=True)
    with pytest.raises(UsageError, match="in two parts"):
        micro.backward(x.square().mean())


def test_sparse_gradients_are_refused() -> None:
    model = nn.Embedding(8, 2, sparse=True)
    world = World(model, invariant=True, loader=[torch.arange(3)])
    micro = next(iter(world.enter()))
    with pytest.raises(UsageError, match="sparse"):
        micro.backward(model(micro.batch).sum())


# --- as many as a table says ---------------------------------------------------------------------------------------

TABLE = {1: 3, 2: 4, 4: 8}


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index), dtype=torch.float64)


def constant(size: int = 12) -> regrow.DataLoader[Any]:
    return regrow.DataLoader(Numbers(), global_batch_size=size, shuffle=True, remainder="wrap")


def test_a_table_changes_the_number_of_micro_batches_and_not_what_a_step_reads() -> None:
    world, read = World(net(), count=TABLE, loader=constant()), {}
    for number, replicas in enumerate([1, 2, 1, 3, 4, 8, 2]):
        count = TABLE.get(replicas, TABLE[2] if replicas < 4 else TABLE[4])
        records, seen = [], list[float]()
        for replica in range(replicas):
            micros = world.dealer.batch(number, replica, replicas)
            assert micros.count == count
            for index in range(*micros.share):
                seen += world.dealer.fetch(number, index)[:, 0].tolist()
            records += world.dealer.records(number)
        assert [(each.share, each.shares) for each in records] == [(at, count) for at in range(count)]
        read[number] = sorted(seen)
    order = order_of(world.dealer.spec, 1)
    assert read == {number: sorted(float(index) for _, index in order.addresses(number)) for number in read}
    assert world.dealer.most == 8
    assert world.dealer.refusal(8) is None
    assert "too few for 9 replicas" in str(world.dealer.refusal(9))


def test_the_gradient_is_that_of_the_global_batch_whatever_the_number_of_micro_batches() -> None:
    """12 samples as 1, and as 5, of which some have more than others."""
    found = []
    for count in (1, {1: 5, 2: 9}):
        world = World(net(), count=count, loader=constant())
        world.run(2)
        found.append(gradients(world.net))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize(
    ("loader", "invariant", "why"),
    [
        (DataLoader(Numbers(), batch_size=2), False, "whose global batch follows the number of micro-batches"),
        (batch_of, False, "whose global batch follows the number of micro-batches"),
        (constant(6), False, "the global batch of 6 samples is less than the 8 shares that read it"),
        (constant(), True, "follows the number of replicas, and so would every gradient's last bits"),
    ],
)
def test_a_table_is_refused_where_it_would_change_the_result(loader: Any, invariant: bool, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        World(net(), count=TABLE, loader=loader, invariant=invariant)


def test_a_body_that_asks_for_gradients_or_clears_them_changes_nothing_in_invariant_mode() -> None:
    plain, meddling = World(net(), invariant=True), World(net(), invariant=True)
    plain.run()
    for micro in meddling.enter():
        for parameter in meddling.net.parameters():
            parameter.grad = torch.ones_like(parameter)
        loss = meddling.net(micro.batch).square().mean()
        torch.autograd.grad(loss, list(meddling.net.parameters()), retain_graph=True)
        meddling.net.zero_grad(set_to_none=False)
        micro.backward(loss)
    assert all(torch.equal(*pair) for pair in zip(gradients(plain.net), gradients(meddling.net), strict=True))
