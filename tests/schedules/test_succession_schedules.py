"""Coordinators that are lost with their nodes: the next one enters the job whatever else goes wrong meanwhile."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.schedules.test_elastic_schedules import elastic_jobs, requests, run_troubled, slots
from tests.schedules.test_membership_schedules import (
    DEFECTS,
    IN_STEP,
    MOMENTS,
    UNTIL,
    draw_more,
    fair,
    few_defects,
    foul,
    injected,
    job,
    jobs,
    run_any,
    run_survivable,
    schedules,
    seeds,
    soak,
)

from regrow.core.ids import Rank, StepNo
from regrow.core.messages import facts, orders
from regrow.core.records import GenerationFormed, IncidentClosed, WorkerGone
from regrow_lab.sim.faults import SimFault, SimRequest
from regrow_lab.sim.schedule import Promised, SimSchedule
from regrow_lab.sim.script import Doing, SimScript

WHEN = [*MOMENTS, *IN_STEP, None]
several = st.integers(2, 4)
mended = (
    several.flatmap(lambda nodes: jobs(nodes=nodes, durable=True, max_restarts=None)),
    fair,
    injected(["coordinator", "coordinator", *DEFECTS, "kill", "body", "hang", "node", "freeze", "disk"], WHEN).map(
        few_defects
    ),
    seeds,
)
anything = (
    several.flatmap(lambda nodes: st.one_of(jobs(nodes=nodes, max_faults=100), jobs(nodes=nodes, max_faults=3))),
    st.builds(SimScript, until=st.just(UNTIL), with_session=st.sampled_from([True, True, False])),
    foul,
    injected(["coordinator", "kill", "exit", "node", "freeze", "late defect"], WHEN, [None, 1.0, 20.0]).map(
        few_defects
    ),
    seeds,
)
elastic = (
    elastic_jobs(),
    fair,
    requests(),
    injected(["coordinator", "coordinator", "kill", "node", "disk"], WHEN),
    slots,
    seeds,
)
FAMILIES: dict[str, tuple[int, tuple[Any, ...], Callable[..., None]]] = {
    "mended": (150, mended, run_survivable),
    "anything": (100, anything, run_any),
    "elastic": (100, elastic, run_troubled),
}


def test_a_coordinator_is_lost_with_its_node_and_the_next_one_replaces_only_the_ranks_that_were_there() -> None:
    loss = SimFault("coordinator", rank=Rank(0), doing=Doing.COMPUTING, nth=2)
    schedule = SimSchedule(
        job(1, nodes=3, durable=True), SimScript(until=UNTIL), injected=[loss], promise=Promised.THE_LAST_STEP
    )
    schedule.run(world := schedule.world())
    said = [line for _, line in world.log]
    (closed,) = (line for line in said if isinstance(line, IncidentClosed))
    assert closed.kind == "node" and "which hosted the coordinator" in closed.cause
    (replaced,) = (line.worker for line in said if isinstance(line, WorkerGone) and line.code != 0)
    first, last = (line.workers for line in said if isinstance(line, GenerationFormed))
    assert [rank for rank, worker in first.items() if last[rank] != worker] == ["0"] and first["0"] == replaced


def test_who_is_said_to_be_lost_is_only_who_was_there() -> None:
    """A node that is lost while there is no coordinator is waited for, and is found out by that it does not come."""
    injected = [
        SimFault("coordinator", rank=Rank(0), doing=Doing.COMPUTING, nth=2),
        SimFault("node", rank=Rank(1), doing=Doing.COMPUTING, nth=2, after=0.5, back=500.0),
    ]
    schedule = SimSchedule(
        job(1, nodes=4, durable=True), SimScript(until=UNTIL), injected=injected, promise=Promised.THE_LAST_STEP
    )
    schedule.run(world := schedule.world())
    assert not [line for _, line in world.log if isinstance(line, facts.NodeLost)]
    (closed,) = (line for _, line in world.log if isinstance(line, IncidentClosed))
    assert closed.ranks == [Rank(0), Rank(1)]


@pytest.mark.parametrize("least", [1, 2])
def test_a_notice_that_was_given_to_a_node_before_it_was_lost_with_the_coordinator_ends_with_it(least: int) -> None:
    """The agent that comes back there has got none: it stays, and has ranks."""
    schedule = SimSchedule(
        job(1, nodes=2, durable=True, min_replicas=least, max_replicas=2),
        SimScript(until=StepNo(40), build=1.0),
        injected=[SimFault("coordinator", rank=Rank(0), after=5.001, back=2.0)],
        requests=[SimRequest("drain", 5.0, node=1, grace=60.0, back=None)],
        promise=Promised.THE_LAST_STEP,
    )
    schedule.run(world := schedule.world())
    said = [line for _, line in world.log]
    assert [line.store for line in said if isinstance(line, facts.NodeJoined) and line.node == "n1"][1:] == [
        "store of n1.1"
    ]
    assert not [line for line in said if isinstance(line, orders.StopNode)]


@pytest.mark.parametrize("what", FAMILIES)
def test_the_next_coordinator_brings_the_job_to_its_end(what: str) -> None:
    draw_more(*FAMILIES[what])


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("what", FAMILIES)
def test_soak_schedules_of_coordinators_that_are_lost(what: str) -> None:
    _, drawn, run = FAMILIES[what]
    schedules(soak())(given(*drawn)(run))()  # type: ignore[no-untyped-call]  # so hypothesis has it
