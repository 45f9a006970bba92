"""Any order, loss and repetition of events ends in progress, or in one failure that says why."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from regrow.core.ids import JobId, Rank, StepNo
from regrow.core.job import JobSpec
from regrow.core.messages.tables import FetchTable, TableMissed
from regrow.core.messages.vocabulary import FaultHow, FaultSpec, Warmth
from regrow.core.records import FaultInjected
from regrow.membership import tables
from regrow.membership.restartable import MOST_FAILURES
from regrow_lab.sim.faults import SimFault
from regrow_lab.sim.network import NetworkConditions
from regrow_lab.sim.schedule import Promised, SimSchedule
from regrow_lab.sim.script import Doing, SimScript
from regrow_lab.sim.world import World

UNTIL = StepNo(6)
MOMENTS = [doing for doing in Doing if doing is not Doing.DEAD]
IN_STEP = [Doing.COMPUTING, Doing.REDUCING, Doing.UPDATING]


def schedules(examples: int) -> settings:
    return settings(
        max_examples=examples,
        derandomize=examples < 1000,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def draw_more(examples: int, drawn: tuple[Any, ...], run: Callable[..., None]) -> None:
    """Others than a test of the same draws, which has no seed of its own."""
    seed(1)(schedules(examples)(given(*drawn)(run)))()  # type: ignore[no-untyped-call]  # so hypothesis has it


def soak() -> int:
    return int(os.environ.get("REGROW_SOAK_EXAMPLES", "3000"))


def job(world: int, **changes: Any) -> JobSpec:
    fields: dict[str, Any] = {
        "job": JobId("sim"),
        "nproc": world,
        "nodes": 1,
        "standbys": 0,
        "warmth": Warmth.BUILT,
        "max_faults": 10_000,
        "window": 3600.0,
        "max_restarts": None,
        "durable": False,
        "build_deadline": 300.0,
    }
    return JobSpec(**{**fields, **changes})


@st.composite
def jobs(draw: st.DrawFn, /, **changes: Any) -> JobSpec:
    durable = changes.get("durable", draw(st.booleans()))
    drawn = {
        "nodes": draw(st.integers(1, 2)),
        "standbys": draw(st.integers(0, 2)),
        "warmth": draw(st.sampled_from(Warmth)),
        "durable": durable,
        "checkpoint_every": draw(st.sampled_from([0.0, 0.0, 0.5, 2.0])) if durable else 0.0,
        "max_restarts": draw(st.sampled_from([None, None, 0, 3])),
        **changes,
    }
    return job(draw(st.integers(1, 4 if drawn["nodes"] == 1 else 2)), **drawn)


def injected(
    how: list[str], moments: list[Doing | None], back: list[float | None] | None = None
) -> st.SearchStrategy[list[SimFault]]:
    back = back or [0.0, 1.0, 20.0]
    one = st.builds(
        SimFault,
        how=st.sampled_from(how),
        rank=st.sampled_from([None, *map(Rank, range(4))]),
        doing=st.sampled_from(moments),
        nth=st.integers(1, 7),
        after=st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.5, 3.0]),
        back=st.sampled_from(back),
    )
    several = st.builds(
        lambda fault, ranks: [
            SimFault(fault.how, Rank(rank), doing=None, after=4.0 * fault.nth + fault.after, back=fault.back)
            for rank in ranks
        ],
        one,
        st.sets(st.integers(0, 3), min_size=2),
    )
    return st.lists(st.one_of(one.map(lambda fault: [fault]), several), max_size=8).map(lambda many: list(chain(*many)))


fair = st.builds(
    NetworkConditions,
    delay=st.sampled_from([0.0, 0.002, 0.1]),
    slow=st.sampled_from([0.0, 0.05]),
    slow_by=st.just(3.0),
    repeated=st.sampled_from([0.0, 0.1, 0.5, 0.9]),
    late_exit=st.sampled_from([0.0, 0.5, 8.0]),
    overtaking_exit=st.sampled_from([0.0, 0.5]),
)
foul = st.builds(
    NetworkConditions,
    delay=st.sampled_from([0.002, 0.1]),
    slow=st.sampled_from([0.0, 0.1]),
    slow_by=st.sampled_from([5.0, 40.0, 200.0]),
    repeated=st.sampled_from([0.0, 0.3, 0.9]),
    lost=st.sampled_from([0.0, 0.02, 0.1]),
    late_exit=st.sampled_from([0.0, 8.0, 60.0]),
    overtaking_exit=st.sampled_from([0.0, 0.5]),
)
seeds = st.integers(0, 2**31)


def run_survivable(spec: JobSpec, weather: NetworkConditions, plan: list[SimFault], seed: int) -> None:
    """No script error, a durable checkpoint, a budget without end: nothing may end this job but its last step."""
    script = SimScript(until=UNTIL)
    SimSchedule(spec, script, weather, plan, seed=seed, promise=Promised.THE_LAST_STEP).run()


def run_any(spec: JobSpec, script: SimScript, weather: NetworkConditions, plan: list[SimFault], seed: int) -> None:
    run_world(spec, script, weather, plan, seed)


def run_world(spec: JobSpec, script: SimScript, weather: NetworkConditions, plan: list[SimFault], seed: int) -> World:
    schedule = SimSchedule(spec, script, weather, plan, seed=seed)
    schedule.run(world := schedule.world())
    return world


survivable = (
    jobs(durable=True, max_restarts=None),
    fair,
    injected(["kill", "body", "body", "hang", "stall", "slow", "slow", "disk"], [*MOMENTS, *IN_STEP, None]),
    seeds,
)


anything = (
    st.one_of(jobs(max_faults=100), jobs(max_faults=3)),
    st.builds(
        SimScript,
        until=st.just(UNTIL),
        bug=st.sampled_from([None, None, None, (Rank(1), StepNo(2))]),
        leaves=st.sampled_from([None, None, None, (Rank(0), StepNo(3))]),
    ),
    foul,
    injected(["kill", "hang", "stall", "slow", "raise", "body", "exit"], [*MOMENTS, *IN_STEP, None]),
    seeds,
)
plain = (
    jobs(max_faults=100),
    st.builds(SimScript, until=st.just(UNTIL), with_session=st.just(False)),
    foul,
    injected(["kill", "exit"], [Doing.BUILDING, Doing.AFTER, None]),
    seeds,
)


@schedules(75)
@given(*survivable)
def test_kills_and_hangs_at_any_moment_do_not_keep_the_job_from_its_last_step(
    spec: JobSpec, weather: NetworkConditions, plan: list[SimFault], seed: int
) -> None:
    run_survivable(spec, weather, plan, seed)


@schedules(75)
@given(*anything)
def test_whatever_goes_wrong_the_job_ends_once_and_says_why(
    spec: JobSpec, script: SimScript, weather: NetworkConditions, plan: list[SimFault], seed: int
) -> None:
    run_any(spec, script, weather, plan, seed)


def run_plain(spec: JobSpec, script: SimScript, weather: NetworkConditions, plan: list[SimFault], seed: int) -> None:
    world = run_world(spec, script, weather, plan, seed)
    assert not world.laws.opened, "steps, and so incidents, are unknown of such a script"


@schedules(75)
@given(*plain)
def test_a_script_without_a_session_is_restarted_as_a_whole_or_fails_with_a_diagnosis(
    spec: JobSpec, script: SimScript, weather: NetworkConditions, plan: list[SimFault], seed: int
) -> None:
    run_plain(spec, script, weather, plan, seed)


@schedules(200)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=5), st.integers(0, 2), seeds)
def test_every_planned_fault_strikes_exactly_once(places: list[tuple[int, int]], standbys: int, seed: int) -> None:
    plan = [
        FaultSpec(f"f{number}", Rank(rank), FaultHow.SIGKILL, step=StepNo(step))
        for number, (rank, step) in enumerate(places)
    ]
    world = World(job(4, standbys=standbys, durable=True), script=SimScript(until=UNTIL), faults=plan, seed=seed)
    assert world.run().code == 0
    struck = [line.fault for _, line in world.log if isinstance(line, FaultInjected)]
    assert sorted(struck) == sorted(spec.fault for spec in plan)


losing_nodes = (
    jobs(durable=True, max_restarts=None),
    fair,
    injected(["node", "node", "freeze", "kill", "hang", "disk"], [*MOMENTS, *IN_STEP, None]),
    seeds,
)
losing_nodes_for_good = (
    st.one_of(jobs(max_faults=100), jobs(max_faults=3)),
    st.builds(SimScript, until=st.just(UNTIL), with_session=st.sampled_from([True, True, False])),
    foul,
    injected(["node", "freeze", "kill", "exit"], [*MOMENTS, *IN_STEP, None], [None, 1.0, 20.0, 500.0, 700.0]),
    seeds,
)


@schedules(75)
@given(*losing_nodes)
def test_nodes_that_are_lost_and_come_back_do_not_keep_the_job_from_its_last_step(
    spec: JobSpec, weather: NetworkConditions, plan: list[SimFault], seed: int
) -> None:
    run_survivable(spec, weather, plan, seed)


@schedules(75)
@given(*losing_nodes_for_good)
def test_whatever_becomes_of_nodes_the_job_ends_once_and_says_why(
    spec: JobSpec, script: SimScript, weather: NetworkConditions, plan: list[SimFault], seed: int
) -> None:
    run_any(spec, script, weather, plan, seed)


DEFECTS = ["defect", "late defect"]
defective = (
    jobs(durable=True, max_restarts=None),
    fair,
    injected([*DEFECTS, "kill", "body", "hang", "node", "disk"], [*MOMENTS, *IN_STEP, None]),
    seeds,
)
defective_for_good = (
    st.one_of(jobs(max_faults=100), jobs(max_faults=3)),
    st.builds(SimScript, until=st.just(UNTIL), with_session=st.sampled_from([True, True, False])),
    foul,
    injected([*DEFECTS, "kill", "exit", "node", "freeze"], [*MOMENTS, *IN_STEP, None], [None, 1.0, 20.0]),
    seeds,
)


def run_defective(spec: JobSpec, weather: NetworkConditions, plan: list[SimFault], seed: int) -> None:
    """As `run_survivable`, with a coordinator that fails in between as often as it may."""
    run_survivable(spec, weather, few_defects(plan), seed)


def run_any_defective(
    spec: JobSpec, script: SimScript, weather: NetworkConditions, plan: list[SimFault], seed: int
) -> None:
    run_any(spec, script, weather, few_defects(plan), seed)


def few_defects(plan: list[SimFault]) -> list[SimFault]:
    many = [place for place, fault in enumerate(plan) if fault.how in DEFECTS][MOST_FAILURES:]
    return [fault for place, fault in enumerate(plan) if place not in many]


@schedules(75)
@given(*defective)
def test_a_coordinator_that_fails_does_not_keep_the_job_from_its_last_step(
    spec: JobSpec, weather: NetworkConditions, plan: list[SimFault], seed: int
) -> None:
    run_defective(spec, weather, plan, seed)


@schedules(75)
@given(*defective_for_good)
def test_whatever_goes_wrong_around_a_coordinator_that_fails_the_job_ends_once_and_says_why(
    spec: JobSpec, script: SimScript, weather: NetworkConditions, plan: list[SimFault], seed: int
) -> None:
    run_any_defective(spec, script, weather, plan, seed)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_soak_schedules_of_a_coordinator_that_fails() -> None:
    schedules(soak())(given(*defective)(run_defective))()
    schedules(soak())(given(*defective_for_good)(run_any_defective))()


many_nodes = st.integers(3, 5)
passing_on = (
    many_nodes.flatmap(lambda nodes: jobs(nodes=nodes, durable=True, max_restarts=None)),
    fair,
    injected(["node", "freeze", "kill"], [Doing.READY, Doing.FORMING, *IN_STEP, None]),
    seeds,
)
passing_on_for_good = (
    many_nodes.flatmap(lambda nodes: jobs(nodes=nodes, max_faults=100)),
    st.just(SimScript(until=UNTIL)),
    foul,
    injected(["node", "freeze", "kill"], [Doing.READY, Doing.FORMING, *IN_STEP, None], [None, 1.0, 20.0]),
    seeds,
)


@contextmanager
def tables_are_passed_on() -> Iterator[None]:
    with patch.multiple(tables, DIRECT=0, WIDTH=1):
        try:
            yield
        except Exception as error:
            error.add_note("in a regrow with DIRECT = 0 and WIDTH = 1 in membership/tables.py")
            raise


def pass_on_survivable(spec: JobSpec, weather: NetworkConditions, plan: list[SimFault], seed: int) -> None:
    """Each node gets its tables from the one before, as above 64 nodes they get them along a tree."""
    with tables_are_passed_on():
        run_survivable(spec, weather, plan, seed)


def pass_on_any(spec: JobSpec, script: SimScript, weather: NetworkConditions, plan: list[SimFault], seed: int) -> None:
    with tables_are_passed_on():
        run_any(spec, script, weather, plan, seed)


@schedules(50)
@given(*passing_on)
def test_nodes_that_get_tables_from_one_another_come_to_the_last_step(
    spec: JobSpec, weather: NetworkConditions, plan: list[SimFault], seed: int
) -> None:
    pass_on_survivable(spec, weather, plan, seed)


@schedules(50)
@given(*passing_on_for_good)
def test_whatever_becomes_of_tables_on_their_way_the_job_ends_once_and_says_why(
    spec: JobSpec, script: SimScript, weather: NetworkConditions, plan: list[SimFault], seed: int
) -> None:
    pass_on_any(spec, script, weather, plan, seed)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_soak_schedules_of_tables_that_are_passed_on() -> None:
    schedules(soak())(given(*passing_on)(pass_on_survivable))()
    schedules(soak())(given(*passing_on_for_good)(pass_on_any))()


# What `make test` draws above is drawn on by the full matrix.
MORE: dict[str, tuple[int, tuple[Any, ...], Callable[..., None]]] = {
    "kills and hangs": (360, survivable, run_survivable),
    "anything": (360, anything, run_any),
    "scripts without a session": (110, plain, run_plain),
    "nodes that come back": (260, losing_nodes, run_survivable),
    "nodes": (260, losing_nodes_for_good, run_any),
    "a coordinator that fails": (360, defective, run_defective),
    "anything and a coordinator that fails": (260, defective_for_good, run_any_defective),
    "tables of one another": (125, passing_on, pass_on_survivable),
    "anything and tables of one another": (125, passing_on_for_good, pass_on_any),
}


@pytest.mark.parametrize("what", MORE)
def test_more_schedules(what: str) -> None:
    draw_more(*MORE[what])


def test_who_gives_its_table_to_others_and_dies_meanwhile_holds_nobody_up() -> None:
    """Of 80 nodes those that eight others ask freeze as the first generation is formed: the coordinator gives it."""
    spec = job(1, nodes=80, durable=True)
    frozen = [SimFault("freeze", rank=Rank(rank), doing=Doing.READY, back=1.0) for rank in (0, 3)]
    world = World(spec, script=SimScript(until=StepNo(3)), injected=frozen)
    end = world.run()
    assert (end.code, end.diagnosis) == (0, "")
    said = [line for _, line in world.log]
    fetched = {line.node for line in said if isinstance(line, FetchTable)}
    missed = {line.node for line in said if isinstance(line, TableMissed)}
    assert len(fetched) == 72 and missed and missed <= fetched
    assert len(missed) <= 16, "those behind them wait for these, and do not all ask the coordinator"


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_soak_schedules_of_lost_nodes() -> None:
    schedules(soak())(given(*losing_nodes)(run_survivable))()
    schedules(soak())(given(*losing_nodes_for_good)(run_any))()


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_soak_survivable_schedules() -> None:
    schedules(soak())(given(*survivable)(run_survivable))()


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_soak_schedules_of_anything() -> None:
    schedules(soak())(given(*anything)(run_any))()


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_soak_schedules_of_plain_scripts() -> None:
    schedules(soak())(given(*plain)(run_plain))()
