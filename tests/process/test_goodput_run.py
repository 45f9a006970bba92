"""The account of jobs that really ran, with kills, adds up, and says what their plan and their commits say."""

import random
from pathlib import Path

import msgspec
import pytest
from tests.process.launching import site
from tests.process.training import Fault, train

from regrow.core.records import IncidentClosed, JobEnded, JobStarted
from regrow.observe.goodput import STAGES, Spent
from regrow.observe.goodput_report import GoodputReport
from regrow.observe.ledger import read_records

WORLD = 3
STAGE_NAMES = ("forward", "backward", "reduce", "update", "commit")


@pytest.mark.parametrize(("faults", "steps"), [(2, 30), (20, 120)])
def test_the_account_of_a_run_with_kills_adds_up_and_agrees_with_the_plan(
    tmp_path: Path, faults: int, steps: int
) -> None:
    seeded = random.Random(faults)
    struck = sorted(seeded.sample(range(3, steps - 3), faults))
    plan = [Fault(rank=seeded.randrange(WORLD), step=step, at=seeded.choice(STAGE_NAMES)) for step in struck]
    with site(tmp_path) as here:
        done = train(here, "counted", "--standby", "1", world=WORLD, steps=steps, faults=plan)
        assert done.code == 0, done.output
        told = here.regrow("goodput", "counted", "--price", "36", "--json")
        assert told.returncode == 0, told.stderr
        found = msgspec.json.decode(told.stdout, type=GoodputReport)
        records = read_records(here.home / "jobs" / "counted")

    (began,) = [each.at for each in records if isinstance(each, JobStarted)]
    (ended,) = [each.at for each in records if isinstance(each, JobEnded)]
    assert sum(found.spent.values()) == pytest.approx((ended - began) * WORLD, rel=0.01)
    assert found.cost == pytest.approx(36.0 * (ended - began) / 3600)

    injected, incidents = done.ledger.injected, [each for each in records if isinstance(each, IncidentClosed)]
    assert len(injected) == sum(each.faults for each in incidents) == faults, done.output
    assert sum(row.incidents for row in found.by_cause) == len(incidents)
    assert (found.steps, found.steps_lost, found.steps_redone) == (steps, 0, 0)

    commits = [each for ranks in done.ledger.commits.values() for each in ranks.values()]
    ran, slowest = sum(each.seconds for each in commits if not each.adopted), max(each.seconds for each in commits)
    adopted = sum(each.adopted for each in commits)
    # What was cut off, and counts all the same or does not, is taken to have lasted as long as a step that was not.
    assert found.spent[Spent.PRODUCTIVE] <= ran * 1.05 + slowest * adopted
    mending = sum(each.total for each in incidents) * WORLD
    assert sum(found.spent[name] for name in STAGES) <= mending + slowest * WORLD * faults
    assert found.spent[Spent.REGROUP] <= sum(each.regroup for each in incidents) * WORLD + 1e-6
    assert found.spent[Spent.REGROUP] >= 0.5 * sum(each.regroup for each in incidents) * WORLD
