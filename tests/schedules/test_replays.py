"""A number, or the word that a failed schedule prints, is all that it takes to see its run again."""

import os
import re
import subprocess
import sys

import msgspec
import pytest
from tests.schedules.test_membership_schedules import job, run_survivable, soak

from regrow.cli import main
from regrow.core.errors import UsageError
from regrow.core.ids import Rank
from regrow.core.records import JobEnded
from regrow_lab.sim.draws import draw
from regrow_lab.sim.faults import SimFault
from regrow_lab.sim.invariants import InvariantBroken
from regrow_lab.sim.network import NetworkConditions
from regrow_lab.sim.schedule import Promised, SimSchedule, replay_lines
from regrow_lab.sim.script import Doing

PRINTS = """
from regrow_lab.sim.draws import draw
from regrow_lab.sim.schedule import replay_lines
for number in range(25):
    print("\\n".join(replay_lines(draw(number))))
"""
FORBIDDEN = job(2, max_faults=0)
KILL = SimFault("kill", rank=Rank(1), doing=Doing.COMPUTING)


def test_replays_print_the_same_in_processes_that_order_sets_in_other_ways() -> None:
    printed = [
        subprocess.run(
            [sys.executable, "-c", PRINTS],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    ]
    assert printed[0].count("ended with code") == 25
    assert printed[0] == printed[1] == printed[2]


def test_what_a_schedule_that_fails_says_shows_its_run_again(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvariantBroken) as failed:
        run_survivable(FORBIDDEN, NetworkConditions(), [KILL], 7)
    (said,) = failed.value.__notes__
    words = re.search(r"regrow (sim replay \S+)$", said)
    assert words is not None, said
    assert main(words[1].split()) == 1
    seen = capsys.readouterr().out.splitlines()
    assert seen == list(replay_lines(SimSchedule.of_code(words[1].split()[-1])))
    assert seen[-1].startswith("BROKEN: InvariantBroken: the job did not come to its last step")
    assert any('"type":"WorkerExited"' in line for line in seen)


def test_a_number_is_a_schedule_and_a_schedule_is_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(200):
        assert SimSchedule.of_code(draw(number).code) == draw(number)
    assert main(["sim", "replay", "11", "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=SimSchedule) == draw(11)
    assert main(["sim", "replay", "11"]) == 0
    assert capsys.readouterr().out.splitlines() == list(replay_lines(draw(11)))


@pytest.mark.parametrize("code", ["schedule:", "schedule:AAAA", "kill", "-3"])
def test_a_word_that_is_none_is_refused(code: str) -> None:
    with pytest.raises(UsageError, match="is no schedule"):
        SimSchedule.of_code(code)


def test_a_run_in_which_a_promise_is_broken_is_told_from_one_in_which_nothing_was_promised() -> None:
    allowed = SimSchedule(FORBIDDEN, injected=[KILL])
    assert allowed.run().code == 75
    assert list(replay_lines(allowed))[-1].startswith("ended with code 75")
    with pytest.raises(InvariantBroken):
        msgspec.structs.replace(allowed, promise=Promised.THE_LAST_STEP).run()


def test_schedules_by_number_come_to_what_they_must() -> None:
    for number in range(100):
        draw(number).run()


def test_a_job_whose_only_worker_builds_is_not_struck_by_a_hang_that_nobody_could_see() -> None:
    """Another one lives on without its agent, and is none of the job any more."""
    draw(1_004_144).run()


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_soak_schedules_by_number() -> None:
    for number in range(100, 100 + max(10_000, soak())):
        schedule = draw(number)
        schedule.run(world := schedule.world())
        assert sum(isinstance(line, JobEnded) for _, line in world.log) == 1, number
