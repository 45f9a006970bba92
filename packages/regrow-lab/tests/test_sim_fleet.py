"""Jobs of any size over weeks, simulated: what must hold of every account, and what it agrees with."""

import json
import math
import tomllib
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.cli import main
from regrow.core.errors import UsageError
from regrow.core.ids import Generation, Rank, StepNo, WorkerId
from regrow.core.records import IncidentClosed, StepCommitted
from regrow.observe.goodput import Spent
from regrow_lab.fleet.arrivals import CapacityChange, capacity, faults
from regrow_lab.fleet.calibration import calibration_lines, measured
from regrow_lab.fleet.costs import CostTable, StageTimes
from regrow_lab.fleet.deciding import Remedy, Situation, Trouble
from regrow_lab.fleet.precedents import precedent
from regrow_lab.fleet.reading import decode_costs, decode_scenario
from regrow_lab.fleet.scenario import CapacityTable, CostRow, FleetScenario, PolicyTable, Span
from regrow_lab.fleet.simulation import simulate
from regrow_lab.fleet.summary import estimate, simulate_all
from regrow_lab.forecast import HOUR, Fleet, FromCheckpoints, InProcess

SCENARIOS = Path(__file__).parents[3] / "benchmarks" / "scenarios"
DAY = 24 * HOUR


def scenario(**tables: Any) -> FleetScenario:
    """A small job of 16 nodes; tables given here replace those below."""
    table: dict[str, Any] = {
        "job": {"work": "5d", "step": "10s", "ranks_per_node": 4, "replica_nodes": 2},
        "hardware": [{"nodes": 16, "price": 10.0, "faults": [fault("process", 0.002), fault("node", 0.002, "node")]}],
        "policy": [{"name": "regrow", "recovers": "regrow"}],
        "costs": [
            {"of": "regrow", "detect": 2.0, "abort": 1.0, "regroup": 20.0, "hydrate": 5.0, "redo": 3.0},
            *({"of": name, "total": "5min"} for name in ("checkpoint-restart", "process-restart", "in-process")),
        ],
    }
    return decode_scenario(table | tables, place="here")


def fault(kind: str, rate: float, takes: str = "worker", **more: Any) -> dict[str, Any]:
    return {"kind": kind, "per_node_hour": rate, "takes": takes, "repair": "2h", **more}


def policy(recovers: str = "regrow", **more: Any) -> PolicyTable:
    found = scenario(policy=[{"name": "this one", "recovers": recovers, **more}]).policy
    return found[0]


# --- what must hold ------------------------------------------------------------------------------------------------

rates = st.sampled_from([0.0, 0.0005, 0.005, 0.05])
policies = st.builds(
    policy,
    recovers=st.sampled_from(["checkpoint-restart", "process-restart", "in-process", "regrow"]),
    spares=st.sampled_from([0, 1, 3]),
    standbys=st.sampled_from([0, 1]),
    elastic=st.booleans(),
    checkpoint_every=st.sampled_from(["7min", "1h", "9h"]),
    checkpoint_stall=st.sampled_from(["0s", "20s"]),
)
capacities = st.sampled_from(
    [
        {},
        {"kind": "wave", "least": 3},
        {"kind": "spot", "reclaims_per_node_hour": 0.05, "away": "1h", "notice": "1s"},
        {"kind": "trace", "points": [["0h", 16], ["5h", 9], ["6h", 30]], "period": "11h"},
    ]
)


@settings(max_examples=60, deadline=None)
@given(policies, rates, rates, rates, capacities, st.sampled_from([0.0, 0.07]), st.integers(0, 9))
def test_all_rank_seconds_are_accounted_for_once(
    which: PolicyTable, worker: float, node: float, job: float, nodes: dict[str, Any], overhead: float, seed: int
) -> None:
    kinds = [fault("worker", worker), fault("hang", worker / 5, "hang"), fault("rack", node, "node", nodes=3)]
    found = simulate(
        scenario(
            job={"work": "2d", "step": "10s", "replica_nodes": 2, "overhead": overhead, "limit": "6d"},
            hardware=[{"nodes": 16, "faults": [*kinds, fault("all", job / 100, "job")]}],
            capacity=nodes,
        ),
        which,
        seed,
    )
    assert sum(found.spent.values()) == pytest.approx(found.rank_seconds, rel=1e-9)
    assert found.rank_seconds == pytest.approx((16 + which.spares) * 8 * found.wall, rel=1e-9)
    assert min(found.spent.values()) >= -1e-6
    # What counts is the work that is done, spread over all ranks, less what lies between steps.
    assert found.spent[Spent.PRODUCTIVE] == pytest.approx(found.work * 16 * 8 * (1 - overhead), rel=1e-6, abs=1e-3)
    # What has not finished ends at the limit; that time is a sum, and rounded.
    assert found.finished == (found.wall < 6 * DAY - 1e-6)
    if found.finished:
        assert found.work == pytest.approx(2 * DAY, rel=1e-9)


@settings(max_examples=20, deadline=None)
@given(policies, st.integers(0, 99))
def test_a_seed_gives_the_same_job_always(which: PolicyTable, seed: int) -> None:
    assert simulate(scenario(), which, seed) == simulate(scenario(), which, seed)


@settings(max_examples=15, deadline=None)
@given(policies, st.sampled_from(["worker", "node", "hang", "job"]), st.sampled_from([0.0005, 0.01]))
def test_more_faults_never_raise_goodput(which: PolicyTable, takes: str, rate: float) -> None:
    """Over some seeds: those that were there before strike at the same moments."""
    few = scenario()
    more = scenario(
        hardware=[
            {"nodes": 16, "faults": [fault("process", 0.002), fault("node", 0.002, "node"), fault("more", rate, takes)]}
        ]
    )
    before, after = ([simulate(each, which, seed).goodput for seed in range(8)] for each in (few, more))
    assert fmean(after) <= fmean(before) + 1e-9


@settings(max_examples=15, deadline=None)
@given(policies)
def test_spares_never_hurt_the_time_to_finish(which: PolicyTable) -> None:
    """At the mean over some seeds; a checkpoint that happens to lie well makes a per cent of difference."""

    def finished(spares: int) -> float:
        with_spares = policy(which.recovers, **{**_words(which), "spares": spares})
        return fmean(simulate(scenario(), with_spares, seed).wall for seed in range(8))

    none, one, four = finished(0), finished(1), finished(4)
    slack = 1.001 if which.from_peers else 1.015
    assert four <= one * slack and one <= none * slack


def _words(which: PolicyTable) -> dict[str, Any]:
    return {
        "standbys": which.standbys,
        "elastic": which.elastic,
        "checkpoint_every": which.checkpoint_every,
        "checkpoint_stall": which.checkpoint_stall,
    }


def test_without_faults_only_checkpoints_cost_anything() -> None:
    calm = scenario(hardware=[{"nodes": 16}], job={"work": "10h", "step": "10s"})
    found = simulate(calm, policy("checkpoint-restart", checkpoint_every="1h", checkpoint_stall="60s"), 0)
    # Nine of them: none is written when all is done.
    assert found.wall == pytest.approx(10 * HOUR + 9 * 60)
    assert found.spent[Spent.CHECKPOINT] == pytest.approx(9 * 60 * 16 * 8)
    assert found.goodput == pytest.approx(10 * HOUR / found.wall)


@pytest.mark.parametrize("a_day", [2.0, 20.0])
def test_a_restarted_job_has_the_goodput_of_dalys_model(a_day: float) -> None:
    rate = a_day / 24 / 16
    many = scenario(job={"work": "100d", "step": "1s"}, hardware=[{"nodes": 16, "faults": [fault("process", rate)]}])
    restart = policy("checkpoint-restart", checkpoint_every="20min", checkpoint_stall="30s")
    found = fmean(simulate(many, restart, seed).goodput for seed in range(4))
    assert found == pytest.approx(FromCheckpoints(1200, 30, 300).goodput(Fleet(16, a_day / 24)), rel=0.02)


@pytest.mark.parametrize("a_day", [2.0, 200.0])
def test_a_job_mended_in_process_has_the_goodput_of_the_forecast(a_day: float) -> None:
    rate = a_day / 24 / 16
    many = scenario(job={"work": "20d", "step": "1s"}, hardware=[{"nodes": 16, "faults": [fault("process", rate)]}])
    found = fmean(simulate(many, policy(), seed).goodput for seed in range(4))
    assert found == pytest.approx(InProcess(31.5).goodput(Fleet(16, a_day / 24)), rel=0.01)


def test_a_fixed_world_waits_for_a_lost_node_a_spare_takes_its_place_and_an_elastic_world_goes_on() -> None:
    nodes = scenario(hardware=[{"nodes": 16, "price": 1.0, "faults": [fault("node", 0.002, "node")]}])
    fixed, spare, elastic = (
        simulate(nodes, each, 1) for each in (policy(), policy(spares=4), policy(elastic=True, least_nodes=2))
    )
    assert fixed.spent[Spent.CAPACITY] > 5 * elastic.spent[Spent.CAPACITY] > 0
    assert spare.spent[Spent.CAPACITY] == 0
    assert spare.wall < elastic.wall < fixed.wall
    assert spare.money > elastic.money


def test_the_loss_of_all_replicas_goes_back_to_a_checkpoint_and_that_of_a_node_does_not() -> None:
    def lost(**hardware: Any) -> float:
        faults = [fault("n", 0.003, "node", **hardware)]
        one = scenario(
            job={"work": "90d", "step": "10s", "replica_nodes": 2}, hardware=[{"nodes": 16, "faults": faults}]
        )
        found = simulate(one, policy(spares=16, checkpoint_every="5h"), 3)
        return found.lost_work / sum(found.incidents.values())

    assert lost(nodes=2) < 10  # at most the step under way
    assert lost(nodes=15) > 600  # both nodes of a replica, of every replica


def test_buddy_copies_keep_the_state_of_a_single_replica() -> None:
    alone = scenario(job={"work": "5d", "step": "10s", "replica_nodes": 16})
    without, copied = (
        simulate(alone, policy(spares=2, checkpoint_every="6h", buddy_every=every), 2) for every in (0, 10)
    )
    assert without.lost_work > 20 * copied.lost_work > 0


# --- what happens --------------------------------------------------------------------------------------------------


def first(changes: Iterator[CapacityChange], count: int) -> list[tuple[float, int | None, int]]:
    return [(each.at, each.most, each.away) for each, _ in zip(changes, range(count), strict=False)]


def test_capacity_is_what_the_rule_says() -> None:
    assert first(capacity(CapacityTable(), 8, 0), 5) == [(0.0, None, 0)]
    trace = CapacityTable("trace", period=Span(10.0), points=[(Span(0.0), 8), (Span(4.0), 5)])
    assert first(capacity(trace, 8, 0), 4) == [(0.0, 8, 0), (4.0, 5, 0), (10.0, 8, 0), (14.0, 5, 0)]
    once = CapacityTable("trace", period=Span(1.0), points=[(Span(2.0), 8), (Span(4.0), 5)])
    assert first(capacity(once, 8, 0), 9) == [(0.0, None, 0), (2.0, 8, 0), (4.0, 5, 0)]
    wave = first(capacity(CapacityTable("wave", least=2, period=Span(24.0)), 8, 0), 25)
    assert wave[0] == (0.0, 8, 0)
    assert [at for at, most, _ in wave if most == 2] == [10.0, 34.0]
    assert [at for at, most, _ in wave if most == 8] == [0.0, 22.0, 46.0]


def test_so_many_spot_nodes_are_away_as_their_rates_say() -> None:
    table = CapacityTable("spot", reclaims_per_node_hour=0.1, away=Span(2 * HOUR))
    at, away, area = 0.0, 0, 0.0
    for change in capacity(table, 100, 1):
        area += away * (change.at - at)
        at, away = change.at, change.away
        if at > 2000 * HOUR:
            break
    # Each node is there 10 h at the mean, and away for 2.
    assert area / at == pytest.approx(100 * 2 / 12, rel=0.03)


def test_faults_come_at_their_rate_in_order_and_a_further_kind_changes_no_other() -> None:
    one = scenario(hardware=[{"nodes": 16, "faults": [fault("a", 0.01)]}])
    two = scenario(hardware=[{"nodes": 16, "faults": [fault("b", 0.5), fault("a", 0.01)]}])
    alone = [each for each, _ in zip(faults(one, 7), range(500), strict=False)]
    assert 500 / (alone[-1].at / HOUR) == pytest.approx(0.16, rel=0.1)
    among = []
    for each in faults(two, 7):
        among += [each] if each.kind == "a" else []
        if len(among) == 500:
            break
    assert among == alone
    assert [each.at for each in alone] == sorted(each.at for each in alone)


# --- the coordinator decides ---------------------------------------------------------------------------------------


def situation(trouble: Trouble, *words: str) -> Situation:
    return Situation(trouble, "spare" in words, "standby" in words, "elastic" in words, "lost" not in words)


@pytest.mark.parametrize(
    ("what", "decided"),
    [
        (situation(Trouble.WORKER), Remedy("fork")),
        (situation(Trouble.WORKER, "standby"), Remedy("standby")),
        (situation(Trouble.HANG, "standby"), Remedy("standby")),
        (situation(Trouble.NODE), Remedy("node", waits=True)),
        (situation(Trouble.NODE, "spare"), Remedy("node")),
        (situation(Trouble.NODE, "elastic"), Remedy("shrink", resizes=True)),
        (situation(Trouble.NODE, "elastic", "spare"), Remedy("node")),
        (situation(Trouble.NODE, "spare", "lost"), Remedy("restart", from_checkpoint=True)),
        (situation(Trouble.JOB), Remedy("restart", from_checkpoint=True)),
        (situation(Trouble.DRAIN, "elastic"), Remedy("shrink", resizes=True)),
        (situation(Trouble.GROW, "elastic"), Remedy("grow", resizes=True)),
    ],
)
def test_what_regrow_does_is_asked_of_its_coordinator(what: Situation, decided: Remedy) -> None:
    assert precedent(what) == decided


def test_the_coordinator_has_an_answer_to_every_situation() -> None:
    for trouble in Trouble:
        for spare, standby, elastic, survives in product((False, True), repeat=4):
            assert precedent(Situation(trouble, spare, standby, elastic, survives)).rung


# --- costs ---------------------------------------------------------------------------------------------------------


def test_costs_lie_on_lines_between_what_was_measured_and_never_fall_beyond() -> None:
    rows = [
        CostRow("a", ranks=ranks, total=Span(total)) for ranks, total in ((16, 310.0), (256, 292.0), (2304, 1350.0))
    ]
    table = CostTable("a", rows)
    assert [table.of("any", ranks).total for ranks in (2, 16, 64, 256, 2304)] == pytest.approx(
        [310, 310, 301, 292, 1350]
    )
    doublings = math.log2(2304 / 256)
    assert table.of("any", 4608).total == pytest.approx(1350 + (1350 - 292) / doublings)
    falling = CostTable("b", [CostRow("b", ranks=4, total=Span(9.0)), CostRow("b", ranks=8, total=Span(5.0))])
    assert falling.of("any", 1_000_000).total == 5.0
    assert falling.of("start", 8) == StageTimes()


def test_a_rung_without_costs_is_named_with_its_cure() -> None:
    with pytest.raises(UsageError, match=r'no row for the rung "fork".*add \[\[costs\]\] of = "regrow", rung = "fork"'):
        simulate_all(scenario(costs=[{"of": "regrow", "rung": "node", "total": 3}]), 1)


def test_runs_are_measured_and_their_file_is_one_that_a_scenario_takes() -> None:
    def commit(step: int, at: float, generation: int) -> list[StepCommitted]:
        return [
            StepCommitted(at, StepNo(step), Rank(rank), WorkerId(f"w{rank}"), Generation(generation), 0.8, {})
            for rank in (0, 1)
        ]

    incident = IncidentClosed(
        at=16.0,
        incident=1,
        generation=Generation(2),
        step=StepNo(5),
        kind="exit",
        ranks=[Rank(1)],
        cause="it died",
        rung="standby",
        faults=1,
        detect=0.5,
        abort=1.0,
        regroup=2.0,
        hydrate=0.5,
        redo=2.0,
        total=6.0,
        steps_lost=0,
        hydrated_bytes=9,
        opened_at=10.5,
        fault_at=10.0,
    )
    records = [each for step in range(5) for each in commit(step, 5.0 + step, 1)]
    records += [each for step in range(5, 9) for each in commit(step, 11.0 + step, 2)]
    run = measured([*records, incident], "a run")
    assert (run.ranks, run.step) == (2, 1.0)
    assert run.stages == {"standby": [StageTimes(0.5, 1.0, 2.0, 0.5, 1.0)]}
    text = "\n".join(calibration_lines([("a run", run), ("another", run)], of="mine"))
    [standby] = decode_costs(tomllib.loads(text), place="there")
    assert (standby.rung, standby.ranks, standby.regroup, standby.source) == ("standby", 2, 2.0, "2 incidents")


# --- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"job": {"work": "5 fortnights", "step": 1}}, 'job.work = "5 fortnights": give a time'),
        ({"job": {"step": 1}}, "job.work is missing: give a time"),
        ({"job": {"work": 0, "step": 1}}, "job.work = 0 s is no time at all: give more than 0 seconds"),
        ({"job": {"work": 1, "step": 1, "replica_nodes": 3}}, "does not divide 16 nodes"),
        ({"hardware": [{"nodes": 0}]}, r"hardware\[1\].nodes = 0: give a whole number from 1"),
        ({"hardware": {"nodes": 4}}, r"it must be a list of tables, so write \[\[hardware\]\]"),
        ({"hardware": [{"nods": 4, "nodes": 4}]}, r"hardware\[1\].nods is not a key: did you mean nodes\?"),
        (
            {"policy": [{"name": "x", "recovers": "magic"}]},
            'policy.1..recovers = "magic": give one of "checkpoint-restart"',
        ),
        ({"policy": [{"name": "x", "recovers": "regrow", "costs": "y"}]}, 'there are no costs of "y": add'),
        ({"policy": [{"name": "x", "recovers": "regrow"}] * 2}, 'two policies are called "x"'),
        ({"policy": []}, "there is no policy to simulate: add"),
        ({"policy": [{"name": "x", "recovers": "regrow", "checkpoint_stall": 3}]}, "without checkpoint_every"),
        ({"capacity": {"kind": "trace"}}, "has no points: give points"),
        ({"capacity": {"kind": "trace", "points": [[5, 2], [1, 2]]}}, "not in order of time: sort them"),
        ({"capacity": {"points": [["now", 2]]}}, "give a list, each of"),
        ({"sizes": [2, 3]}, "does not divide 3 nodes"),
        ({"seeds": True}, "seeds = true: give a whole number from 1"),
    ],
)
def test_what_is_wrong_in_a_scenario_is_told_with_its_field_and_a_cure(tables: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        scenario(**tables)


def test_all_errors_are_told_at_once() -> None:
    with pytest.raises(UsageError, match="(?s)here has 2 errors:.*job.step.*seeds"):
        scenario(job={"work": 1}, seeds=0)


def test_a_command_prints_writes_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "costs.toml").write_text('[[costs]]\nof = "regrow"\ntotal = "20s"\n')
    (tmp_path / "one.toml").write_text(
        'title = "One job"\ncosts_from = ["costs.toml"]\nassumptions = ["all of it"]\n'
        '[job]\nwork = "30d"\nstep = "10s"\n[[hardware]]\nnodes = 50\nprice = 2\n'
        '[[hardware.faults]]\nkind = "process"\nper_node_hour = 0.001\n'
        '[[policy]]\nname = "ours"\nrecovers = "regrow"\n'
    )
    words = [
        "sim",
        "run",
        str(tmp_path / "one.toml"),
        "--seeds=3",
        f"--json={tmp_path}/a.json",
        f"--plot={tmp_path}/a.svg",
    ]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "One job" in told and "ours" in told and "± 95 %" in told and "- all of it" in told
    [row] = json.loads((tmp_path / "a.json").read_bytes())["policies"]
    assert 0.99 < row["goodput"]["mean"] < 1 and row["seeds"] == 3 and row["incidents"]["mean"] > 10
    assert (tmp_path / "a.svg").read_bytes().startswith(b"<?xml")
    assert main(["sim", "run", str(tmp_path / "none.toml")]) != 0
    assert "there is no file" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_scenario_of_the_repository_is_right(path: Path) -> None:
    assert decode_scenario(tomllib.loads(path.read_text()), place=path.name).assumptions


def test_the_published_table_has_its_shape() -> None:
    path = SCENARIOS / "published.toml"
    found = simulate_all(decode_scenario(tomllib.loads(path.read_text()), place=path.name), 10)
    rows = {
        (each.policy.partition(",")[0], each.ranks): each
        for each in found.policies
        if "nothing warm" not in each.policy
    }
    for ranks in (16, 256, 2304):
        restart, without, ours = (
            rows[name, ranks] for name in ("restart from checkpoints", "without checkpoints", "regrow")
        )
        assert restart.goodput.mean < without.goodput.mean <= ours.goodput.mean + 1e-4
        assert without.goodput.mean > 0.95
    assert rows["restart from checkpoints", 2304].goodput.mean < 0.92


def test_the_interval_is_students() -> None:
    found = estimate([1.0, 2.0, 3.0, 4.0])
    assert found.mean == 2.5
    assert found.within == pytest.approx(3.182 * 1.29099 / 2, rel=1e-4)
    assert math.isinf(estimate([1.0]).within)
