"""Cost of comparing replicas for differences.

The figure is the share of its time that the slowest rank spends on comparisons, each timed on the training thread. Two
jobs side by side, one without comparisons, differ by more from turn to turn than a comparison costs; so the cost
elsewhere (the coordinator compares) is measured within one job: the step before a comparison and the step after it,
against neighbouring steps without one.
"""

from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, quantiles

from contest import Job

from regrow.core.ids import Seconds, StepNo
from regrow.observe.ledger import Ledger

REACH, NEIGHBOURS = 5, 4
START_DEADLINE: Seconds = 120.0
DEADLINE: Seconds = 900.0


@dataclass(frozen=True)
class Sample:
    """One comparison.

    Attributes:
        excess: extra time of this step and the next over two undisturbed neighbours.
        inside: time that the slowest rank spent on the comparison.
        period: time since the previous sample.
        steps: steps in it.
    """

    excess: Seconds
    inside: Seconds
    period: Seconds
    steps: int


def measure(job: Job, *, samples: int) -> list[Sample]:
    """Let a job that logs `looked` (seconds of its ranks, 0 mostly) run until it has `samples`. Raises `JobStuck`."""
    with job:
        job.wait(lambda: job.world_step >= 1, deadline=START_DEADLINE, what="second step")
        job.wait(lambda: len(found(job.ledger)) >= samples, deadline=DEADLINE, what=f"{samples} samples")
        return found(job.ledger)[:samples]


def found(ledger: Ledger) -> list[Sample]:
    """All samples that already have enough neighbours."""
    at = dict(ledger.world_commits())
    took = {step: at[step] - at[StepNo(step - 1)] for step in at if step - 1 in at}
    looked = {step: max(c.metrics.get("looked", 0.0) for c in ledger.commits[step].values()) for step in took}
    sampled = [step for step in sorted(took) if looked[step] > 0]
    touched = {each for step in sampled for each in (step, step + 1)}
    result = []
    for before, step in pairwise(sampled):
        near = [each for each in range(step - REACH, step + REACH + 2) if each in took and each not in touched]
        if step + REACH + 1 not in took or len(near) < NEIGHBOURS:
            continue
        calm = fmean(took[StepNo(each)] for each in near)
        excess = took[step] + took[StepNo(step + 1)] - 2 * calm
        result.append(Sample(excess, looked[step], at[step] - at[before], step - before))
    return result


def percent(samples: list[Sample]) -> float:
    """Cost of the comparisons in percent of the time."""
    return 100 * sum(each.inside for each in samples) / sum(each.period for each in samples)


def describe(samples: list[Sample]) -> str:
    """One line for people."""
    parts = [100 * each.excess / each.period for each in samples]
    # of a median: its standard error is 1.25 times the mean's, and the quartiles of a normal lie at 0.67 deviations
    low, middle, high = quantiles(parts, n=4)
    error = 1.96 * 1.25 * (high - low) / 1.35 / len(parts) ** 0.5
    return (
        f"audit, {len(samples)} looks, one in {median(each.steps for each in samples):.0f} steps: "
        f"{percent(samples):.2f} % of the time; "
        f"steps with one took {middle:+.2f} % (± {error:.2f}) longer than their neighbours, spread over all steps"
    )
