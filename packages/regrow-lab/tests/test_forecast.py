"""Forecast of the cost of faults: the published examples, and the formulas against a simulation."""

import json
import math
import random
from pathlib import Path

import pytest

from regrow.cli import main
from regrow_lab.forecast import HOUR, MONTH, Fleet, FromCheckpoints, InProcess, daly, young


def test_a_thousand_nodes_of_which_two_in_ten_thousand_fail_an_hour_have_a_fault_every_five_hours() -> None:
    fleet = Fleet(1000, 1000 * 0.0002)
    assert fleet.between == 5 * HOUR
    # one at least of independent nodes, each with its own chance in that hour
    assert fleet.chance(HOUR) == pytest.approx(1 - (1 - 0.0002) ** 1000, rel=1e-3)


def test_an_interruption_of_256_instances_at_55_an_hour_costs_4693_and_one_a_day_10_hours_a_month() -> None:
    fleet = Fleet(256, 1 / 24, price=55)
    restart = FromCheckpoints(every=20 * 60, writing=0, recover=10 * 60)
    assert restart.lost == 20 * 60
    assert fleet.cost(restart.lost) == pytest.approx(4693, abs=1)
    assert restart.lost * fleet.faults(MONTH) == pytest.approx(10 * HOUR)
    assert fleet.cost(restart.lost * fleet.faults(MONTH)) == pytest.approx(141_000, rel=0.002)


def simulated(fleet: Fleet, recovery: FromCheckpoints, *, segments: int) -> float:
    """Part of the time that counts, by drawing when faults strike: each segment and its checkpoint are one attempt."""
    draw = random.Random(3)
    clock = 0.0
    for _ in range(segments):
        needs = recovery.every + recovery.writing
        while True:
            fault = draw.expovariate(1 / fleet.between)
            if fault >= needs:
                clock += needs
                break
            clock += fault
            needs = recovery.recover + recovery.every + recovery.writing
    return segments * recovery.every / clock


@pytest.mark.parametrize("faults_an_hour", [0.1, 1.0, 4.0])
def test_the_part_of_time_that_counts_is_what_a_simulation_finds(faults_an_hour: float) -> None:
    fleet = Fleet(100, faults_an_hour)
    recovery = FromCheckpoints(every=600, writing=30, recover=120)
    # The model counts a recovery before each segment that a fault has cut off, as the simulation does.
    found = simulated(fleet, recovery, segments=40_000)
    assert recovery.goodput(fleet) == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize(("writing", "between"), [(30.0, 5 * HOUR), (300.0, 2 * HOUR), (5.0, 600.0)])
def test_no_interval_is_better_than_dalys(writing: float, between: float) -> None:
    fleet = Fleet(1, HOUR / between)
    best = FromCheckpoints(daly(writing, between), writing, 60).goodput(fleet)
    others = [
        FromCheckpoints(daly(writing, between) * part, writing, 60).goodput(fleet) for part in (0.5, 0.8, 1.25, 2)
    ]
    assert best > max(others)
    assert best >= FromCheckpoints(young(writing, between), writing, 60).goodput(fleet) - 1e-6


def test_where_faults_come_faster_than_checkpoints_the_best_interval_is_the_time_between_faults() -> None:
    assert daly(500.0, 200.0) == 200.0
    assert FromCheckpoints(every=1e6, writing=0, recover=0).goodput(Fleet(1, 3600)) == 0.0


def test_in_process_recovery_costs_what_it_takes_and_nothing_where_nothing_fails() -> None:
    assert InProcess(10).goodput(Fleet(10, 1.0)) == pytest.approx(1 - 10 / HOUR, abs=1e-5)
    assert InProcess(10).goodput(Fleet(10, 0.0)) == 1.0
    assert FromCheckpoints(600, 30, 60).goodput(Fleet(10, 0.0)) == 600 / 630


@pytest.mark.parametrize(("away", "spares"), [(0.0, 0), (0.8, 5), (4.0, 11)])
def test_spares_are_enough_for_so_many_lost_at_once(away: float, spares: int) -> None:
    fleet = Fleet(1000, away)
    found = fleet.spares(HOUR, 0.999)
    assert found == spares

    def enough(count: int) -> float:
        return sum(math.exp(-away) * away**k / math.factorial(k) for k in range(count + 1))

    assert enough(found) >= 0.999
    assert found == 0 or enough(found - 1) < 0.999


def test_spares_for_very_many_follow_the_normal_distribution() -> None:
    assert Fleet(10**6, 499.0).spares(HOUR, 0.999) == pytest.approx(Fleet(10**6, 501.0).spares(HOUR, 0.999), abs=5)


def test_the_command_tells_and_writes_the_figures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    words = ["--nodes", "256", "--price", "55", "--faults-a-day", "1", "--in-process", "10s", "--json", str(out)]
    assert main(["plan", *words]) == 0
    shown = capsys.readouterr().out
    assert "256 nodes: a fault every 24 h, 1 a day" in shown
    assert "4,693" in shown and "140,800" in shown
    figures = json.loads(out.read_text())
    assert figures["sides"][0]["cost_a_fault"] == pytest.approx(4693.33, abs=0.01)
    assert figures["sides"][-1] | {"goodput": 0} == {
        "name": "regrow, in process",
        "lost_a_fault": 10.0,
        "cost_a_fault": pytest.approx(39.11, abs=0.01),
        "lost_a_month": pytest.approx(300.0),
        "cost_a_month": pytest.approx(1173.33, abs=0.01),
        "cost_a_year": pytest.approx(14275.56, abs=0.01),
        "goodput": 0,
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "how often do nodes fail?"),
        (["--faults-a-day", "1", "--node-mtbf", "9d"], "give one of"),
        (["--node-failures", "0.02"], "is no percentage"),
        (["--node-mtbf", "0s"], "is no time at all"),
        (["--faults-a-day", "1", "--sure", "100%"], "infinitely many spares"),
        (["--faults-a-day", "1", "--checkpoint-every", "0s"], "is no time at all"),
        (["--faults-a-day", "1", "--repair", "soon"], "is not a duration"),
    ],
)
def test_what_cannot_be_is_said_with_its_flag(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--nodes", "4", *words]) == 2
    assert said in capsys.readouterr().err
