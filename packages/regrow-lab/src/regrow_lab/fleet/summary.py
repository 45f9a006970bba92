"""Summary of many simulated jobs: means over seeds, with intervals."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import Final

import msgspec

from regrow.core.ids import Seconds
from regrow.observe.goodput import Spent
from regrow_lab.fleet.accounting import JobOutcome
from regrow_lab.fleet.scenario import FleetScenario, PolicyTable
from regrow_lab.fleet.simulation import simulate

_T_95: Final = (
    12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_NORMAL_95 = 1.96


class Estimate(msgspec.Struct, frozen=True):
    """A mean over seeds, and half the width of its 95 % confidence interval (Student's t)."""

    mean: float
    within: float


class PolicySummary(msgspec.Struct, frozen=True):
    """One policy in a world of one size. Times in seconds, money in the unit of the price.

    `mending`: mean time of an incident from the fault to training again, without waits for nodes. `lost_work`: of an
    incident. `shares`: of all rank-seconds, by their use. `unfinished`: seeds whose work was not done within the limit.
    """

    policy: str
    nodes: int
    ranks: int
    seeds: int
    goodput: Estimate
    wall: Estimate
    money: Estimate
    incidents: Estimate
    mending: Estimate
    lost_work: Estimate
    shares: dict[str, float]
    kinds: dict[str, float]
    unfinished: int


class ForecastCheck(msgspec.Struct, frozen=True):
    """A published result and its forecast. `off`: the forecast divided by the result, minus 1."""

    policy: str
    figure: str
    published: float
    forecast: float
    off: float
    source: str
    missing: str


class SimulationReport(msgspec.Struct, frozen=True):
    """Results of all simulations."""

    title: str
    work: Seconds
    priced: bool
    assumptions: list[str]
    policies: list[PolicySummary]
    published: list[ForecastCheck] = []


def simulate_all(scenario: FleetScenario, seeds: int) -> SimulationReport:
    """Simulate every policy in every size, for seeds from 0 on. Raises `UsageError` if costs are missing."""
    found = []
    for sized in scenario.in_sizes():
        for policy in scenario.policy:
            found.append(summary(sized, policy, [simulate(sized, policy, seed) for seed in range(seeds)]))
    compared = compare(scenario, found)
    title, work, priced = scenario.title, float(scenario.job.work), scenario.price > 0
    return SimulationReport(title, work, priced, scenario.assumptions, found, compared)


def compare(scenario: FleetScenario, found: Sequence[PolicySummary]) -> list[ForecastCheck]:
    """Published results, each compared with its simulation."""
    rows = {each.policy: each for each in found}
    compared = []
    for each in scenario.published:
        row, value = rows[each.policy], float(each.value)
        forecast = {"wall": row.wall, "goodput": row.goodput, "incidents": row.incidents}[each.figure].mean
        off = forecast / value - 1.0
        compared.append(ForecastCheck(each.policy, each.figure, value, forecast, off, each.source, each.missing))
    return compared


def summary(scenario: FleetScenario, policy: PolicyTable, outcomes: Sequence[JobOutcome]) -> PolicySummary:
    """Summarize the jobs of one policy."""
    kinds = sorted({kind for each in outcomes for kind in each.incidents})
    return PolicySummary(
        policy=policy.name,
        nodes=scenario.nodes,
        ranks=scenario.ranks,
        seeds=len(outcomes),
        goodput=estimate([each.goodput for each in outcomes]),
        wall=estimate([each.wall for each in outcomes]),
        money=estimate([each.money for each in outcomes]),
        incidents=estimate([sum(each.incidents.values()) for each in outcomes]),
        mending=_an_incident(outcomes, lambda each: each.mending),
        lost_work=_an_incident(outcomes, lambda each: each.lost_work),
        shares={
            name.value: fmean(each.spent[name] / (each.rank_seconds or 1.0) for each in outcomes) for name in Spent
        },
        kinds={kind: fmean(each.incidents.get(kind, 0) for each in outcomes) for kind in kinds},
        unfinished=sum(not each.finished for each in outcomes),
    )


def _an_incident(outcomes: Sequence[JobOutcome], value: Callable[[JobOutcome], float]) -> Estimate:
    """Mean over seeds of a value for one incident; seeds without incidents are left out."""
    counts = [(value(each), sum(each.incidents.values())) for each in outcomes]
    return estimate([total / number for total, number in counts if number] or [0.0])


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and half-width of the interval, which is infinite for a single value."""
    if len(values) < 2:
        return Estimate(fmean(values), math.inf)
    freedom = len(values) - 1
    student = _T_95[freedom - 1] if freedom <= len(_T_95) else _NORMAL_95
    return Estimate(fmean(values), student * stdev(values) / math.sqrt(len(values)))
