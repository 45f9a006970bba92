"""Series for `regrow plot`, from a job's records: world size, throughput, a metric, and incidents, along one axis.

Pure. Each step counts once, at the time of its last commit that counts: time spent on repeated steps is time without
throughput. Long runs are averaged over windows, to limit the number of points in a figure.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from regrow.core.ids import Generation, Instant, Seconds, StepNo
from regrow.core.records import (
    GenerationFormed,
    IncidentClosed,
    IncidentOpened,
    JobEnded,
    JobStarted,
    Record,
    StepCommitted,
    WorldChanged,
)
from regrow.observe.reads import History, RunRecords, StepReads

MOST_WINDOWS = 150
"""Approximate number of windows of throughput in one figure; changes of generation add some."""
MOST_POINTS = 600
"""Most points of the metric; with more steps, each point is the mean over several."""


class Axis(StrEnum):
    """Unit of the x axis: seconds since the job's start, or steps."""

    TIME = "time"
    STEP = "step"


class Kind(StrEnum):
    """Kind of an incident; all faults are one kind."""

    GROW = "grow"
    SHRINK = "shrink"
    PREEMPT = "preempt"
    MOVE = "move"
    FAULT = "fault"


@dataclass(frozen=True)
class Mark:
    """An incident. `start`, `end`: on the x axis. `cause`: the incident's `kind` in the records, as `exit` or `hang`.

    `pause`: seconds from its start to the next step that every rank committed; None: it is not over.
    `before`, `after`: number of replicas; both 0 if that did not change.
    """

    kind: Kind
    cause: str
    start: float
    end: float
    pause: Seconds | None
    before: int = 0
    after: int = 0


@dataclass(frozen=True)
class Stairs:
    """A step function: `values[i]` holds from `edges[i]` to `edges[i + 1]`. Both empty, or one more edge than value."""

    edges: list[float]
    values: list[float]


@dataclass(frozen=True)
class Curve:
    """A metric: mean, least and largest finite value of each point's steps. `gaps`: x of steps without a finite value.

    `each`: most steps per point. A point for which no step has a finite value is NaN in all three lists.
    """

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    gaps: list[float]
    each: int


@dataclass(frozen=True)
class Picture:
    """The data of one figure.

    `world_unit`: `replicas`, or `ranks` if the records do not show how many make up a replica. `rate_unit`: `tokens`,
    `samples` or `steps`, per second. `steps`: number of steps that count. `wall`: seconds from the first moment shown
    to the last. `partial`: number of steps without a line of every rank. `metrics`: names of all that were logged.
    """

    job: str
    axis: Axis
    metric: str
    world: Stairs
    world_unit: str
    rate: Stairs
    rate_unit: str
    curve: Curve
    marks: list[Mark]
    steps: int
    wall: Seconds
    partial: int
    metrics: list[str]


@dataclass(frozen=True)
class _Step:
    """One step that counts: it lasted from `begin` to `end` (seconds since the start)."""

    number: StepNo
    generation: Generation
    begin: Seconds
    end: Seconds
    ranks: int
    lines: Sequence[StepCommitted]

    def place(self, axis: Axis) -> tuple[float, float]:
        return (self.begin, self.end) if axis is Axis.TIME else (float(self.number), float(self.number + 1))


def picture(run: RunRecords, *, axis: Axis = Axis.TIME, metric: str = "loss") -> Picture:
    """Make the data of a figure from a job's records; parts without records stay empty.

    Args:
        run: the records, also of a running job.
        axis: unit of x.
        metric: name of a number that steps have logged; its mean over the ranks is shown.
    """
    history = History([run])
    formed = {each.generation: each for each in run.records if isinstance(each, GenerationFormed)}
    origin = _origin(run.records)
    steps = _steps(history.steps, formed, origin)
    end = _end(run.records, steps, axis, origin)
    unit = _unit(run.records, formed)
    rate_unit, amounts = _amounts(steps)
    return Picture(
        job=run.name,
        axis=axis,
        metric=metric,
        world=_world(steps, formed, axis, end, origin, unit or 1),
        world_unit="ranks" if unit is None else "replicas",
        rate=_rate(steps, amounts, axis),
        rate_unit=rate_unit,
        curve=_curve(steps, axis, metric),
        marks=_marks(run.records, axis, end, origin),
        steps=len(steps),
        wall=_end(run.records, steps, Axis.TIME, origin),
        partial=sum(bool(reads.counted and reads.missing) for reads in history.steps),
        metrics=sorted({name for step in steps for line in step.lines for name in line.metrics}),
    )


# --- the steps that count ----------------------------------------------------------------------------------------


def _origin(records: Sequence[Record]) -> Instant:
    """Zero of the time axis: the job's start, or the first known moment."""
    started = [each.at for each in records if isinstance(each, JobStarted)]
    if started:
        return min(started)
    return min((each.at - (each.seconds if isinstance(each, StepCommitted) else 0.0) for each in records), default=0.0)


def _end(records: Sequence[Record], steps: Sequence[_Step], axis: Axis, origin: Instant) -> float:
    """End of the axis: the end of the job's training."""
    if axis is Axis.STEP:
        return float(steps[-1].number + 1) if steps else 0.0
    shown = (IncidentOpened, IncidentClosed, JobEnded, GenerationFormed)
    last = [each.at - origin for each in records if isinstance(each, shown)]
    return max([0.0, *last, *(step.end for step in steps[-1:])])


def _steps(all_reads: Sequence[StepReads], formed: dict[Generation, GenerationFormed], origin: Instant) -> list[_Step]:
    steps: list[_Step] = []
    for reads in all_reads:
        lines = list(reads.counted.values())
        if not lines:
            continue
        # A rank that adopts a step records this when it receives the step, which may be much later.
        computed = [line for line in lines if not line.adopted] or lines
        end = max(line.at for line in computed) - origin
        if steps and steps[-1].number + 1 == reads.step:
            begin = steps[-1].end
        else:
            begin = min(line.at - line.seconds for line in computed) - origin
        generation = reads.place.generation
        members = len(formed[generation].workers) if generation in formed else 0
        ranks = members or len(reads.counted) + len(reads.missing)
        # Clocks of several machines, or a late commit, must not make a step end before it begins.
        end = max(begin, end)
        steps.append(_Step(reads.step, generation, begin, end, ranks, lines))
    return steps


# --- world -------------------------------------------------------------------------------------------------------


def _unit(records: Sequence[Record], formed: dict[Generation, GenerationFormed]) -> int | None:
    """Number of ranks per replica; None if no change of the world shows it."""
    for change in records:
        if isinstance(change, WorldChanged) and change.generation in formed and change.after > 0:
            ranks = len(formed[change.generation].workers)
            if ranks and ranks % change.after == 0:
                return ranks // change.after
    return None


def _world(
    steps: Sequence[_Step],
    formed: dict[Generation, GenerationFormed],
    axis: Axis,
    end: float,
    origin: Instant,
    unit: int,
) -> Stairs:
    if axis is Axis.TIME and formed:
        sizes = [(each.at - origin, len(each.workers)) for _, each in sorted(formed.items())]
    else:
        sizes = [(step.place(axis)[0], step.ranks) for step in steps]
    edges: list[float] = []
    values: list[float] = []
    for at, ranks in sizes:
        if not values or values[-1] != ranks / unit:
            edges.append(at)
            values.append(ranks / unit)
    return Stairs([*edges, max(end, edges[-1])], values) if edges else Stairs([], [])


# --- throughput --------------------------------------------------------------------------------------------------


def _amounts(steps: Sequence[_Step]) -> tuple[str, list[float]]:
    """Unit of the throughput, and the amount in each step, summed over the ranks."""
    tokens = [sum(_finite(line.metrics.get("tokens", 0.0)) for line in step.lines) for step in steps]
    if any(tokens):
        return "tokens", tokens
    samples = [sum(line.samples or _finite(line.metrics.get("samples", 0.0)) for line in step.lines) for step in steps]
    if any(samples):
        return "samples", [float(each) for each in samples]
    return "steps", [1.0] * len(steps)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _rate(steps: Sequence[_Step], amounts: Sequence[float], axis: Axis) -> Stairs:
    if not steps:
        return Stairs([], [])
    least = (steps[-1].place(axis)[1] - steps[0].place(axis)[0]) / MOST_WINDOWS
    edges, values = [steps[0].place(axis)[0]], []
    for first, last in _windows([step.place(axis) for step in steps], [step.generation for step in steps], least):
        begin, end = steps[first].begin, steps[last].end
        seconds = end - begin
        if seconds <= 0:
            continue
        values.append(sum(amounts[first : last + 1]) / seconds)
        edges.append(steps[last].place(axis)[1])
    return Stairs(edges, values) if values else Stairs([], [])


def _windows(
    places: Sequence[tuple[float, float]], generations: Sequence[Generation], least: float
) -> list[tuple[int, int]]:
    """First and last index of each window, which is at least as wide as `least`, and within one generation.

    The rest at a generation's end joins the generation's last window; a generation too short for a window joins the one
    after it.
    """
    windows: list[tuple[int, int]] = []
    first = 0
    for at, place in enumerate(places):
        last = at + 1 == len(places)
        if place[1] - places[first][0] >= least:
            windows.append((first, at))
        elif windows and (last or (generations[at + 1] != generations[at] == generations[windows[-1][1]])):
            windows[-1] = (windows[-1][0], at)
        elif last:
            windows.append((first, at))
        else:
            continue
        first = at + 1
    return windows


# --- a metric ----------------------------------------------------------------------------------------------------


def _curve(steps: Sequence[_Step], axis: Axis, metric: str) -> Curve:
    points = [
        (step.place(axis)[1] if axis is Axis.TIME else float(step.number), _mean(step, metric))
        for step in steps
        if any(metric in line.metrics for line in step.lines)
    ]
    each = max(1, math.ceil(len(points) / MOST_POINTS))
    curve = Curve([], [], [], [], [x for x, value in points if not math.isfinite(value)], each)
    for start in range(0, len(points), each):
        share = points[start : start + each]
        known = [value for _, value in share if math.isfinite(value)]
        curve.x.append(sum(x for x, _ in share) / len(share))
        curve.mean.append(sum(known) / len(known) if known else math.nan)
        curve.low.append(min(known, default=math.nan))
        curve.high.append(max(known, default=math.nan))
    return curve


def _mean(step: _Step, metric: str) -> float:
    """Mean over the ranks that have logged the metric."""
    values = [line.metrics[metric] for line in step.lines if metric in line.metrics]
    return sum(values) / len(values)


# --- incidents ---------------------------------------------------------------------------------------------------


def _marks(records: Iterable[Record], axis: Axis, end: float, origin: Instant) -> list[Mark]:
    marks: list[Mark] = []
    unfinished: dict[int, IncidentOpened] = {}
    for each in records:
        if isinstance(each, IncidentOpened):
            unfinished[each.incident] = each
        elif isinstance(each, IncidentClosed):
            unfinished.pop(each.incident, None)
            start, until = min(each.fault_at, each.opened_at) - origin, each.at - origin
            if axis is Axis.STEP:
                start = until = float(each.step)
            marks.append(Mark(_kind(each.kind), each.kind, start, until, each.total, each.before, each.after))
    for opened in unfinished.values():
        start = opened.at - origin if axis is Axis.TIME else float(opened.step)
        marks.append(Mark(_kind(opened.kind), opened.kind, start, max(start, end), None))
    return sorted(marks, key=lambda mark: (mark.start, mark.end))


def _kind(kind: str) -> Kind:
    return Kind(kind) if kind in set(Kind) else Kind.FAULT
