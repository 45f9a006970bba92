"""Newcomers that are refuted or fail, state in agents' memory, and jobs that are to stop, in any order of events."""

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
from tests.schedules.test_membership_schedules import job, soak

from regrow.core.exit_codes import OK, RUN_AGAIN, UNPROVEN
from regrow.core.ids import NodeId, Rank, Seconds, StepNo
from regrow.core.messages import orders
from regrow.core.records import IncidentClosed, Noted
from regrow.membership import scaling
from regrow.membership.recovery.all_again import StartFromMemory
from regrow.membership.recovery.formation import Generations
from regrow.membership.recovery.stopping import Stopping
from regrow_lab.sim.draws import draw_replacing
from regrow_lab.sim.faults import SimFault, SimRequest
from regrow_lab.sim.invariants import InvariantBroken
from regrow_lab.sim.script import Doing, SimScript
from regrow_lab.sim.world import World

REFUTED = SimFault("refuted", Rank(0), Doing.COMPUTING, nth=2)
KILL = SimFault("kill", Rank(1), Doing.REDUCING, nth=5)
LONG = StepNo(20)


def run(*wrong: SimFault | SimRequest, fails: int = 0, parts: int = 0, slots: int | None = None, **spec: Any) -> World:
    """A job of three ranks on two nodes and more, to its end."""
    world = World(
        job(spec.pop("nproc", 2), **{"nodes": 2, **spec}),
        script=SimScript(until=LONG, build=1.0, fails=fails, parts=parts),
        injected=[each for each in wrong if isinstance(each, SimFault)],
        requests=[each for each in wrong if isinstance(each, SimRequest)],
        slots=slots,
    )
    world.run()
    return world


def said(world: World, kind: type[Any]) -> list[Any]:
    return [line for _, line in world.log if isinstance(line, kind)]


def code(world: World) -> int | None:
    return None if world.laws.end is None else world.laws.end.code


def test_a_refuted_job_goes_on_with_what_its_agents_have_in_memory_and_loses_no_step() -> None:
    world = run(REFUTED, KILL)
    (closed,) = said(world, IncidentClosed)
    assert (closed.rung, closed.steps_lost, code(world)) == ("all", 0, OK)
    assert any("which is in memory" in line.text for line in said(world, Noted))


@pytest.mark.parametrize(
    ("fails", "rungs"), [(1, {"fork"}), (2, {"fork"}), (-1, {"all"})], ids=["once", "twice", "ever"]
)
def test_newcomers_that_fail_are_replaced_by_others_and_in_the_end_by_all(fails: int, rungs: set[str]) -> None:
    world = run(KILL, fails=fails)
    assert {closed.rung for closed in said(world, IncidentClosed)} == rungs and code(world) == OK


def test_where_agents_have_no_room_for_the_state_the_disk_has_it() -> None:
    full = [SimFault("memory", Rank(rank), Doing.COMPUTING) for rank in (0, 2)]
    world = run(REFUTED, KILL, *full, durable=True)
    assert {closed.rung for closed in said(world, IncidentClosed)} == {"restart"} and code(world) == OK


def test_a_newcomer_that_had_trained_before_newcomers_were_refuted_leaves_a_doubt() -> None:
    later = SimFault("refuted", Rank(0), Doing.COMPUTING, nth=12)
    assert code(run(KILL, later)) == UNPROVEN
    # It stands in the world already, and its first commit is heard of after that.
    in_between = SimFault("refuted", Rank(0), Doing.COMPUTING, nth=6, after=0.001)
    assert code(run(KILL, in_between)) == UNPROVEN


def test_a_job_that_is_to_stop_does_so_though_its_coordinator_has_failed_since() -> None:
    defect = SimFault("defect", Rank(0), after=6.0)
    world = run(SimRequest("stop", 4.0, grace=4.0), defect, SimFault("disk", Rank(0), after=3.0), checkpoint_every=60.0)
    assert code(world) == RUN_AGAIN and not said(world, orders.SpawnWorker)[4:]


@pytest.mark.parametrize("what", ["stop", "signals"])
def test_a_job_that_is_to_stop_while_all_start_again_is_not_started(what: str) -> None:
    world = run(REFUTED, KILL, SimRequest(what, 5.0, grace=30.0), checkpoint_every=60.0)
    assert code(world) in (OK, RUN_AGAIN)


def test_a_disk_that_is_slow_while_the_state_is_kept_is_waited_for_without_a_deadline_that_nobody_deals_with() -> None:
    stuck = SimFault("disk", Rank(0), Doing.COMPUTING, nth=4, lasts=400.0)
    world = run(KILL, stuck, fails=-1, durable=True, checkpoint_every=60.0)
    assert {closed.rung for closed in said(world, IncidentClosed)} == {"all"} and code(world) == OK


def test_whatever_happens_to_newcomers_no_state_that_an_agent_has_is_lost() -> None:
    rungs: Counter[str] = Counter()
    for number in range(100):
        schedule = draw_replacing(number)
        schedule.run(world := schedule.world())
        rungs.update(closed.rung for closed in said(world, IncidentClosed))
    assert rungs["all"] > 5, rungs


@pytest.mark.soak
def test_many_more_of_them() -> None:
    for number in range(100, 100 + 3 * soak()):
        draw_replacing(number).run()


def test_a_machine_that_forgets_what_agents_have_breaks_the_law() -> None:
    def forgets(self: StartFromMemory, step: StepNo, now: Seconds) -> None:
        self._job.kept = None
        self._ladder.restart("a defect", now)

    with (
        patch.object(StartFromMemory, "_go", forgets),
        pytest.raises(InvariantBroken, match="in memory, and all start again from state@4"),
    ):
        run(REFUTED, SimFault("kill", Rank(1), Doing.REDUCING, nth=7), durable=True)


def test_a_machine_that_forgets_that_it_is_to_stop_breaks_the_law() -> None:
    with (
        patch.object(Stopping, "requested", lambda *_: None),
        pytest.raises(InvariantBroken, match="within the time it was given"),
    ):
        run(SimRequest("stop", 4.0, grace=1.0))


def exposed(*wrong: SimFault | SimRequest) -> World:
    """Two replicas of two ranks: that of a node which is lost for good finds room beside the other, and elsewhere."""
    gone = SimFault("node", Rank(2), Doing.COMPUTING, nth=4, back=None)
    return run(gone, *wrong, nproc=2, parts=2, unit=2, slots=4, durable=True, node_deadline=60.0)


ELSEWHERE = SimRequest("node", 1.0, slots=2)


def test_holders_of_one_part_are_kept_apart_where_there_is_room_and_else_it_is_said() -> None:
    together = exposed()
    assert together.laws.exposure.exposed == "" or any("same part" in line.text for line in said(together, Noted))
    apart = exposed(ELSEWHERE)
    assert not any("same part" in line.text for line in said(apart, Noted)) and code(apart) == OK


def test_holders_that_stand_together_and_nobody_says_so_break_the_law() -> None:
    seats = scaling.new_slots

    def anywhere(ranks: Any, unit: int, free: dict[NodeId, Any], **_: Any) -> Any:
        return seats(ranks, unit, free)

    third = SimFault("kill", Rank(0), Doing.COMPUTING, nth=12)
    with patch.object(scaling, "new_slots", anywhere):
        told = exposed(ELSEWHERE, third)
        assert any("same part" in line.text for line in said(told, Noted))
        with (
            patch.object(Generations, "_say_exposed", lambda *_: None),
            pytest.raises(InvariantBroken, match="are on one node, without a report of it"),
        ):
            exposed(ELSEWHERE, third)
