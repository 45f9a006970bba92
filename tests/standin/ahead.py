"""Checks of a host that runs ahead of its device, on the stand-in: `python -m tests.standin.ahead` runs all.

The device stands still behind a gate, so it is known without a clock that the host has not waited. They run in a
process of their own, as those of `checks.py`; `tests/unit/train/test_running_ahead.py` has a test for each.
"""

import copy
import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

from tests.standin import late_work

CHECKS: dict[str, Callable[[], None]] = dict(late_work.CHECKS)
DEVICE, BROKEN = "standin:0", 1


def check(run: Callable[[], None]) -> Callable[[], None]:
    """A function that shows something."""
    CHECKS[run.__name__] = run
    return run


class Member:
    """A worker, as far as its announcements ask."""

    def __init__(self, *, world: int = 2) -> None:
        self.worker_id, self.generation, self.rank, self.world = "w", 1, 0, world
        self.facts: list[Any] = []
        self.body = SimpleNamespace(logged=lambda numbers: None, own_time=0.0, in_flight=False)
        self.waiting = SimpleNamespace(checkpoint=lambda: None)
        self.send = self.facts.append

    def told(self) -> list[tuple[str, int, dict[str, float]]]:
        """Facts sent since the last call."""
        found = [(type(fact).__name__, fact.step, fact.metrics) for fact in self.facts]
        self.facts.clear()
        return found


class Loop:
    """Steps that are announced; their bodies are whatever a check does."""

    def __init__(self, device: str = DEVICE, **member: Any) -> None:
        import torch

        from regrow.train.announcing import Announcing
        from regrow.train.worker.accelerator import accelerator_of

        made: Any = Member(**member)
        self.worker = made
        self.x = torch.ones(4, device=device)
        torch.accelerator.synchronize(self.x.device)
        self.announcing: Any = Announcing(self.worker)
        self.announcing.accelerator = accelerator_of([self.x])

    def step(self, number: int) -> Any:
        """A step whose body is entered."""
        from regrow.core.ids import StepNo
        from regrow.train.step import Step

        owner: Any = SimpleNamespace(
            rank=0, began=0, log=self._log, shadow=SimpleNamespace(logged=lambda numbers: None)
        )
        made = Step(owner, StepNo(number), None)
        made.inside = True
        return made

    def _log(self, step: Any) -> None:
        self.announcing.logged(step, None)

    def commit(self, step: Any) -> None:
        """The host has come through it, and asks for the next."""
        from regrow.train.preparation import Preparation

        step.inside, step.committed = False, True
        self.announcing.committed(step, Preparation(cast(Any, None)), None, adopted=False)
        self.announcing.send()


@check
def a_commit_is_told_when_the_device_has_done_it_and_the_host_does_not_wait_for_that() -> None:
    loop, before = Loop(), STEERING.waits()
    step = loop.step(0)
    with STEERING.gate():
        step.log(loss=(loop.x * 3).sum(), rate=0.5)
        assert loop.worker.told() == []
        loop.x.add_(1)  # the update
        loop.commit(step)
        assert loop.worker.told() == [("WorkerStaged", 0, {"rate": 0.5})]
        loop.announcing.report_finished()
        assert loop.worker.told() == []
        assert STEERING.waits() == before
    loop.announcing.flush()
    assert loop.worker.told() == [("WorkerCommitted", 0, {"loss": 12.0, "rate": 0.5})]


@check
def a_commit_without_numbers_waits_for_its_update_too() -> None:
    loop = Loop()
    with STEERING.gate():
        loop.x.add_(1)
        loop.commit(loop.step(0))
        assert [fact for fact, *_ in loop.worker.told()] == ["WorkerStaged"]
    loop.announcing.flush()
    assert [fact for fact, *_ in loop.worker.told()] == ["WorkerCommitted"]


@check
def one_commit_waits_for_the_device_and_the_one_before_it_is_told_first() -> None:
    import threading

    loop, sent = Loop(), threading.Event()
    with STEERING.gate():
        loop.commit(loop.step(0))
        loop.worker.told()

        def run() -> None:
            loop.commit(loop.step(1))
            sent.set()

        second = threading.Thread(target=run)
        second.start()
        assert not sent.wait(0.1), "the host is two steps ahead"
        assert loop.worker.told() == []
    second.join(60)
    loop.announcing.flush()
    told = [(fact, number) for fact, number, _ in loop.worker.told()]
    assert [each for each in told if each[0] == "WorkerCommitted"] == [("WorkerCommitted", 0), ("WorkerCommitted", 1)]


@check
def a_number_is_the_one_that_stood_there_when_its_step_was_over_though_its_tensor_is_used_again() -> None:
    import torch

    loop = Loop()
    buffer = torch.zeros((), device=DEVICE)
    with STEERING.gate():
        for number in range(2):
            step = loop.step(number)
            step.log(loss=buffer)  # before it has its value
            buffer.copy_(loop.x.sum() + number)
            if number:
                break
            loop.commit(step)
    loop.commit(step)
    loop.announcing.flush()
    told = [metrics for fact, _, metrics in loop.worker.told() if fact == "WorkerCommitted"]
    assert told == [{"loss": 4.0}, {"loss": 5.0}]


@check
def numbers_of_before_the_update_are_shown_behind_the_gate_where_others_may_commit_alone() -> None:
    for world, shown in ((2, [("WorkerStaged", 0, {"loss": 4.0})]), (1, [])):
        loop = Loop(world=world)
        step = loop.step(0)
        step.log(loss=loop.x.sum())
        loop.announcing.accelerator.wait()  # as a gate behind a collective does
        loop.announcing.ready(step, None)
        assert loop.worker.told() == shown
        step = loop.step(1)
        with STEERING.gate():
            step.log(loss=loop.x.sum())
            loop.announcing.ready(step, None)
            assert loop.worker.told() == []


@check
def where_a_collective_may_be_under_way_a_commit_is_waited_for_at_once() -> None:
    loop = Loop()
    loop.worker.body.in_flight = True
    step = loop.step(0)
    step.log(loss=loop.x.sum())
    loop.commit(step)
    assert loop.worker.told() == [("WorkerCommitted", 0, {"loss": 4.0})]


@check
def the_script_may_have_made_the_device_the_place_of_new_tensors() -> None:
    import torch

    loop = Loop()
    with torch.device(DEVICE):
        step = loop.step(0)
        step.log(loss=loop.x.sum())
        loop.commit(step)
    loop.announcing.flush()
    assert loop.worker.told()[-1] == ("WorkerCommitted", 0, {"loss": 4.0})


@check
def a_sample_of_the_state_is_told_when_the_device_has_copied_it_and_is_of_the_step_that_it_names() -> None:
    import torch

    from regrow.core.ids import StepNo
    from regrow.train.state.protected import ProtectedState
    from regrow.train.worker.replica_digests import Sampler, digests

    torch.manual_seed(3)
    model: Any = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Linear(40, 7)).to(DEVICE)
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3, 7, 42, device=DEVICE)).sum().backward()
    optimizer.step()
    counts = [values["step"] for values in optimizer.state.values()]
    assert {str(count.device) for count in counts} == {"cpu"}
    state, member = ProtectedState([model, optimizer], {}), Member()
    found = ((StepNo(at), digests(state, frozenset(), sample=StepNo(at))[0]) for at in range(16, 1000, 16))
    step, expected = next(each for each in found if any(".step[" in name for name in each[1]))
    link: Any = SimpleNamespace(env=SimpleNamespace(worker="w"), send=member.send)
    control: Any = SimpleNamespace(generation=1)
    sampler, before = Sampler(link, control, state, own=list), STEERING.waits()
    form: Any = SimpleNamespace(members=[SimpleNamespace(holding="h")] * 2, step=0)
    sampler.join(form, again=False)
    sampler.tick(StepNo(1), last=False)
    member.facts.clear()
    before = STEERING.waits()
    with STEERING.gate():
        sampler.tick(step, last=False)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)  # the next update
            for count in counts:
                count.add_(1)
        sampler.tick(StepNo(step + 1), last=False)
        assert member.facts == []
        assert STEERING.waits() == before
    torch.accelerator.synchronize()
    sampler.tick(StepNo(step + 2), last=False)
    assert [(each.step, each.tensors) for each in member.facts] == [(step, expected)]


@check
def a_sample_that_was_begun_in_a_generation_that_is_over_is_not_told() -> None:
    import torch

    from regrow.core.ids import StepNo
    from regrow.train.state.protected import ProtectedState
    from regrow.train.worker.replica_digests import Sampler

    member = Member()
    link: Any = SimpleNamespace(env=SimpleNamespace(worker="w"), send=member.send)
    control: Any = SimpleNamespace(generation=1)
    sampler = Sampler(link, control, ProtectedState([torch.nn.Linear(4, 4).to(DEVICE)], {}), own=list)
    form: Any = SimpleNamespace(members=[SimpleNamespace(holding="h")] * 2, step=0)
    sampler.join(form, again=False)
    with STEERING.gate():
        sampler.tick(StepNo(16), last=False)
    torch.accelerator.synchronize()
    sampler.join(form, again=False)
    sampler.tick(StepNo(17), last=False)
    assert member.facts == []


@check
def a_copy_of_the_state_waits_for_the_device_once_and_for_no_tensor_of_its_own() -> None:
    import torch

    from regrow.core.ids import StepNo
    from regrow.hydration.copies.segment import layout
    from regrow.hydration.copies.snapshot import fill
    from regrow.train.state.protected import ProtectedState

    torch.manual_seed(3)
    model: Any = torch.nn.Sequential(*(torch.nn.Conv2d(3, 8, 3) for _ in range(4)), torch.nn.Linear(40, 7))
    model = model.to(DEVICE).to(memory_format=torch.channels_last)
    copies = []
    for each in (model, model, copy.deepcopy(model).cpu()):
        state, before = ProtectedState([each], {}), STEERING.waits()
        state.state_at = StepNo(3)
        inventory = state.inventory(StepNo(3))
        room = bytearray(layout(entry.nbytes for entry in inventory.entries)[1])
        fill(memoryview(room), state, inventory)
        copies.append((bytes(room), STEERING.waits() - before))
    # The stand-in waits for the first call of each kind itself.
    (first, _), (again, waited), (on_processor, never) = copies
    assert first == again == on_processor
    before = STEERING.waits()
    torch.accelerator.synchronize()
    assert waited <= STEERING.waits() - before, "once, for all that it has still to do"
    assert never == 0


@check
def numbers_that_are_not_finite_are_looked_for_without_a_wait_and_found() -> None:
    import math

    import torch

    from regrow.core.errors import NotFinite
    from regrow.core.ids import StepNo
    from regrow.train.worker.finite import NumberCheck

    def wrong(loss: float, given: float, *gradients: float, stands: bool = True) -> str:
        """Error of a body with these numbers."""
        parameters = [torch.nn.Parameter(torch.ones(3, device=DEVICE)) for _ in gradients]
        checked = NumberCheck(lambda mine: mine)
        checked.watch([torch.optim.SGD(parameters, lr=0.1)])
        checked.begin()
        for parameter, value in zip(parameters, gradients, strict=True):
            parameter.grad = torch.tensor([-0.0, 3e38, value], device=DEVICE)
        logged, part = torch.tensor(loss, device=DEVICE), torch.tensor([given], device=DEVICE)
        torch.accelerator.synchronize()
        before = STEERING.waits()
        with STEERING.gate() if stands else nullcontext():
            checked.logged({"loss": logged})
            checked.starts(SimpleNamespace(), "allreduce", ([part], torch.distributed.AllreduceOptions()), {})
            checked.look()
            assert not stands or STEERING.waits() == before
        try:
            checked.agree(StepNo(7), rank=0, world=1, sharded=False)
        except NotFinite as error:
            return str(error).removeprefix("rank 0, step 7: ")
        return ""

    # The stand-in waits for the first call of each kind itself.
    assert wrong(1.0, 1.0, 1.0, 1.0, stands=False) == ""
    assert wrong(3e38, -3e38, 1e-45, 2.0) == ""
    for bad in (math.nan, math.inf, -math.inf):
        assert wrong(bad, 1.0, 1.0, 1.0) == f"loss is {bad}"
        assert wrong(1.0, bad, 1.0, bad).startswith("its gradient is not finite as it gives it to allreduce")
        assert wrong(1.0, 1.0, 1.0, bad) == "its gradients are not finite"


@check
def what_a_broken_device_has_still_to_do_is_never_told_and_its_error_is_the_one_that_counts() -> None:
    import torch

    loop = Loop(f"standin:{BROKEN}")
    step = loop.step(0)
    with STEERING.gate(BROKEN):
        step.log(loss=loop.x.sum())
        loop.commit(step)
        loop.worker.told()
        STEERING.fail(BROKEN)
    error = loop.announcing.flushed(ValueError("of the script"))
    assert isinstance(error, torch.AcceleratorError)
    for again in (loop.announcing.report_finished, loop.announcing.flush):
        try:
            again()
        except torch.AcceleratorError:
            continue
        raise AssertionError("nothing was wrong")
    assert loop.worker.told() == []


def main() -> None:
    """Run all; a line of JSON for each: its name, and what it raised."""
    for name, run in CHECKS.items():
        failed = ""
        try:
            run()
        except Exception:  # noqa: BLE001  whatever it is, its test says it
            failed = traceback.format_exc()
        sys.stdout.write(json.dumps([name, failed]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    import faulthandler

    os.environ["STANDIN_DEVICES"] = "2"
    faulthandler.dump_traceback_later(150, exit=True)
    import torch as _torch
    from tests.standin import device as _device

    _torch.set_num_threads(1)
    STEERING = _device.load()
    main()
