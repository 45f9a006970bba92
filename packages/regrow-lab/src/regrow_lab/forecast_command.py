"""`regrow plan`: forecast of the cost of faults, as a table or as JSON."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from regrow.core.errors import UsageError
from regrow.core.flags import PERCENT, TIME
from regrow_lab.forecast import HOUR, MONTH, YEAR, Fleet, FromCheckpoints, InProcess, RecoveryModel, young

_DAY = 24 * HOUR
_OPTIONS: tuple[Callable[[Callable[..., Any]], Callable[..., Any]], ...] = (
    click.option("--nodes", type=click.IntRange(min=1), required=True, metavar="N", help="Nodes of the job."),
    click.option("--node-failures", type=PERCENT, metavar="PERCENT", help="Share of nodes that fail per hour: 0.02%."),
    click.option("--node-mtbf", type=TIME, metavar="TIME", help="Instead: mean time between a node's failures."),
    click.option("--faults-a-day", type=click.FloatRange(min=0), metavar="X", help="Instead: faults of the whole job."),
    click.option("--price", type=click.FloatRange(min=0), default=0.0, metavar="$", help="Of a node per hour.  [0]"),
    click.option(
        "--checkpoint-every", type=TIME, default="20min", metavar="TIME", help="Time between checkpoints.  [20min]"
    ),
    click.option("--checkpoint-takes", type=TIME, default="0s", metavar="TIME", help="Pause for a checkpoint.  [0s]"),
    click.option(
        "--restart-takes", type=TIME, default="10min", metavar="TIME", help="From a fault until training.  [10min]"
    ),
    click.option(
        "--in-process", type=TIME, default="1min", metavar="TIME", help="Cost of a fault under regrow.  [1min]"
    ),
    click.option("--repair", type=TIME, default="4h", metavar="TIME", help="Time until a lost node is back.  [4h]"),
    click.option(
        "--sure", type=PERCENT, default="99.9%", metavar="PERCENT", help="Chance that spares suffice.  [99.9%]"
    ),
    click.option(
        "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures here."
    ),
)


class Side(msgspec.Struct, frozen=True):
    """One way to recover, and the cost of faults with it. Times in seconds, money in the unit of the price."""

    name: str
    lost_a_fault: float
    cost_a_fault: float
    lost_a_month: float
    cost_a_month: float
    cost_a_year: float
    goodput: float


class Forecast(msgspec.Struct, frozen=True):
    """The whole forecast. `between_faults` in seconds; `chance_an_hour`: probability of at least one fault."""

    between_faults: float
    chance_an_hour: float
    faults_a_day: float
    sides: list[Side]
    young: float
    daly: float
    spares: int


def _with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command("plan")
@_with_options
def plan(nodes: int, price: float, json_path: Path | None, **options: Any) -> None:
    """Estimate the cost of faults before a job runs, and the number of spares that it needs.

    Nodes are assumed to fail independently of one another. Give the cost of a fault under regrow by --in-process: the
    default is cautious; `benchmarks/recovery.py` measures it.
    """
    fleet = Fleet(nodes, _faults_an_hour(nodes, options), price)
    found = forecast(fleet, **{name: options[name] for name in _NAMES})
    for line in lines(fleet, found, options["repair"], options["sure"]):
        click.echo(line)
    if json_path is not None:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")


_NAMES = ("checkpoint_every", "checkpoint_takes", "restart_takes", "in_process", "repair", "sure")


def forecast(
    fleet: Fleet,
    *,
    checkpoint_every: float,
    checkpoint_takes: float,
    restart_takes: float,
    in_process: float,
    repair: float,
    sure: float,
) -> Forecast:
    """Compute the forecast; all times in seconds. Raises `UsageError` for values that are not valid."""
    if not checkpoint_every:
        raise UsageError("--checkpoint-every 0s is no time at all", hint="give more than 0 seconds")
    if sure >= 1:
        raise UsageError("--sure 100% needs infinitely many spares", hint="give for example 99.9%")
    given = FromCheckpoints(checkpoint_every, checkpoint_takes, restart_takes)
    sides = [_side(f"restart, checkpoints every {_span(given.every)}", given, fleet)]
    best = given.best(fleet)
    if checkpoint_takes and math.isfinite(best.every):
        sides.append(_side(f"restart, every {_span(best.every)} (best)", best, fleet))
    sides.append(_side("regrow, in process", InProcess(in_process), fleet))
    return Forecast(
        fleet.between,
        fleet.chance(HOUR),
        fleet.faults(_DAY),
        sides,
        young(checkpoint_takes, fleet.between),
        best.every,
        fleet.spares(repair, sure),
    )


def _side(name: str, recovery: RecoveryModel, fleet: Fleet) -> Side:
    lost = recovery.lost
    a_month, a_year = lost * fleet.faults(MONTH), lost * fleet.faults(YEAR)
    goodput = recovery.goodput(fleet)
    return Side(name, lost, fleet.cost(lost), a_month, fleet.cost(a_month), fleet.cost(a_year), goodput)


def _faults_an_hour(nodes: int, options: dict[str, Any]) -> float:
    given = [name for name in ("node_failures", "node_mtbf", "faults_a_day") if options[name] is not None]
    if len(given) != 1:
        raise UsageError(
            "how often do nodes fail?", hint="give one of --node-failures 0.02%, --node-mtbf 200d, --faults-a-day 1"
        )
    if given == ["node_mtbf"]:
        if not options["node_mtbf"]:
            raise UsageError("--node-mtbf 0s is no time at all", hint="give more than 0 seconds")
        return float(nodes * HOUR / options["node_mtbf"])
    return float(nodes * options["node_failures"] if given == ["node_failures"] else options["faults_a_day"] / 24)


def lines(fleet: Fleet, found: Forecast, repair: float, sure: float) -> list[str]:
    """The forecast for people."""
    if not fleet.faults_an_hour:
        return [f"{fleet.nodes:,} nodes that never fail"]
    reported = [
        f"{fleet.nodes:,} nodes: a fault every {_span(found.between_faults)}, {found.faults_a_day:.3g} a day; "
        f"in an hour with a chance of {100 * found.chance_an_hour:.3g} %",
        "",
        f"{'':<38}{'a fault':>11}{'costs':>12}{'a month':>12}{'costs':>14}{'a year':>15}{'goodput':>10}",
    ]
    for side in found.sides:
        money = (f"{side.cost_a_fault:,.0f}", f"{side.cost_a_month:,.0f}", f"{side.cost_a_year:,.0f}")
        fault, month, year = money if fleet.price else ("–",) * 3
        reported.append(
            f"{side.name:<38}{_span(side.lost_a_fault):>11}{fault:>12}{_span(side.lost_a_month):>12}{month:>14}{year:>15}"
            f"{100 * side.goodput:>8.2f} %"
        )
    reported += [
        "",
        f"spares: {found.spares}, enough in {100 * sure:g} % of the time if a node is away for {_span(repair)}",
    ]
    if found.young:
        reported.append(
            f"checkpoints are best written every {_span(found.daly)} (Daly; {_span(found.young)} by Young's rule)"
        )
    return reported


def _span(value: float) -> str:
    """A time for people, in a fitting unit: `4 s`, `20 min`, `5.0 h`, `12.3 d`."""
    for unit, size, most in (("min", 60.0, 5400.0), ("h", HOUR, 2 * _DAY), ("d", _DAY, math.inf)):
        if value < 90:
            return f"{value:.3g} s"
        if value < most:
            return f"{value / size:.3g} {unit}"
    return "ever"
