"""Worlds that grow and shrink while things go wrong: any order of events ends in progress, or says why it does not."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.schedules.test_membership_schedules import (
    DEFECTS,
    IN_STEP,
    MOMENTS,
    draw_more,
    fair,
    few_defects,
    foul,
    injected,
    job,
    schedules,
    seeds,
    soak,
)

from regrow.core.ids import Rank, StepNo
from regrow.core.job import JobSpec
from regrow.core.messages import facts, orders
from regrow.core.messages.vocabulary import Warmth
from regrow.core.records import (
    PLANNED,
    GenerationFormed,
    IncidentClosed,
    IncidentOpened,
    ScaleRefused,
    WorkerGone,
    WorldChanged,
)
from regrow.membership.scaling import Limits
from regrow_lab.sim.faults import SimFault, SimRequest
from regrow_lab.sim.network import NetworkConditions
from regrow_lab.sim.schedule import Promised, SimSchedule
from regrow_lab.sim.script import Doing, SimScript
from regrow_lab.sim.world import World

UNTIL = StepNo(40)
CALM = NetworkConditions()


@st.composite
def elastic_jobs(draw: st.DrawFn, /, **changes: Any) -> JobSpec:
    unit = draw(st.sampled_from([1, 1, 2]))
    nodes = draw(st.integers(1, 3))
    nproc = unit * draw(st.integers(1, 2 if nodes == 1 else 1))
    replicas = nproc * nodes // unit
    least = draw(st.integers(1, replicas))
    most = replicas + draw(st.integers(0, 3))
    sizes = draw(st.sampled_from([[], [], sorted({1, 2, 4, least, replicas, most})]))
    drawn = {
        "nodes": nodes,
        "unit": unit,
        "min_replicas": least,
        "max_replicas": most,
        "sizes": sizes,
        "standbys": draw(st.sampled_from([0, 0, 1])),
        "warmth": draw(st.sampled_from(Warmth)),
        "durable": True,
        "checkpoint_every": draw(st.sampled_from([0.0, 0.0, 0.5, 2.0])) if changes.get("durable", True) else 0.0,
        "change_pause": draw(st.sampled_from([0.0, 0.0, 5.0])),
        "leave_deadline": 20.0,
        **changes,
    }
    return job(nproc, **drawn)


def requests(*, drains: bool = True, leave: list[float | None] | None = None) -> st.SearchStrategy[list[SimRequest]]:
    moments = st.sampled_from([0.0, 0.5, 2.0, 4.0, 5.0, 5.5, 6.0, 7.0, 8.0, 9.0, 12.0, 15.0])
    stays = st.sampled_from([None, None, None, 0.1, 100.0])
    scale = st.builds(SimRequest, what=st.just("scale"), after=moments, replicas=st.integers(0, 6), stay=stays)
    more = st.builds(SimRequest, what=st.just("node"), after=moments, slots=st.integers(1, 3), stay=stays)
    drain = st.builds(
        SimRequest,
        what=st.just("drain"),
        after=moments,
        node=st.integers(0, 3),
        grace=st.sampled_from([0.5, 5.0, 60.0]),
        back=st.sampled_from(leave or [0.0, 3.0, 20.0]),
    )
    return st.lists(st.one_of(scale, scale, more, *([drain] if drains else [])), max_size=6)


slots = st.integers(2, 5)

calm = (elastic_jobs(standbys=0), requests(drains=False), slots, seeds)
troubled = (
    elastic_jobs(),
    fair,
    requests(),
    injected(["kill", "kill", "body", "hang", "stall", "node", "disk"], [*MOMENTS, *IN_STEP, None]),
    slots,
    seeds,
)
defective = (
    elastic_jobs(),
    fair,
    requests(),
    injected([*DEFECTS, "kill", "node"], [*MOMENTS, *IN_STEP, None]).map(few_defects),
    slots,
    seeds,
)
anything = (
    st.one_of(elastic_jobs(max_faults=100), elastic_jobs(max_faults=3, durable=False)),
    foul,
    requests(leave=[None, 1.0, 700.0]),
    injected(
        ["kill", "hang", "stall", "raise", "body", "exit", "node", "freeze"], [*MOMENTS, None], [None, 1.0, 700.0]
    ),
    slots,
    seeds,
)


def script(spec: JobSpec, seed: int) -> SimScript:
    """State that every rank has, or that is divided over each replica, or over all ranks: then the world is fixed."""
    parts = (0, spec.unit if spec.unit > 1 else spec.world)[seed % 2]
    return SimScript(until=UNTIL, build=1.0, after=0.3, parts=parts)


def run_calm(spec: JobSpec, asked: list[SimRequest], room: int, seed: int) -> None:
    """Nothing goes wrong: no process of the job ends but those that leave it, and no step is run twice."""
    schedule = SimSchedule(
        spec, script(spec, seed), CALM, requests=asked, slots=room, seed=seed, promise=Promised.THE_LAST_STEP
    )
    schedule.run(world := schedule.world())
    said = [line for _, line in world.log]
    members = {member.worker for line in said if isinstance(line, orders.FormGeneration) for member in line.members}
    assert not {line.worker for line in said if isinstance(line, orders.FenceWorker)} & members, "nobody is fenced"
    assert all(line.code == 0 for line in said if isinstance(line, WorkerGone) and line.worker in members)
    closed = [line for line in said if isinstance(line, IncidentClosed)]
    assert all(line.kind in PLANNED and line.faults == line.steps_lost == 0 for line in closed)
    changes = [line for line in said if isinstance(line, WorldChanged)]
    assert sum(line.kind != "start" for line in changes) == sum(line.before != line.after for line in closed)
    sizes = [spec.replicas, *(line.after for line in changes)]
    assert [line.before for line in changes] == sizes[:-1], "one change begins where the one before ended"
    refused = [line for line in said if isinstance(line, ScaleRefused)]
    requests = [line for line in said if isinstance(line, facts.ScaleRequested)]
    impossible = [line for line in requests if not Limits.of(spec).allow(line.replicas)]
    assert len(refused) >= len(impossible)


def run_troubled(
    spec: JobSpec, weather: NetworkConditions, asked: list[SimRequest], plan: list[SimFault], room: int, seed: int
) -> None:
    """A durable checkpoint, a budget without end, nodes that come back: nothing ends the job but its last step."""
    SimSchedule(spec, script(spec, seed), weather, plan, asked, room, seed, Promised.THE_LAST_STEP).run()


def run_any(
    spec: JobSpec, weather: NetworkConditions, asked: list[SimRequest], plan: list[SimFault], room: int, seed: int
) -> None:
    SimSchedule(spec, script(spec, seed), weather, plan, asked, room, seed).run()


@schedules(50)
@given(*calm)
def test_the_world_changes_and_nobody_who_stays_is_disturbed(
    spec: JobSpec, asked: list[SimRequest], room: int, seed: int
) -> None:
    run_calm(spec, asked, room, seed)


@schedules(50)
@given(*troubled)
def test_kills_in_the_middle_of_changes_do_not_keep_the_job_from_its_last_step(
    spec: JobSpec, weather: NetworkConditions, asked: list[SimRequest], plan: list[SimFault], room: int, seed: int
) -> None:
    run_troubled(spec, weather, asked, plan, room, seed)


@schedules(100)
@given(*defective)
def test_a_coordinator_that_fails_in_the_middle_of_changes_does_not_keep_the_job_from_its_last_step(
    spec: JobSpec, weather: NetworkConditions, asked: list[SimRequest], plan: list[SimFault], room: int, seed: int
) -> None:
    run_troubled(spec, weather, asked, plan, room, seed)


@schedules(50)
@given(*anything)
def test_whatever_goes_wrong_with_a_changing_world_the_job_ends_once_and_says_why(
    spec: JobSpec, weather: NetworkConditions, asked: list[SimRequest], plan: list[SimFault], room: int, seed: int
) -> None:
    run_any(spec, weather, asked, plan, room, seed)


MORE: dict[str, tuple[int, tuple[Any, ...], Callable[..., None]]] = {
    "calm": (125, calm, run_calm),
    "kills": (225, troubled, run_troubled),
    "a coordinator that fails": (200, defective, run_troubled),
    "anything": (175, anything, run_any),
}


@pytest.mark.parametrize("what", MORE)
def test_more_schedules_of_changing_worlds(what: str) -> None:
    draw_more(*MORE[what])


def test_up_and_down_in_one_run() -> None:
    asked = [
        SimRequest("scale", at, replicas=size) for at, size in ((4.0, 2), (8.0, 4), (12.0, 3), (16.0, 2), (20.0, 4))
    ]
    spec = job(1, min_replicas=1, max_replicas=4)
    world = World(spec, script=SimScript(until=StepNo(80), build=1.0), requests=asked, slots=4, seed=1)
    assert world.run().code == 0
    changes = [line for _, line in world.log if isinstance(line, WorldChanged)]
    assert [(line.before, line.after) for line in changes] == [(1, 2), (2, 4), (4, 3), (3, 2), (2, 4)]
    spawned = [line for _, line in world.log if isinstance(line, orders.SpawnWorker)]
    assert len(spawned) == 1 + 1 + 2 + 2, "nobody who stays is started again"
    opened = [line for _, line in world.log if isinstance(line, IncidentOpened)]
    assert [line.kind for line in opened] == ["grow", "grow", "shrink", "shrink", "grow"]


def found(
    nproc: int, parts: int, weather: NetworkConditions, *gone_wrong: SimFault | SimRequest, **rest: Any
) -> SimSchedule:
    """A schedule that long runs have found. `rest`: of the job, but for `slots` and `seed`."""
    slots, seed = rest.pop("slots"), rest.pop("seed")
    return SimSchedule(
        job(nproc, durable=True, leave_deadline=20.0, **rest),
        SimScript(until=UNTIL, build=1.0, after=0.3, parts=parts),
        weather,
        [each for each in gone_wrong if isinstance(each, SimFault)],
        [each for each in gone_wrong if isinstance(each, SimRequest)],
        slots,
        seed,
        Promised.THE_LAST_STEP,
    )


FOUND = {
    "two nodes are lost, and back, at the same time": found(
        1,
        3,
        CALM,
        *(SimFault("node", rank=Rank(rank), after=16.5, back=0.0) for rank in (0, 2)),
        SimFault("defect", rank=Rank(0), after=24.1),
        nodes=3,
        min_replicas=3,
        max_replicas=4,
        slots=2,
        seed=7,
    ),
    "a notice comes while the agents are asked": found(
        1,
        2,
        NetworkConditions(delay=0.1, slow=0.05, repeated=0.1, late_exit=8.0),
        *(SimFault("defect", rank=Rank(rank), after=4.001) for rank in (0, 1)),
        SimFault("kill", rank=Rank(1), after=8.001),
        SimRequest("drain", 5.0, node=1, grace=5.0),
        nodes=2,
        min_replicas=1,
        max_replicas=4,
        slots=2,
        seed=8,
    ),
    "a node comes, and gets its notice, while the agents are asked": found(
        1,
        0,
        NetworkConditions(delay=0.1, repeated=0.1),
        *(SimFault("defect", rank=Rank(rank), after=4.001) for rank in (0, 1)),
        SimRequest("drain", 6.0, node=3, grace=0.5, back=0.0),
        SimRequest("node", 5.5, slots=2),
        nodes=3,
        min_replicas=3,
        max_replicas=4,
        slots=2,
        seed=0,
    ),
    "a node that got its notice is lost, and back": found(
        2,
        0,
        NetworkConditions(delay=0.1, slow=0.05, slow_by=3.0, repeated=0.1),
        SimFault("node", rank=Rank(1), doing=Doing.COMPUTING, nth=6, after=0.5, back=20.0),
        SimFault("defect", rank=Rank(0), after=8.01),
        SimRequest("drain", 5.0, node=1, grace=0.5, back=0.0),
        SimRequest("scale", 0.0, replicas=4, stay=0.1),
        nodes=3,
        unit=2,
        min_replicas=3,
        max_replicas=4,
        slots=3,
        seed=99,
    ),
    "the order to fence a worker is lost, and who gave it fails": SimSchedule(
        job(2, standbys=2, max_faults=3),
        SimScript(until=StepNo(6)),
        NetworkConditions(repeated=0.9, lost=0.1),
        [SimFault("late defect", rank=Rank(1), after=19.0, back=1.0)],
        seed=2,
    ),
    "workers end when their agent has reported, and before another has": SimSchedule(
        job(2, nodes=2, warmth=Warmth.IMPORTS, durable=True),
        SimScript(until=StepNo(6)),
        NetworkConditions(slow=0.05, slow_by=3.0),
        [
            SimFault(how, rank=Rank(rank), after=at, back=0.0)
            for how, at in (("defect", 4.0), ("kill", 8.0))
            for rank in (0, 1)
        ],
        seed=106_064_331,
        promise=Promised.THE_LAST_STEP,
    ),
    "who leaves stands still": found(
        2,
        2,
        CALM,
        SimFault("stall", rank=Rank(0), doing=Doing.COMPUTING, after=0.5),
        SimRequest("drain", 15.0, back=3.0),
        nodes=3,
        unit=2,
        min_replicas=3,
        max_replicas=4,
        slots=3,
        seed=1,
    ),
}
"""Each broke a law once."""


@pytest.mark.parametrize("what", FOUND)
def test_what_long_runs_have_found_is_mended(what: str) -> None:
    FOUND[what].run()


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_soak_schedules_of_changing_worlds() -> None:
    schedules(soak())(given(*calm)(run_calm))()
    schedules(soak())(given(*troubled)(run_troubled))()
    schedules(soak())(given(*defective)(run_troubled))()
    schedules(soak())(given(*anything)(run_any))()


def test_a_world_whose_ranks_have_different_parts_of_the_state_keeps_its_size_while_one_of_them_is_built() -> None:
    world = World(
        job(1, nodes=3, durable=True, min_replicas=1, max_replicas=3),
        script=SimScript(until=UNTIL, build=2.0, parts=3),
        injected=[SimFault("kill", Rank(0), after=8.0)],
        requests=[SimRequest("scale", 9.0, replicas=2)],
    )
    assert world.run().code == 0
    said = [line for _, line in world.log]
    assert [line.replicas for line in said if isinstance(line, ScaleRefused)] == [2]
    assert {len(line.workers) for line in said if isinstance(line, GenerationFormed)} == {3}
