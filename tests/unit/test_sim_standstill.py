"""What it takes to simulate a day in which nothing happens."""

import pytest

from regrow.core.exit_codes import RUN_AGAIN
from regrow.core.ids import JobId, Rank
from regrow.core.job import JobSpec
from regrow.core.messages.vocabulary import Warmth
from regrow.sim.faults import SimFault
from regrow.sim.script import Doing
from regrow.sim.world import World

SPEC = JobSpec(
    JobId("sim"),
    nproc=1,
    nodes=3,
    standbys=0,
    warmth=Warmth.BUILT,
    max_faults=100,
    window=3600.0,
    max_restarts=None,
    durable=True,
)
HANGS_AT_THE_END = SimFault("hang", rank=Rank(1), doing=Doing.AFTER, nth=1)


@pytest.mark.parametrize("kills", [0, 12])
def test_a_rank_that_hangs_behind_the_last_step_is_waited_for_for_a_day_in_few_events(kills: int) -> None:
    earlier = [SimFault("kill", rank=Rank(2), doing=Doing.REDUCING, nth=nth) for nth in range(1, kills + 1)]
    world = World(SPEC, strikes=[*earlier, HANGS_AT_THE_END])
    end = world.run(most=12_000)
    assert end.code == RUN_AGAIN and "86400 s" in end.diagnosis
