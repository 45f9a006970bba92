"""Costs from real runs: durations of incidents by rung, as a file that a scenario can name. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from regrow.core.errors import UsageError
from regrow.core.ids import Seconds
from regrow.core.records import IncidentClosed, Record
from regrow.observe.goodput import Account, Spent, account
from regrow.observe.ledger import Ledger
from regrow_lab.fleet.costs import START, StageTimes

_STAGES = ("detect", "abort", "regroup", "hydrate", "redo")


@dataclass(frozen=True)
class MeasuredRun:
    """Measurements of one run.

    Attributes:
        ranks: size of its world.
        step: median duration of a step, from one commit of the world to the next.
        start: time to its first step.
        overhead: part of the undisturbed time outside of steps.
        goodput: goodput of its ledger.
        wall: time from its start to its end.
        stages: stages of its incidents, by rung; `redo` does not contain the step that runs again.
    """

    ranks: int
    step: Seconds
    start: Seconds
    overhead: float
    goodput: float
    wall: Seconds
    stages: dict[str, list[StageTimes]] = field(default_factory=dict)


def measured(records: Sequence[Record], name: str) -> MeasuredRun:
    """Measure a run. Raises `UsageError` if it has too few steps."""
    ledger, spent = Ledger(records), account(records)
    step = ledger.step_median
    if step is None or not ledger.world:
        raise UsageError(f"{name} has committed too few steps to be measured", hint="name a run with more steps")
    stages: dict[str, list[StageTimes]] = {}
    for each in ledger.incidents:
        stages.setdefault(each.rung, []).append(_stages(each, step))
    ranks = ledger.world
    start = (spent.spent[Spent.FIRST_STEP] + spent.spent[Spent.CAPACITY]) / ranks if not _resized(ledger) else 0.0
    return MeasuredRun(ranks, step, start, _overhead(spent), spent.goodput, spent.wall, stages)


def _resized(ledger: Ledger) -> bool:
    """True if the world changed its size, so that places were empty for other reasons than the start."""
    return any(each.before != each.after for each in ledger.incidents)


def _stages(each: IncidentClosed, step: Seconds) -> StageTimes:
    return StageTimes(each.detect, each.abort, each.regroup, each.hydrate, max(0.0, each.redo - step))


def _overhead(found: Account) -> float:
    """Part of the undisturbed time between the steps."""
    between = found.spent[Spent.IDLE] + found.spent[Spent.DATA_WAIT] + found.spent[Spent.CHECKPOINT]
    undisturbed = between + found.spent[Spent.PRODUCTIVE]
    return between / undisturbed if undisturbed else 0.0


def calibration_lines(runs: Sequence[tuple[str, MeasuredRun]], *, of: str) -> Iterable[str]:
    """Lines of the file, in TOML: a row for each rung and size, with means over incidents.

    Args:
        runs: the runs, with their names.
        of: the name of the set of costs.
    """
    yield "# Measured by regrow sim calibrate: means over incidents. Times in seconds."
    yield f"# Runs: {', '.join(name for name, _ in runs)}"
    yield ""
    yield "[measured]"
    yield f"step = {fmean(run.step for _, run in runs):.6g}"
    yield f"overhead = {fmean(run.overhead for _, run in runs):.4g}"
    for ranks in sorted({run.ranks for _, run in runs}):
        same = [run for _, run in runs if run.ranks == ranks]
        starts = [run.start for run in same if run.start]
        if starts:
            yield from _row(of, START, ranks, {"total": fmean(starts)}, f"{len(starts)} runs")
        for rung in sorted({rung for run in same for rung in run.stages}):
            found = [stages for run in same for stages in run.stages.get(rung, [])]
            means = {name: fmean(getattr(stages, name) for stages in found) for name in _STAGES}
            yield from _row(of, rung, ranks, means, f"{len(found)} incidents")


def _row(of: str, rung: str, ranks: int, values: dict[str, Seconds], source: str) -> Iterable[str]:
    yield ""
    yield "[[costs]]"
    yield f'of = "{of}"'
    yield f'rung = "{rung}"'
    yield f"ranks = {ranks}"
    for name, value in values.items():
        yield f"{name} = {value:.6f}"
    yield f'source = "{source}"'
