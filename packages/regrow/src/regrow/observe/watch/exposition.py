"""The metrics of a job, as the coordinator serves them. Pure. docs/monitoring.md describes each."""

from collections import Counter
from collections.abc import Mapping
from statistics import median

from regrow.core.ids import Seconds
from regrow.core.metrics_text import Series, refusals_of, series_of, text_of
from regrow.observe.watch.present import STATES, Present


def exposition(job: Present, *, offset: Seconds, refused: Mapping[str, int]) -> str:
    """The text for a scrape.

    Args:
        job: the job's state, after `fold`.
        offset: wall clock minus the clock of the job's records, in seconds.
        refused: number of refused connections, by endpoint.
    """
    return text_of([*series(job, offset=offset), refusals_of(refused, {})])


def series(job: Present, *, offset: Seconds) -> list[Series]:
    """All series of a job; series without data yet have no samples."""
    steps = job.step_seconds()
    workers = dict.fromkeys(STATES, 0) | Counter(seen.state for seen in job.ranks.values())
    workers["standby"] = job.standbys
    newest = {"commit": job.last_commit, "checkpoint": job.checkpoint_at}
    info = {"job": job.job or ""}
    step_seconds = {"median": median(steps), "max": steps[-1]} if steps else {}
    return [
        series_of("regrow_job_info", "The job.", [(info, 1)]),
        series_of(
            "regrow_world_ranks",
            "Ranks of the present world, and those that it should have.",
            [({"count": "present"}, len(job.ranks)), ({"count": "wanted"}, job.wanted)],
        ),
        series_of(
            "regrow_workers",
            "Workers by their state.",
            [({"state": state}, number) for state, number in workers.items()],
        ),
        series_of("regrow_generation", "Number of the agreed membership.", [({}, job.generation or 0)]),
        series_of("regrow_steps", "Committed steps; less after steps were given up.", [({}, job.step)]),
        series_of(
            "regrow_step_seconds",
            "Newest step of the ranks.",
            [({"stat": stat}, value) for stat, value in step_seconds.items()],
        ),
        series_of(
            "regrow_newest_timestamp_seconds",
            "When a rank committed last, and when the newest durable checkpoint was complete, as Unix time.",
            [({"of": name}, at + offset) for name, at in newest.items() if at is not None],
        ),
        series_of(
            "regrow_logged",
            "Mean over the ranks of the script's metrics of the newest step.",
            [({"name": name}, value) for name, value in sorted(job.metrics.items())],
        ),
        series_of("regrow_incident_open", "1 while an incident is being mended.", [({}, int(job.opened is not None))]),
        series_of(
            "regrow_incidents_total",
            "Incidents and changes of the world, by kind.",
            [({"kind": kind}, number) for kind, number in sorted(job.kinds.items())],
            "counter",
        ),
        series_of(
            "regrow_incident_stage_seconds_total",
            "Time in each stage of incidents that are over.",
            [({"stage": stage}, value) for stage, value in job.stage_seconds.items()],
            "counter",
        ),
        series_of(
            "regrow_suspects",
            "Devices with a verdict from the work on them, by source.",
            [
                ({"source": source}, number)
                for source, number in sorted(Counter(key[0] for key in job.suspects).items())
            ],
        ),
        series_of("regrow_lost_steps_total", "Committed steps that were given up.", [({}, job.steps_lost)], "counter"),
        series_of(
            "regrow_rank_seconds_total",
            "Rank-seconds by use, estimated; their sum is the size of the world over time.",
            [({"spent": name}, value) for name, value in job.spent.items()],
            "counter",
        ),
    ]
