"""Reports an account of rank-seconds, as a table and as figures for programs. Pure."""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from regrow.core.ids import Seconds
from regrow.core.records import Record
from regrow.observe.goodput import IncidentCost, Spent, account
from regrow.observe.ledger import Ledger
from regrow.observe.story import count, seconds

_HOUR: Seconds = 3600.0
_UNKNOWN = "not known"


class Lost(msgspec.Struct, frozen=True):
    """Cost of one incident, or of all incidents with one node or cause. `cost`: in the unit of the price."""

    name: str
    incidents: int
    steps_lost: int
    rank_seconds: Seconds
    cost: float
    stages: dict[str, Seconds]
    """Rank-seconds by their use."""


class GoodputReport(msgspec.Struct, frozen=True):
    """All figures of a run. `spent` adds up to `rank_seconds`.

    `goodput`: share of all rank-seconds, including start and end of the job. `goodput_of_steps`: share of the time from
    the first step to the last commit.
    """

    job: str
    ranks: int
    nodes: int
    wall: Seconds
    rank_seconds: Seconds
    goodput: float
    goodput_of_steps: float
    price: float
    cost: float
    spent: dict[str, Seconds]
    incidents: list[Lost]
    by_node: list[Lost]
    by_cause: list[Lost]
    steps: int
    steps_lost: int
    steps_redone: int


def report(records: Sequence[Record], *, price: float = 0.0) -> GoodputReport:
    """Make the report of a run.

    Args:
        records: all records, on one clock.
        price: price of a node per hour; divided among the node's ranks.
    """
    ledger, found = Ledger(records), account(records)
    nodes = ledger.started.nodes if ledger.started is not None else 1
    rate = price * nodes / max(1, ledger.world) / _HOUR
    return GoodputReport(
        job=ledger.started.job if ledger.started is not None else "",
        ranks=ledger.world,
        nodes=nodes,
        wall=found.wall,
        rank_seconds=found.total,
        goodput=found.goodput,
        goodput_of_steps=ledger.goodput,
        price=price,
        cost=found.total * rate,
        spent={name.value: value for name, value in found.spent.items()},
        incidents=[_lost(str(each.number), [each], rate) for each in found.incidents],
        by_node=_grouped(found.incidents, lambda each: " ".join(each.nodes) or _UNKNOWN, rate),
        by_cause=_grouped(found.incidents, lambda each: each.kind, rate),
        steps=len(ledger.commits),
        steps_lost=found.steps_lost,
        steps_redone=ledger.steps_redone,
    )


def _grouped(incidents: Iterable[IncidentCost], key: Callable[[IncidentCost], str], rate: float) -> list[Lost]:
    """Costs of faults grouped by `key`, the most expensive first. Changes of the world are left out."""
    groups: dict[str, list[IncidentCost]] = {}
    for each in incidents:
        if not each.planned:
            groups.setdefault(key(each), []).append(each)
    return sorted((_lost(name, each, rate) for name, each in groups.items()), key=lambda lost: -lost.rank_seconds)


def _lost(name: str, incidents: Sequence[IncidentCost], rate: float) -> Lost:
    stages: dict[str, Seconds] = {}
    for each in incidents:
        for spent, value in each.spent.items():
            stages[spent.value] = stages.get(spent.value, 0.0) + value
    total = sum(stages.values())
    return Lost(name, len(incidents), sum(each.steps_lost for each in incidents), total, total * rate, stages)


def report_lines(found: GoodputReport, records: Sequence[Record]) -> list[str]:
    """The report as lines of text."""
    priced = bool(found.price)
    nodes = f" on {count(found.nodes, 'node')}" if found.nodes > 1 else ""
    lines = [
        f"{found.job or 'a job'}: {count(found.ranks, 'rank')}{nodes}, {seconds(found.wall)}, "
        f"{count(found.steps, 'step')}" + (f", {found.cost:,.2f} at {found.price:g} a node-hour" if priced else ""),
        f"goodput {found.goodput_of_steps:.1%} from the first step on; the table counts the start and the end too",
        "",
        f"{'':<24}{'rank-seconds':>14}{'share':>9}" + (f"{'cost':>14}" if priced else ""),
    ]
    for name in Spent:
        value = found.spent[name.value]
        share = value / found.rank_seconds if found.rank_seconds else 0.0
        lines.append(f"{name.value:<24}{value:>14,.1f}{share:>9.1%}" + _money(share * found.cost, priced))
    lines.append(f"{'total':<24}{found.rank_seconds:>14,.1f}{1:>9.1%}" + _money(found.cost, priced))
    if found.incidents:
        words = {str(each.number): each for each in account(records).incidents}
        lines += ["", f"{count(found.steps_lost, 'committed step')} lost, {found.steps_redone:,} computed again", ""]
        lines += _table("incident or change", found.incidents, priced, lambda lost: _words(words[lost.name]))
    if found.by_cause:
        lines += ["", *_table("cause", found.by_cause, priced)]
        lines += ["", *_table("node", found.by_node, priced)]
    return lines


def _table(head: str, rows: Sequence[Lost], priced: bool, words: Callable[[Lost], str] | None = None) -> list[str]:
    """A table with one line per row. `words` describes the incident of a row; without it, incidents are counted."""
    counted = "" if words else f"{'incidents':>10}"
    title = f"{head:<24}{counted}{'lost':>6}{'rank-seconds':>14}" + (f"{'cost':>14}" if priced else "")
    lines = [title]
    for row in rows:
        number, what = ("", f"  {words(row)}") if words else (f"{row.incidents:>10,}", "")
        lines.append(
            f"{row.name:<24}{number}{row.steps_lost:>6,}{row.rank_seconds:>14,.1f}{_money(row.cost, priced)}{what}"
        )
    return lines


def _words(incident: IncidentCost) -> str:
    place = f" on {' '.join(incident.nodes)}" if incident.nodes else ""
    how = f", mended by {incident.rung}" if incident.rung and not incident.planned else ""
    return f"step {incident.step}: {incident.cause}{place}{how or ('' if incident.planned else ', not mended')}"


def _money(value: float, priced: bool) -> str:
    return f"{value:>14,.2f}" if priced else ""
