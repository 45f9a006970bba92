"""The metrics of a job in Prometheus' text format, version 0.0.4. Pure. docs/monitoring.md has a line for each."""

from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import NamedTuple

from regrow.core.ids import Seconds
from regrow.observe.watch.present import Present

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Sample(NamedTuple):
    """One number of a series."""

    labels: Mapping[str, str]
    value: float


class Series(NamedTuple):
    """A name, what it means, and its numbers."""

    name: str
    kind: str
    text: str
    samples: list[Sample]


def exposition(job: Present, *, offset: Seconds) -> str:
    """What a scrape answers.

    Args:
        job: folded.
        offset: of the wall clock from the clock of the job's records.
    """
    return "".join(line + "\n" for each in series(job, offset=offset) for line in _lines(each))


def series(job: Present, *, offset: Seconds) -> list[Series]:
    """All series of a job; those of which nothing is known yet have no numbers."""
    steps = job.step_seconds()
    info = {"job": job.job or ""}
    step_seconds = {"median": median(steps), "max": steps[-1]} if steps else {}
    return [
        _one("regrow_job_info", "The job.", [(info, 1)]),
        _one("regrow_world_ranks", "Ranks of the present world.", [({}, len(job.ranks))]),
        _one("regrow_wanted_ranks", "Ranks that the world should have.", [({}, job.wanted)]),
        _one("regrow_standby_workers", "Warm workers that wait to take a rank.", [({}, job.standbys)]),
        _one("regrow_generation", "Number of the agreed membership.", [({}, job.generation or 0)]),
        _one("regrow_steps", "Committed steps; less after steps were given up.", [({}, job.step)]),
        _one(
            "regrow_step_seconds",
            "Newest step of the ranks.",
            [({"stat": stat}, value) for stat, value in step_seconds.items()],
        ),
        _one(
            "regrow_last_commit_timestamp_seconds",
            "When a rank committed last, as Unix time.",
            _times(job.last_commit, offset),
        ),
        _one(
            "regrow_logged",
            "Mean over the ranks of what the script logged for the newest step.",
            [({"name": name}, value) for name, value in sorted(job.metrics.items())],
        ),
        _one("regrow_incident_open", "1 while an incident is being mended.", [({}, int(job.opened is not None))]),
        _one(
            "regrow_incidents_total",
            "Incidents and changes of the world, by kind.",
            [({"kind": kind}, number) for kind, number in sorted(job.kinds.items())],
            "counter",
        ),
        _one(
            "regrow_incident_stage_seconds_total",
            "Time in each stage of incidents that are over.",
            [({"stage": stage}, value) for stage, value in job.stage_seconds.items()],
            "counter",
        ),
        _one("regrow_lost_steps_total", "Committed steps that were given up.", [({}, job.steps_lost)], "counter"),
        _one(
            "regrow_rank_seconds_total",
            "Rank-seconds by what they went into, estimated; their sum is the size of the world over time.",
            [({"spent": name}, value) for name, value in job.spent.items()],
            "counter",
        ),
        _one(
            "regrow_checkpoint_timestamp_seconds",
            "When the newest durable checkpoint was complete, as Unix time.",
            _times(job.checkpoint_at, offset),
        ),
    ]


def _one(name: str, text: str, samples: Iterable[tuple[Mapping[str, str], float]], kind: str = "gauge") -> Series:
    return Series(name, kind, text, [Sample(labels, value) for labels, value in samples])


def _times(at: float | None, offset: Seconds) -> list[tuple[Mapping[str, str], float]]:
    return [] if at is None else [({}, at + offset)]


def _lines(each: Series) -> Iterator[str]:
    yield f"# HELP {each.name} {each.text}"
    yield f"# TYPE {each.name} {each.kind}"
    for labels, value in each.samples:
        shown = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())
        yield f"{each.name}{{{shown}}} {_number(value)}" if shown else f"{each.name} {_number(value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
