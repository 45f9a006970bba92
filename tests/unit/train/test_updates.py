"""A body from its first update on: whether it is one with it, and whether all of it is done."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from regrow.comm.torch_private import grad_scalers
from regrow.core.errors import GenerationHalted
from regrow.core.ids import StepNo
from regrow.devices.stream_points import StreamPoint
from regrow.train.worker.update_gate import UpdateGate
from regrow.train.worker.updates import Updates


class Training:
    """One model, one optimizer, and a scheduler that is stepped after it; watched as a session does."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.updates = Updates()
        self.updates.watch([self.model, self.optimizer, self.scheduler, self.average])
        self.optimizer.register_step_pre_hook(lambda *_: self.updates.began(closure=False))
        self.optimizer.register_step_post_hook(lambda optimizer, *_: self.updates.stepped(optimizer))

    def body(self, *, upto: int = 3) -> None:
        self.model(torch.ones(1, 2)).sum().backward()
        for act in (
            self.optimizer.step,
            self.scheduler.step,
            lambda: self.average.update_parameters(self.model),
        )[:upto]:
            act()

    def rehearsed(self) -> "Training":
        self.updates.begin(learning=True)
        self.body()
        self.updates.ended()
        return self


@pytest.mark.parametrize(("upto", "whole"), [(0, False), (1, False), (2, False), (3, True)])
def test_an_update_is_whole_when_all_has_changed_that_usually_changes_by_and_after_it(upto: int, whole: bool) -> None:
    training = Training().rehearsed()
    training.updates.begin()
    training.body(upto=upto)
    assert training.updates.complete is whole


def test_an_object_whose_state_cannot_be_asked_in_a_body_disturbs_nothing() -> None:
    class Shy:
        def state_dict(self) -> dict[str, object]:
            raise RuntimeError("not now")

    training = Training()
    training.updates.watch([training.model, training.optimizer, Shy()])
    training.rehearsed()
    training.updates.begin()
    training.body()
    assert training.updates.complete


def test_what_a_committed_body_does_is_usual_from_then_on() -> None:
    training = Training().rehearsed()
    training.updates.begin()
    training.body()
    training.body()
    assert not training.updates.complete, "twice as many updates as in the rehearsal"
    training.updates.ended()
    training.updates.begin()
    training.body()
    assert not training.updates.complete


@pytest.mark.parametrize(
    ("calls", "torn_apart"),
    [
        (["reduce", "update"], ""),
        (["reduce", "update", "alone"], ""),
        (["update", "reduce"], "allreduce is called"),
        (["update", "rest", "reduce"], ""),
        (["closure"], "optimizer.step(closure) computes gradients"),
    ],
)
def test_a_body_cannot_be_parted_from_its_update_where_ranks_still_have_to_meet(
    calls: list[str], torn_apart: str
) -> None:
    updates = Updates()
    updates.begin()
    for call in calls:
        match call:
            case "reduce":
                updates.called("allreduce", 3)
            case "alone":
                updates.called("allreduce", 1)
            case "rest":
                updates.end_body()
            case _:
                updates.began(closure=call == "closure")
    assert updates.torn_apart == torn_apart


def test_a_scaler_forgets_the_step_that_was_given_up() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(2):  # unscaled, given up, and unscaled again
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.unscale_(optimizer)
        grad_scalers.begin_anew([model, optimizer, scaler])
    assert float(scaler.get_scale()) == 65536.0


def test_a_fused_optimizer_forgets_the_scale_of_a_step_that_was_given_up() -> None:
    ended = []
    for given_up in (False, True):
        model = nn.Linear(2, 1)
        nn.init.ones_(model.weight)
        nn.init.ones_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

        def halt(*_: object) -> None:
            raise GenerationHalted("others have lost a rank")

        for attempt in range(1 + given_up):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 2)).sum()).backward()
            if attempt < given_up:
                hook = optimizer.register_step_pre_hook(halt)
                with pytest.raises(GenerationHalted):
                    scaler.step(optimizer)
                hook.remove()
                grad_scalers.begin_anew([model, optimizer, scaler])
        scaler.step(optimizer)
        ended.append(model.weight.detach().tolist())
    assert ended[0] == ended[1]


def test_a_scaler_that_is_turned_off_has_nothing_to_forget() -> None:
    grad_scalers.begin_anew([torch.amp.GradScaler("cpu", enabled=False)])


# --- the gate -----------------------------------------------------------------------------------------------------


class Late:
    """A device whose work is done only when it is waited for; by then a halt may have come, or it may have failed."""

    enqueues = True

    def __init__(self, then: Any) -> None:
        self.then = then
        self.waited = False

    def wait(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        meanwhile()
        self.waited = True
        self.then()

    def point(self) -> StreamPoint:
        return StreamPoint([])


class Worker:
    """All that a gate asks."""

    def __init__(self, then: Any = lambda: None, *, sharded: bool = False) -> None:
        self.log: list[str] = []
        self.ahead = False
        self.device = Late(then)
        self.control: Any = SimpleNamespace(step=StepNo(3), halted=False, update=self._update, ready=self._ready)
        self.groups: Any = SimpleNamespace(
            draining=False, refused=False, in_flight=True, broke=lambda: False, vote=self._vote
        )
        self.recovery: Any = SimpleNamespace(sharded=sharded, withdraw=lambda deadline: None)
        link: Any = SimpleNamespace(board=SimpleNamespace(enter=lambda *_: None))
        faults: Any = SimpleNamespace(inject=lambda *_: None)
        copies: Any = SimpleNamespace(await_stored=lambda: None)
        control: Any = self.control
        groups: Any = self.groups
        self.gate = UpdateGate(link, control, groups, faults, copies)
        self.gate.accelerator = self.device

    def enter(self, *, interrupted: bool = False) -> None:
        self.gate.enter(lambda: self.log.append("exchanged"), self.recovery, interrupted=interrupted)

    def _ready(self) -> bool:
        assert self.device.waited, "it says that it is ready while its gradients are on their way"
        self.log.append("ready")
        return True

    def _vote(self) -> None:
        self.log.append("voted")

    def _update(self) -> bool:
        assert self.device.waited or self.ahead, "it updates while its gradients are on their way"
        self.log.append("updates")
        return True


@pytest.mark.parametrize("sharded", [False, True])
def test_the_gate_waits_for_the_device_before_vote_and_update(sharded: bool) -> None:
    worker = Worker(sharded=sharded)
    worker.enter()
    assert worker.log[:1] == ["exchanged"] and worker.log[-1] == "updates"
    assert ("voted" in worker.log) is sharded


def test_where_no_collective_is_under_way_the_host_runs_ahead_and_in_the_next_step_it_waits_again() -> None:
    worker = Worker()
    worker.enter()
    assert worker.device.waited and not worker.groups.in_flight
    worker.device.waited, worker.ahead = False, True
    worker.enter()
    assert not worker.device.waited
    worker.groups.in_flight, worker.ahead = True, False
    worker.enter()
    assert worker.device.waited


def test_what_was_committed_before_is_told_while_the_gate_waits_for_a_device_that_may_hang() -> None:
    worker: Worker = Worker(then=lambda: worker.log.append("waited"))
    worker.gate.waits, worker.gate.ready = lambda: worker.log.append("told"), lambda: worker.log.append("ready to")
    worker.enter()
    assert worker.log == ["exchanged", "told", "waited", "told", "ready to", "updates"]


def halted_meanwhile() -> Worker:
    worker = Worker()
    worker.device.then = lambda: setattr(worker.control, "halted", True)
    return worker


def test_what_an_abort_may_have_cut_off_on_the_device_is_not_committed() -> None:
    worker = halted_meanwhile()
    with pytest.raises(GenerationHalted):
        worker.enter()
    assert worker.log == ["exchanged"]


def test_a_processor_that_has_all_its_gradients_goes_on_though_the_generation_is_over() -> None:
    worker = halted_meanwhile()
    worker.device.enqueues = False
    worker.enter()
    assert worker.log == ["exchanged", "updates"]


def test_an_error_of_the_device_is_raised_at_the_gate() -> None:
    def fail() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    worker = Worker(fail, sharded=True)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        worker.enter()
    assert worker.log == ["exchanged"]


@pytest.mark.parametrize("caught", ["refused", "broke", "interrupted"])
def test_a_body_that_has_caught_what_cut_it_off_does_not_come_through_the_gate(caught: str) -> None:
    worker = Worker()
    worker.groups.refused, worker.groups.broke = caught == "refused", lambda: caught == "broke"
    with pytest.raises(GenerationHalted):
        worker.enter(interrupted=caught == "interrupted")
    assert "updates" not in worker.log
