"""Messages to the live page: a snapshot of the whole job first, then small ticks. Pure."""

import msgspec

from regrow.core.ids import Instant, Seconds
from regrow.observe.story import first_line
from regrow.observe.watch.present import STAGES, Present

_LONGEST = 200
"""Most characters of a cause that are shown."""


class IncidentShown(msgspec.Struct, frozen=True):
    """One incident. `at`: time of its fault, in seconds since the job started. `stages`: in the order of `STAGES`."""

    number: int
    at: Seconds
    step: int
    kind: str
    cause: str
    ranks: list[int]
    rung: str = ""
    total: Seconds | None = None
    stages: list[Seconds] = []
    steps_lost: int = 0


class WatchTick(msgspec.Struct, frozen=True):
    """Values that change all the time. `states`: a letter per rank of `WatchSnapshot.ranks`; `took`: ms per step.

    `version` changes when the rest of the snapshot does; a page with another version requests the snapshot again.
    """

    version: str
    at: Seconds
    step: int
    generation: int
    world: int
    wanted: int
    standbys: int
    states: str
    took: list[int]
    speed: float | None
    goodput: float | None
    metrics: dict[str, float]
    summed: dict[str, float]
    spent: dict[str, Seconds]
    incident: IncidentShown | None
    ended: int | None


class WatchSnapshot(msgspec.Struct, frozen=True):
    """All data of the page. `home`: for each rank in `ranks`, the index of its node in `nodes`."""

    job: str
    tick: WatchTick
    ranks: list[int]
    workers: list[str]
    home: list[int]
    nodes: list[str]
    points: list[tuple[Seconds, int, int, float | None, float | None]]
    """Points of the curves: (seconds since the start, steps, ranks, steps per second, loss)."""
    incidents: list[IncidentShown]
    stage_names: list[str]


def tick(job: Present, now: Instant) -> WatchTick:
    """The tick of a job, after `fold`."""
    started = job.started if job.started is not None else now
    seen = [job.ranks[rank] for rank in sorted(job.ranks)]
    opened = job.opened
    return WatchTick(
        version=f"{job.generation}.{len(seen)}.{sum(job.kinds.values())}.{opened is None}",
        at=max(0.0, (job.ended.at if job.ended is not None else now) - started),
        step=job.step,
        generation=job.generation or 0,
        world=len(seen),
        wanted=job.wanted,
        standbys=job.standbys,
        states="".join(each.state[0] for each in seen),
        took=[-1 if each.seconds is None else round(each.seconds * 1000) for each in seen],
        speed=job.speed(now),
        goodput=job.goodput,
        metrics={name: value for name, value in job.metrics.items() if _finite(value)},
        summed={name: value for name, value in job.summed.items() if _finite(value)},
        spent=job.spent,
        incident=None
        if opened is None
        else IncidentShown(
            opened.incident, opened.at - started, opened.step, opened.kind, _short(opened.cause), list(opened.ranks)
        ),
        ended=None if job.ended is None else job.ended.code,
    )


def snapshot(job: Present, now: Instant) -> WatchSnapshot:
    """The snapshot of a job, after `fold`."""
    started = job.started if job.started is not None else now
    order = sorted(job.ranks)
    nodes = sorted(job.nodes(), key=lambda name: (len(name), name))
    places = {name: place for place, name in enumerate(nodes)}
    return WatchSnapshot(
        job=job.job or "",
        tick=tick(job, now),
        ranks=list(order),
        workers=[job.ranks[rank].worker for rank in order],
        home=[places[job.ranks[rank].node] for rank in order],
        nodes=list(nodes),
        points=[(p.at - started, p.step, p.world, p.speed, p.loss if _finite(p.loss) else None) for p in job.points],
        incidents=[
            IncidentShown(
                each.incident,
                min(each.fault_at, each.opened_at) - started,
                each.step,
                each.kind,
                _short(each.cause),
                list(each.ranks),
                each.rung,
                each.total,
                [getattr(each, stage) for stage in STAGES],
                each.steps_lost,
            )
            for each in job.incidents
        ],
        stage_names=list(STAGES),
    )


def _finite(value: float | None) -> bool:
    return value is not None and value - value == 0.0


def _short(cause: str) -> str:
    return first_line(cause)[:_LONGEST]
