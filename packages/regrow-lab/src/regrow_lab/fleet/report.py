"""A simulation as a table for people."""

from collections.abc import Iterator, Sequence

from regrow.core.ids import Seconds
from regrow.observe.goodput import Spent
from regrow_lab.fleet.summary import Estimate, ForecastCheck, PolicySummary, SimulationReport

_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86400.0
_SHOWN = tuple(each for each in Spent if each is not Spent.PRODUCTIVE)


def simulation_lines(report: SimulationReport) -> Iterator[str]:
    """Lines of the whole report."""
    if report.title:
        yield report.title
    yield f"{span(report.work)} of undisturbed training; means over {report.policies[0].seeds} seeds ± 95 % intervals"
    yield ""
    yield from _table(report)
    yield ""
    yield "use of the rank-seconds, in %, spare nodes included"
    yield from _shares(report.policies)
    unfinished = [each for each in report.policies if each.unfinished]
    for each in unfinished:
        yield f"{each.policy}, {each.ranks:,} ranks: not finished within the limit in {each.unfinished} of {each.seeds}"
    if report.published:
        yield ""
        yield "compared with published figures"
        for compared in report.published:
            yield from _compared(compared)
    if report.assumptions:
        yield ""
        yield "assumptions:"
        yield from (f"- {each}" for each in report.assumptions)


def _compared(row: ForecastCheck) -> Iterator[str]:
    said, forecast = (_figure(row.figure, value) for value in (row.published, row.forecast))
    yield f"{row.policy}: {said} published, {forecast} here ({100 * row.off:+.1f} %); {row.source}"
    if row.missing:
        yield f"  cannot be forecast: nobody has published {row.missing}"


def _figure(figure: str, value: float) -> str:
    if figure == "wall":
        return span(value)
    return f"goodput {100 * value:.1f} %" if figure == "goodput" else f"{value:,.0f} incidents"


def _table(report: SimulationReport) -> Iterator[str]:
    wide = _width(report.policies)
    money = f"{'money':>30}" if report.priced else ""
    yield (
        f"{'policy':<{wide}}{'ranks':>9}{'incidents':>11}{'to mend one':>13}{'work lost':>11}{'goodput':>18}"
        f"{'finished in':>20}{money}"
    )
    ranks = None
    for each in report.policies:
        if ranks not in (None, each.ranks):
            yield ""
        ranks = each.ranks
        priced = f"{_pm(each.money, '{:,.0f}'):>30}" if report.priced else ""
        yield (
            f"{each.policy:<{wide}}{each.ranks:>9,}{each.incidents.mean:>11,.1f}{span(each.mending.mean):>13}"
            f"{span(each.lost_work.mean):>11}{_percent(each.goodput):>18}{_times(each.wall):>20}{priced}"
        )


def _shares(policies: Sequence[PolicySummary]) -> Iterator[str]:
    wide = _width(policies)
    shown = [name for name in _SHOWN if any(each.shares[name] > 0.00005 for each in policies)]
    names = [*([Spent.PRODUCTIVE] if policies else []), *shown]
    yield f"{'policy':<{wide}}{'ranks':>9}" + "".join(f"{name.value:>{_column(name)}}" for name in names)
    for each in policies:
        cells = "".join(f"{100 * each.shares[name]:>{_column(name)}.2f}" for name in names)
        yield f"{each.policy:<{wide}}{each.ranks:>9,}{cells}"


def _column(name: Spent) -> int:
    return max(9, len(name.value) + 2)


def _width(policies: Sequence[PolicySummary]) -> int:
    return max(10, *(len(each.policy) + 2 for each in policies))


def _pm(value: Estimate, form: str) -> str:
    return f"{form.format(value.mean)} ± {form.format(value.within)}"


def _percent(value: Estimate) -> str:
    return f"{100 * value.mean:.2f} ± {100 * value.within:.2f} %"


def _times(value: Estimate) -> str:
    size, unit = _unit(value.mean)
    return f"{value.mean / size:.3g} ± {value.within / size:.2g} {unit}"


def span(value: Seconds) -> str:
    """A time for people, in a fitting unit."""
    size, unit = _unit(value)
    return f"{value / size:.3g} {unit}"


def _unit(value: Seconds) -> tuple[float, str]:
    for most, size, unit in ((90.0, 1.0, "s"), (90 * _MINUTE, _MINUTE, "min"), (2 * _DAY, _HOUR, "h")):
        if value < most:
            return size, unit
    return _DAY, "d"
