"""`--check-for-nan`: whose number was the first that was not finite, the same on all ranks, and what is no fault."""

import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.membership.membership_job import Job, mend

from regrow.core.errors import GenerationHalted, NotFinite, SumNotFinite
from regrow.core.ids import StepNo
from regrow.core.messages.vocabulary import ErrorReport, FaultKind
from regrow.core.records import NodeJudged
from regrow.membership.machine import EndJob
from regrow.train.worker.finite import Blame, NumberCheck, Seen, judge

NAN = math.nan
GROUP: Any = SimpleNamespace(number=0, sign=1, calls=0)
NONE = Seen().loss


class World:
    """The checks of all ranks, and what each of them hears at the gate."""

    def __init__(self, world: int = 3) -> None:
        self.parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(world)]
        self.checks = [NumberCheck(self.least) for _ in range(world)]
        self.heard: list[torch.Tensor] = []
        self.met = threading.Barrier(world)
        for check, parameter in zip(self.checks, self.parameters, strict=True):
            parameter.grad = torch.ones(2)
            check.watch([torch.optim.SGD([parameter], lr=0.1), "another thing"])
            check.begin()

    def reduce(
        self, rank: int, *values: float, name: str = "allreduce", op: Any = torch.distributed.ReduceOp.SUM
    ) -> None:
        options = torch.distributed.AllreduceOptions()
        options.reduceOp = torch.distributed.ReduceOp(op)
        self.checks[rank].starts(GROUP, name, ([torch.tensor(values)], options), {})

    def gradients(self, *values: float) -> None:
        """Before the update, of each rank."""
        for parameter, check, value in zip(self.parameters, self.checks, values, strict=True):
            parameter.grad = torch.tensor([1.0, value])
            check.look()

    def least(self, mine: torch.Tensor) -> torch.Tensor:
        """As a collective: of all ranks, once each has come."""
        self.heard.append(mine)
        self.met.wait(60.0)
        return torch.stack(self.heard).amin(0)

    def agree(self, *, sharded: bool = False) -> list[str]:
        """Error of each rank: empty, `halted`, or its message."""

        def one(rank: int) -> str:
            try:
                self.checks[rank].agree(StepNo(7), rank=rank, world=len(self.checks), sharded=sharded)
            except GenerationHalted:
                return "halted"
            except NotFinite as error:
                return f"{type(error).__name__}: {error}"
            return ""

        with ThreadPoolExecutor(len(self.checks)) as pool:
            return list(pool.map(one, range(len(self.checks))))


def test_finite_numbers_are_let_through() -> None:
    world = World()
    for rank in range(3):
        world.checks[rank].logged({"loss": 1e30, "accuracy": NAN})
        world.reduce(rank, 3e38, 3e38)
    world.gradients(1.0, 2.0, 3e38)
    assert world.agree() == ["", "", ""]


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf, torch.tensor(NAN)])
def test_a_loss_of_one_rank_is_named_there_and_the_others_give_the_step_up(value: Any) -> None:
    world = World()
    world.checks[1].logged({"train_loss": value})
    for rank in range(3):
        world.reduce(rank, NAN if rank == 1 else 1.0)
    world.gradients(NAN, NAN, NAN)
    assert world.agree() == ["halted", f"NotFinite: rank 1, step 7: train_loss is {float(value)}", "halted"]


def test_a_gradient_that_goes_wrong_in_a_backward_is_of_the_rank_that_gave_it() -> None:
    world = World()
    for rank in range(3):
        world.reduce(rank, 1.0)
        world.reduce(rank, 1.0, NAN if rank == 2 else 1.0)
    world.gradients(NAN, NAN, NAN)
    text = "NotFinite: rank 2, step 7: its gradient is not finite as it gives it to allreduce"
    assert world.agree() == ["halted", "halted", text]


def test_whose_number_has_spread_in_a_forward_is_not_named_for_it() -> None:
    world = World()
    for rank in range(3):
        world.reduce(rank, NAN if rank == 2 else 1.0)  # as a synchronized batch norm does
        world.checks[rank].logged({"loss": NAN})
    world.gradients(NAN, NAN, NAN)
    assert [text[:9] for text in world.agree()] == ["halted", "halted", "NotFinite"]


def test_a_sum_that_is_wrong_on_one_replica_is_its_memory_and_on_all_nobodys() -> None:
    one, everywhere, sharded = World(), World(), World()
    one.gradients(1.0, NAN, 1.0)
    assert one.agree()[1].startswith(
        "NotFinite: rank 1, step 7: its gradients are not finite, those of the others"
    ) or ("those of the other ranks are" in one.agree()[1])
    everywhere.gradients(math.inf, math.inf, math.inf)
    assert everywhere.agree()[0].startswith("SumNotFinite")
    sharded.gradients(1.0, 1.0, NAN)
    assert sharded.agree(sharded=True)[2].startswith("SumNotFinite")


def test_an_overflow_that_a_gradient_scaler_leaves_out_is_no_fault() -> None:
    left_out, fused = World(), World()
    for rank in range(3):
        left_out.reduce(rank, math.inf)
    assert left_out.agree() == ["", "", ""], "no optimizer has stepped"
    for check in fused.checks:
        (optimizer,) = check._optimizers
        optimizer.grad_scale = torch.ones(1)  # type: ignore[attr-defined]
    fused.gradients(math.inf, math.inf, math.inf)
    assert fused.agree() == ["", "", ""]


def test_only_sums_of_floats_are_looked_at_and_only_in_a_body() -> None:
    world = World(1)
    (check,) = world.checks
    world.reduce(0, -math.inf, op=torch.distributed.ReduceOp.MAX)
    check.starts(GROUP, "allgather", ([[torch.tensor([NAN])]], [torch.tensor([NAN])]), {})
    check.starts(GROUP, "allreduce", ([torch.tensor([1, 2])],), {})
    world.gradients(1.0)
    check.agree(StepNo(7), rank=0, world=1, sharded=False)
    check.logged({"loss": NAN})
    world.reduce(0, NAN)
    world.gradients(NAN)
    check.agree(StepNo(7), rank=0, world=1, sharded=False)
    check.begin()
    world.gradients(NAN)
    with pytest.raises(NotFinite, match="rank 0, step 7: its gradients are not finite$"):
        check.agree(StepNo(7), rank=0, world=1, sharded=False)


@given(st.integers(1, 64), st.data())
def test_all_ranks_come_to_the_same_and_the_earliest_is_blamed(world: int, data: st.DataObject) -> None:
    at = st.none() | st.integers(0, 50)
    losses, given = ([data.draw(at) for _ in range(world)] for _ in range(2))
    wrong = [data.draw(st.booleans()) for _ in range(world)]
    seen = []
    for rank, bad in enumerate(wrong):
        loss, part = (NONE if n is None else n * world + rank for n in (losses[rank], given[rank]))
        seen.append(Seen(loss, part, rank if bad else NONE, int(bad)))
    random.Random(world).shuffle(seen)
    blame = judge(Seen(*(min(each) for each in zip(*seen, strict=True))), world=world, sharded=False)
    known = [(n, rank) for times in (losses, given) for rank, n in enumerate(times) if n is not None]
    if not any(wrong) and all(n is None for n in losses):
        assert blame is None
    elif known:
        assert blame == Blame(min(known)[1], "own")
    else:
        assert blame == Blame(wrong.index(True), "sum" if all(wrong) and world > 1 else "memory")


# --- what follows ----------------------------------------------------------------------------------------------------


def error(kind: type[Exception], rank: int = 1) -> ErrorReport:
    return ErrorReport(f"{kind.__module__}.{kind.__name__}", f"rank {rank}, step 5: loss is nan", "train.py", "line 7")


def runs_again(job: Job, rank: int, step: int, kind: type[Exception]) -> None:
    job.faulted(0, step, ErrorReport("GenerationHalted", "given up", "train.py"), FaultKind.COLLECTIVE)
    job.faulted(rank, step, error(kind, rank))
    for each in job.ranks:
        job.halted(each, step)
    if not job.all(EndJob):
        job.joined().stepped(step)


def test_a_number_that_is_finite_when_the_step_is_run_again_makes_its_node_suspect() -> None:
    job = Job(4, nodes=2).trained(4)
    runs_again(job, 3, 5, NotFinite)
    (told,) = job.all(NodeJudged)
    assert (told.node, told.device, told.severity, told.source) == ("n1", "slot1", "suspect", "nan")
    assert told.evidence == "rank 3, step 5: loss is nan; run again it was finite"
    mend(job, 1, 6)
    assert len(job.all(NodeJudged)) == 1


def test_of_a_sum_nobody_is_suspect_and_of_another_error_neither() -> None:
    job = Job(4).trained(4)
    runs_again(job, 3, 5, SumNotFinite)
    runs_again(job, 2, 9, ValueError)
    assert job.all(NodeJudged) == [] and not job.all(EndJob)


def test_the_same_number_twice_is_the_scripts_and_ends_the_job() -> None:
    job = Job(4).trained(4)
    runs_again(job, 3, 5, NotFinite)
    said = len(job.all(NodeJudged))
    job = Job(4).trained(4)
    job.faulted(3, 5, error(NotFinite, 3))
    for rank in job.ranks:
        job.halted(rank, 5)
    job.joined()
    job.faulted(3, 5, error(NotFinite, 3))
    assert (job.end.code, said, len(job.all(NodeJudged))) == (1, 1, 0)
    assert "rank 3 failed at step 5, the same error twice" in job.end.diagnosis
