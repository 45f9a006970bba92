"""Outcomes as a table and as figures."""

from collections.abc import Sequence

from rich.table import Table

from newcomer_faults.judging import Outcome


def table(outcomes: Sequence[Outcome]) -> Table:
    """A row for each script."""
    drawn = Table(title="faults that a newcomer has, and honest scripts")
    for column in ("script", "fault", "found", "step", "named", "differ"):
        drawn.add_column(column)
    drawn.add_column("message", overflow="fold")
    for each in outcomes:
        found = each.found or ("no" if each.ran else "did not run")
        step = "" if each.step is None else str(each.step)
        named = "" if each.case.kind == "honest" or not each.found else "yes" if each.named else "no"
        differs = "" if each.differs is None else str(each.differs)
        drawn.add_row(each.case.name, each.case.fault or "(honest)", found, step, named, differs, each.message)
    return drawn


def figures(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Numbers of the outcomes, by kind."""
    faults = [each for each in outcomes if each.case.kind == "fault"]
    honest = [each for each in outcomes if each.case.kind == "honest"]
    return {
        "faults": len(faults),
        "no_faults": sum(each.differs == 0 for each in faults),
        "refused": sum(each.found == "refused" for each in faults),
        "refuted": sum(each.found == "refuted" for each in faults),
        "not_found": sum(not each.found for each in faults),
        "not_proven": sum(not each.found and bool(each.message) for each in faults),
        "named": sum(each.named for each in faults),
        "honest": len(honest),
        "false_alarms": sum(bool(each.found) for each in honest),
    }
