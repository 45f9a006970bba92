"""Stages of a replacement: measured in the worker, told in the record of its incident, read in older records."""

import time
import types
from typing import Any

import msgspec
import pytest
import torch
from tests.unit.membership.membership_job import Job
from tests.unit.observe.test_run_story import closed

from regrow.comm.torch_private.internals import compiled
from regrow.core.ids import Rank
from regrow.core.messages import facts
from regrow.core.process.stage_times import BUILD, COMPILE, CONTEXT, REHEARSE, START, StageClock
from regrow.core.records import IncidentClosed
from regrow.devices import accelerators
from regrow.devices.context_times import time_context
from regrow.observe.run_story import run_lines
from regrow.observe.spans.incidents import IncidentSpans
from regrow.observe.story import describe

BUILT = {START: 0.04, BUILD: 1.9, REHEARSE: 0.3}


def test_a_stage_within_another_is_not_counted_twice() -> None:
    clock = StageClock(10.0)
    clock.reached(START, 10.5)
    clock.within(CONTEXT, 0.25)
    clock.reached(BUILD, 12.5)
    clock.reached(REHEARSE, 14.5, compiled=1.5)
    assert clock.seconds == {START: 0.5, CONTEXT: 0.25, BUILD: 1.75, COMPILE: 1.5, REHEARSE: 0.5}


def test_without_a_time_of_the_order_there_is_no_start() -> None:
    clock = StageClock()
    clock.reached(START, 10.5)
    clock.reached(BUILD, 11.0)
    assert clock.seconds == {BUILD: 0.5}


def _replace(job: Job, **ready: Any) -> str:
    """Kill rank 1 of a trained job, and give it another worker, which runs the next step 0.25 s after it stands."""
    job.exited(job.of(1))
    for rank in (0, 2):
        job.halted(rank, 1)
    newcomer = job.of(1)
    job.ready(newcomer, **ready)
    generation = job.machine.generation
    for rank in (0, 2):
        job.resumed(rank)
    job.tell(facts.WorkerResumed(newcomer, generation, 0.01, 0.02, 1000, at=500.0))
    for rank in job.ranks:
        job.tell(facts.WorkerCommitted(job.of(rank), generation, 1, 500.25, 0.1))  # type: ignore[arg-type]
    return newcomer


def test_an_incident_has_the_stages_of_its_replacement_alone() -> None:
    job = Job(world=3).trained()
    newcomer = _replace(job, stages=BUILT)
    told = job.last(IncidentClosed)
    assert told.slowest == newcomer
    assert told.stages == {**BUILT, "connect": 0.01, "hydrate": 0.02, "first step": pytest.approx(0.25)}


def test_a_standby_that_was_built_before_has_the_later_stages_alone() -> None:
    job = Job(world=3, standbys=1).trained()
    standby = job.standby()
    job.ready(standby, stages=BUILT)
    job.exited(job.of(1))
    for rank in (0, 2):
        job.halted(rank, 1)
    for rank in job.ranks:
        job.resumed(rank)
    job.stepped(1)
    told = job.last(IncidentClosed)
    assert job.of(1) == standby and told.rung == "standby"
    assert BUILD not in told.stages


def test_a_replacement_that_dies_on_its_way_is_not_told() -> None:
    job = Job(world=3).trained()
    job.exited(job.of(1))
    for rank in (0, 2):
        job.halted(rank, 1)
    first = job.of(1)
    job.ready(first, stages={**BUILT, BUILD: 60.0})
    job.exited(first)
    for rank in (0, 2):
        job.halted(rank, 1)
    second = job.of(1)
    job.ready(second, stages=BUILT)
    generation = job.machine.generation
    for rank in job.ranks:
        job.tell(facts.WorkerResumed(job.of(rank), generation, 0.01, 0.02, 1000, at=500.0))
    job.stepped(1)
    told = job.last(IncidentClosed)
    assert told.slowest == second != first and told.stages[BUILD] == BUILT[BUILD]


def test_an_error_that_needs_no_replacement_has_no_stages() -> None:
    job = Job(world=3).trained()
    job.faulted(1, 1)
    for rank in job.ranks:
        job.halted(rank, 1)
    for rank in job.ranks:
        job.resumed(rank)
    job.stepped(1)
    told = job.last(IncidentClosed)
    assert told.rung == "retry" and told.slowest is None and told.stages == {}


def test_people_are_told_the_longest_by_name() -> None:
    incident = msgspec.structs.replace(closed(1, 10.0), slowest="node0.w4", stages={**BUILT, "hydrate": 0.2})
    assert (describe(incident) or "").endswith("; most of the replacement: build 1.90 s")
    (line,) = [line for line in run_lines([incident], live=True) if "most of" in line]
    assert line.strip() == (
        "most of the replacement: build 1.90 s (worker node0.w4: start 40 ms, build 1.90 s, rehearse 0.30 s, "
        "hydrate 0.20 s)"
    )
    spans = IncidentSpans("a job", offset=0.0).feed([incident])
    assert spans[0].attributes["regrow.replacement.build"] == 1.9


def test_an_older_record_is_read_without_them() -> None:
    written = msgspec.json.decode(msgspec.json.encode(closed(1, 10.0)))
    del written["stages"], written["slowest"]
    read = msgspec.json.decode(msgspec.json.encode(written), type=IncidentClosed)
    assert read == closed(1, 10.0) and read.ranks == [Rank(1)]
    assert not [line for line in run_lines([read], live=True) if "most of" in line]


def test_the_first_use_of_an_accelerator_is_timed_and_its_calls_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    took: list[float] = []

    def initialize() -> str:
        until = time.monotonic() + 0.02
        while time.monotonic() < until:
            continue
        return "done"

    device = types.SimpleNamespace(_lazy_init=initialize)
    device.set_device = lambda index: device._lazy_init()
    plain = dict(vars(device))
    monkeypatch.setattr(accelerators, "kind", lambda: "odd")
    monkeypatch.setattr(torch, "get_device_module", lambda kind: device)
    index = torch.accelerator.set_device_index
    stop = time_context(took.append)
    assert device.set_device(0) == "done"
    assert len(took) == 1 and took[0] >= 0.02, "a call within another is part of that"
    stop()
    assert vars(device) == plain and torch.accelerator.set_device_index is index
    device.set_device(0)
    assert len(took) == 1


def test_without_an_accelerator_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "kind", lambda: "")
    index = torch.accelerator.set_device_index
    time_context(lambda took: None)
    assert torch.accelerator.set_device_index is index


@pytest.mark.full
def test_the_time_of_compiling_is_torchs_own() -> None:
    before = compiled()
    torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
    assert compiled() > before >= 0.0
