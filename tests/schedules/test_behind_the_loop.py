"""Code behind the loop is repaired under any order, loss and repetition of events, and ends."""

import random

import msgspec
import pytest
from tests.schedules.test_membership_schedules import job, soak

from regrow.core.exit_codes import RUN_AGAIN
from regrow.core.ids import Rank
from regrow_lab.sim.draws import draw
from regrow_lab.sim.faults import SimFault
from regrow_lab.sim.schedule import SimSchedule
from regrow_lab.sim.script import Doing
from regrow_lab.sim.world import World


def drawn(number: int) -> SimSchedule:
    """A schedule whose script goes on behind its loop, and which is struck there too."""
    rng, plain = random.Random(f"behind the loop {number}"), draw(number)
    injected = [
        SimFault(
            rng.choice(("kill", "kill", "node", "defect", "late defect")),
            doing=rng.choice((Doing.AFTER, Doing.AFTER, Doing.FINISHED)),
            nth=rng.randint(1, 5),
            after=rng.choice((0.0, 0.01, 0.1)),
            back=rng.choice((0.0, 1.0, 20.0)),
        )
        for _ in range(rng.randint(0, 2))
    ]
    script = msgspec.structs.replace(plain.script, goes_on=True, after=rng.choice((0.0, 0.3, 3.0)))
    return msgspec.structs.replace(plain, script=script, injected=[*plain.injected, *injected])


def test_kills_behind_the_loop_do_not_keep_a_job_from_its_end() -> None:
    for number in range(200):
        drawn(number).run()


@pytest.mark.parametrize("kills", [0, 12])
def test_a_rank_that_hangs_there_is_waited_for_for_a_day_which_takes_few_events(kills: int) -> None:
    earlier = [SimFault("kill", rank=Rank(2), doing=Doing.REDUCING, nth=nth) for nth in range(1, kills + 1)]
    hangs = SimFault("hang", rank=Rank(1), doing=Doing.AFTER)
    end = World(job(1, nodes=3, durable=True), injected=[*earlier, hangs]).run(most=12_000)
    assert end.code == RUN_AGAIN and "86400 s" in end.diagnosis


FOUND = {
    2498: "one rank stalls, and the other first computes for long and then stalls too",
    12384: "the only node left is given back before the lost one could be waited for",
    13252: "a newcomer fails while a survivor hangs that was told to halt",
}
"""Each broke a law once."""


@pytest.mark.parametrize("number", FOUND, ids=FOUND.get)
def test_what_long_runs_have_found_is_mended(number: int) -> None:
    drawn(number).run()


@pytest.mark.soak
def test_many_more_of_them() -> None:
    for number in range(200, 200 + 10 * soak()):
        drawn(number).run()
