"""Sums that never end on the devices: the groups are formed anew, and nobody is ended for it, whatever else happens."""

import pytest
from tests.schedules.test_membership_schedules import job

from regrow.core.ids import Rank, StepNo
from regrow.core.messages.facts import WorkerExited
from regrow.core.records import IncidentClosed
from regrow_lab.sim.faults import SimFault
from regrow_lab.sim.schedule import Promised, SimSchedule
from regrow_lab.sim.script import Doing, SimScript

STUCK = [SimFault("device", rank=Rank(1), doing=Doing.REDUCING, nth=nth) for nth in (2, 5)]


@pytest.mark.parametrize("number", range(8))
def test_all_go_on_in_their_processes(number: int) -> None:
    schedule = SimSchedule(
        job(3),
        script=SimScript(until=StepNo(6)),
        injected=STUCK,
        seed=number,
        promise=Promised.THE_LAST_STEP,
    )
    world = schedule.world()
    assert schedule.run(world).code == 0
    kinds = [item.kind for _, item in world.log if isinstance(item, IncidentClosed)]
    assert kinds == ["standstill", "standstill"]
    assert [item.code for _, item in world.log if isinstance(item, WorkerExited)] == [0, 0, 0]


@pytest.mark.parametrize("how", ["kill", "hang", "slow", "stall"])
def test_another_fault_meanwhile_is_mended_too(how: str) -> None:
    other = [SimFault(how, rank=Rank(0), doing=Doing.REDUCING, nth=nth, after=0.001) for nth in (2, 4)]
    schedule = SimSchedule(
        job(3), script=SimScript(until=StepNo(6)), injected=[*STUCK, *other], promise=Promised.THE_LAST_STEP
    )
    assert schedule.run().code == 0
