"""Results that others have published, foretold from their inputs."""

import tomllib
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from regrow.core.errors import UsageError
from regrow_lab.fleet.arrivals import faults
from regrow_lab.fleet.reading import decode_scenario
from regrow_lab.fleet.report import simulation_lines
from regrow_lab.fleet.scenario import FleetScenario
from regrow_lab.fleet.simulation import runs
from regrow_lab.fleet.summary import SimulationReport, simulate_all

SCENARIOS = Path(__file__).parents[3] / "benchmarks" / "scenarios"
NEAR = 0.15
"""As near as a forecast has to be whose inputs are all there."""


def table(name: str) -> dict[str, Any]:
    return tomllib.loads((SCENARIOS / f"{name}.toml").read_text())


def scenario(name: str, **more: Any) -> FleetScenario:
    return decode_scenario(table(name) | more, place=name)


def forecast(name: str, seeds: int = 10) -> SimulationReport:
    return simulate_all(scenario(name), seeds)


@pytest.mark.parametrize("name", ["llama3", "hyperpod"])
def test_published_results_are_foretold_from_their_inputs(name: str) -> None:
    found = forecast(name)
    assert found.published and not [each for each in found.published if each.missing]
    assert {each.figure: each.off for each in found.published if abs(each.off) > NEAR} == {}


def test_hyperpods_recoveries_are_as_much_shorter_as_published() -> None:
    for nodes in (2, 32, 288):
        often = [{"nodes": nodes, "faults": [{"kind": "fault", "per_node_hour": 0.5 / nodes}]}]
        found = simulate_all(scenario("hyperpod", hardware=often, published=[]), 3)
        restart, without, ours = (each.mending.mean for each in found.policies)
        assert 0.80 <= 1 - without / restart <= 0.93
        assert ours < without


def test_clockworks_result_is_not_foretold_without_what_a_restart_takes() -> None:
    found = forecast("clockwork")
    assert [bool(each.missing) for each in found.published] == [True, True]
    restart, torchft = found.published
    assert restart.off < -NEAR and torchft.off < -0.5
    walls = {each.policy: each.wall.mean / 60 for each in found.policies}
    # Half the way between two checkpoints and the 15 minutes that are assumed, once an hour.
    assert walls["restart from checkpoints"] == pytest.approx(405 / (1 - (13.5 / 2 + 15) / 60), rel=0.06)
    assert walls["regrow, warm standbys"] < walls["regrow, nothing warm"] < 405 * 1.02
    told = "\n".join(simulation_lines(found))
    assert "13.6 h published" in told and "nobody has published how long it takes from a failure" in told


def test_faults_at_intervals_come_uniformly_between_the_two() -> None:
    stream = faults(scenario("clockwork"), seed=1)
    times = [next(stream).at for _ in range(500)]
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    assert min(gaps) >= 2700 and max(gaps) <= 4500 and fmean(gaps) == pytest.approx(3600, rel=0.03)


def test_all_seeds_of_a_policy_meet_as_many_of_these_faults_as_there_is_time_for() -> None:
    found = scenario("clockwork")
    for outcome in runs(found, found.policy[2], 5):
        assert outcome.wall / 4500 - 1 < outcome.incidents["failure"] <= outcome.wall / 2700


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"faults": [{"kind": "a", "every": ["1h"]}]}, "every is not a shortest and a longest time"),
        ({"faults": [{"kind": "a", "every": ["2h", "1h"]}]}, "every is not a shortest and a longest time"),
        ({"faults": [{"kind": "a", "every": ["1h", "2h"], "per_node_hour": 0.1}]}, "leave one out"),
    ],
)
def test_intervals_that_are_none_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        scenario("clockwork", hardware=[{"nodes": 8} | change])


def test_a_published_result_of_an_unknown_policy_is_refused() -> None:
    row = {"policy": "nobody", "figure": "wall", "value": "1h", "source": "x"}
    with pytest.raises(UsageError, match='"nobody" is not a policy'):
        scenario("clockwork", published=[row])
    with pytest.raises(UsageError, match="sizes gives more"):
        scenario("clockwork", sizes=[4, 8])
