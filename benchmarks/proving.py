"""Cost of proving that a newcomer computes the same results.

A standby runs a step in a rank's shadow. In a job this happens at most once a minute, and less often if its cost is
high; here it is repeated, so that steps with a proof and without one alternate within one job. A proof's cost is the
extra time of the steps from its start until the standby has finished; the figure is this cost at the rate that the
coordinator would choose for the cost that the standby reports (`membership/recovery/proving.py`).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from contest import Job

from regrow.core.ids import Seconds, StepNo
from regrow.membership.recovery.proofs.rounds import between_rounds
from regrow.observe.ledger import Ledger

REACH, NEIGHBOURS = 6, 4
START_DEADLINE: Seconds = 180.0
DEADLINE: Seconds = 900.0


@dataclass(frozen=True)
class Proof:
    """One proof.

    Attributes:
        step: the step that the standby ran.
        told: its cost, as reported to the coordinator.
        began, ended: times on the clock of commits.
    """

    step: StepNo
    told: Seconds
    began: float
    ended: float


@dataclass(frozen=True)
class Sample:
    """One proof, compared with undisturbed steps near it.

    Attributes:
        excess: delay of the job by the proof.
        period: time until the coordinator would have ordered the next proof.
    """

    excess: Seconds
    period: Seconds


def measure(job: Job, costs: Path, *, samples: int) -> list[Sample]:
    """Run a job until it has `samples`; its standby writes each proof to `costs`. Raises `JobStuck`."""
    with job:
        job.wait(lambda: job.world_step >= 1, deadline=START_DEADLINE, what="second step")
        job.wait(lambda: len(proofs(costs)) >= samples + 2, deadline=DEADLINE, what=f"{samples} proofs")
        job.wait_steps(REACH + 1)
        return found(job.ledger, proofs(costs))[:samples]


def proofs(costs: Path) -> list[Proof]:
    """All proofs in the file."""
    lines = costs.read_text(encoding="utf-8").splitlines() if costs.exists() else []
    return [Proof(**json.loads(line)) for line in lines]


def found(ledger: Ledger, proofs: list[Proof]) -> list[Sample]:
    """Samples with enough undisturbed neighbours, without the first, which needs new memory."""
    at = dict(ledger.world_commits())
    took = {step: at[step] - at[StepNo(step - 1)] for step in at if step - 1 in at}
    spans = {proof: [step for step in took if _overlap(proof, at[StepNo(step - 1)], at[step])] for proof in proofs}
    touched = {each for steps in spans.values() for step in steps for each in (step, step + 1)}
    result = []
    for proof in proofs[1:]:
        steps = sorted(spans[proof])
        if not steps or steps[-1] + 1 not in took:
            continue
        steps.append(StepNo(steps[-1] + 1))
        near = range(steps[0] - REACH, steps[-1] + REACH + 1)
        calm = [took[StepNo(each)] for each in near if each in took and each not in touched]
        if len(calm) >= NEIGHBOURS:
            excess = sum(took[step] for step in steps) - len(steps) * median(calm)
            result.append(Sample(excess, between_rounds(proof.told)))
    return result


def _overlap(proof: Proof, begin: float, end: float) -> bool:
    return begin < proof.ended and end > proof.began


def percent(samples: list[Sample]) -> float:
    """Cost in percent of a step: the median proof."""
    return 100 * median(each.excess / each.period for each in samples)


def describe(samples: list[Sample]) -> str:
    """One line for people."""
    excess, period = (median(column) for column in zip(*((s.excess, s.period) for s in samples), strict=True))
    parts = sorted(100 * each.excess / each.period for each in samples)
    return (
        f"proof, {len(samples)} of them: {excess:.2f} s each, one in {period:.0f} s: {percent(samples):.2f} % of the "
        f"time (half of them from {parts[len(parts) // 4]:.2f} to {parts[3 * len(parts) // 4]:.2f} %)"
    )
