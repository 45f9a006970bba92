"""Status of a job as the controller writes it: for people, and as the controller's own memory. Pure."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from regrow.core.ids import Instant
from regrow.observe.watch.present import JobFigures
from regrow_clusters.cluster.actions import DrainReplica, PlannedAction, ReleaseReplica, StartGang, StartReplica
from regrow_clusters.cluster.observed import JobStage
from regrow_clusters.cluster.planner import granted_after
from regrow_clusters.cluster.sizes import wanted_size
from regrow_clusters.operator.objects import JOB_LABEL
from regrow_clusters.operator.observed.observing import MENDED, JobReading
from regrow_clusters.operator.resource import (
    AvoidedNodeStatus,
    JobCondition,
    SpecRefused,
    TrainingJob,
    TrainingJobStatus,
    utc,
)
from regrow_clusters.operator.terms import edits_text, terms_of

SHORT: Final = "Waiting"
"""Phase of a job that has begun, but whose gang is incomplete, so that it does not train."""
_SHOWN_NODES: Final = 5
_PHASES: Final = {
    JobStage.NEW: "Pending",
    JobStage.TRAINING: "Training",
    JobStage.BROKEN: "Restarting",
    JobStage.STOPPED: "Suspended",
}


def next_status(
    job: TrainingJob,
    reading: JobReading,
    actions: list[PlannedAction],
    now: Instant,
    figures: JobFigures | None = None,
    found: tuple[AvoidedNodeStatus, ...] = (),
    node_ranks: list[int] | None = None,
) -> TrainingJobStatus:
    """The status once these actions are done; the conditions are added by `with_conditions`.

    `figures`: the job's reported progress; None: no new report. `found`: nodes that failed its examinations.
    `node_ranks`: node ranks for the gang's pods; None: as before.
    """
    old, spec = job.status, job.spec.elastic()
    started = sum(len(each.places) if isinstance(each, StartGang) else 1 for each in actions if _starts(each))
    failed = sum(isinstance(each, ReleaseReplica) and each.reason in ("ended", "lost") for each in actions)
    failed += len(reading.lingering)
    anew = reading.anew
    struck = failed or (anew and old.phase != "Suspended" and not job.edited)
    failures = old.failures + (1 if struck else 0)
    if failures == old.failures and old.failures and now - old.failed_at > 600.0:
        failures = 0
    if reading.over == MENDED:
        failures = 0  # they belong to the former specification
    changed = reading.running != old.replicas
    there = reading.seen.replicas or any(isinstance(each, StartGang) for each in actions)
    terms = {} if anew else old.terms or (terms_of(job.spec) if there else {})
    return msgspec.structs.replace(
        old,
        phase=_phase(job, reading),
        replicas=reading.running,
        pending_replicas=reading.waiting,
        desired_replicas=0 if job.spec.suspend else wanted_size(spec),
        step=old.step if figures is None else figures.step,
        incidents=old.incidents if figures is None else figures.incidents,
        goodput=_rounded(old.goodput if figures is None else figures.goodput),
        selector=f"{JOB_LABEL}={job.name}",
        attempt=old.attempt + 1 if anew else old.attempt,
        started_attempt=old.attempt if reading.started else old.started_attempt,
        granted=granted_after(spec, reading.seen, actions),
        last_change_time=utc(now) if changed else old.last_change_time,
        failures=failures,
        last_failure_time=utc(now) if failures > old.failures else old.last_failure_time,
        serial=old.serial + started,
        terms=terms,
        node_ranks=[] if anew else old.node_ranks if node_ranks is None else node_ranks,
        over=reading.over,
        bad_nodes=_avoided(job, actions, found, now),
        observed_generation=job.generation,
    )


def _phase(job: TrainingJob, reading: JobReading) -> str:
    if reading.seen.stage is JobStage.TRAINING and reading.running < job.spec.replica_count:
        return SHORT
    return _PHASES.get(reading.seen.stage, reading.over)


def _rounded(part: float | None) -> float | None:
    return None if part is None else round(part, 3)


def _starts(action: PlannedAction) -> bool:
    return isinstance(action, StartGang | StartReplica)


def _avoided(
    job: TrainingJob, actions: list[PlannedAction], found: tuple[AvoidedNodeStatus, ...], now: Instant
) -> list[AvoidedNodeStatus]:
    kept = {each.name: each for each in job.status.bad_nodes if each.until > now}
    for each in found:
        known, half = kept.get(each.name), job.spec.bad_node_time_in_seconds / 2
        if known is None or known.quarantined < each.quarantined or known.until < each.until - half:
            kept[each.name] = each
    for action in actions:
        if isinstance(action, ReleaseReplica | DrainReplica):
            until = now + job.spec.bad_node_time_in_seconds
            half = job.spec.bad_node_time_in_seconds / 2
            for node in action.blame:
                if node not in kept or kept[node].until < until - half:  # each write causes another reconciliation
                    known = kept.get(node)
                    at = datetime.fromtimestamp(until, UTC)
                    kept[node] = AvoidedNodeStatus(node, at, action.reason, known is not None and known.quarantined)
    return [kept[name] for name in sorted(kept)]


class JobFinding(msgspec.Struct, frozen=True):
    """State of one condition: whether it holds, a reason in one word, and a sentence."""

    type: str
    holds: bool
    reason: str
    message: str = ""


def findings(job: TrainingJob, reading: JobReading) -> list[JobFinding]:
    """The conditions that every job with a valid specification has."""
    spec, stage = job.spec, reading.seen.stage
    wanted = wanted_size(spec.elastic())
    training = stage is JobStage.TRAINING and reading.running >= spec.replica_count
    text = f"{reading.running} of {wanted} replicas run"
    found = [
        JobFinding("SpecValid", True, "Valid", _below_gang(job)),
        JobFinding("SpecApplied", not job.edited, "AtNextStart" if job.edited else "Applied", edits_text(job)),
        JobFinding("Training", training, "Running" if training else "NotYet", text),
    ]
    short = stage not in (JobStage.OVER, JobStage.STOPPED) and reading.running < wanted
    waits = f"{reading.waiting} of them wait for capacity" if reading.waiting else "the next one is asked for in time"
    found.append(
        JobFinding("AtWantedSize", not short, "Smaller" if short else "AsWanted", f"{text}; {waits}" if short else text)
    )
    over = reading.over if stage is JobStage.OVER else ""
    found.append(JobFinding("Complete", over == "Succeeded", over or "NotYet", _still(reading)))
    found.append(JobFinding("Failed", over == "Failed", over if over == "Failed" else "No", reading.failed))
    return found


def _still(reading: JobReading) -> str:
    if not reading.still:
        return ""
    text = f"the job is over, and containers that do not train still run: {', '.join(reading.still[:_SHOWN_NODES])}"
    return f"{text}; they hold their nodes: delete the job, or make them init containers with restartPolicy: Always"


def _below_gang(job: TrainingJob) -> str:
    """Advice if spec.replicas is below the gang's size, as kubectl scale allows; else empty."""
    asked, least = job.spec.replicas, job.spec.replica_count
    if asked >= least:
        return ""
    text = f"spec.replicas is {asked}, and the job never has fewer than replicaCount ({least}): it has {least}"
    cure = "lower spec.replicaCount, which counts when the gang starts anew"
    return f"{text}; {cure}, or set spec.suspend to give all pods back"


def nodes_finding(bad: Mapping[str, str]) -> JobFinding:
    """Finding on the job's present nodes. `bad`: the evidence by node."""
    if not bad:
        return JobFinding("NodesHealthy", True, "NothingKnown", "nothing is known against the job's nodes")
    shown = "; ".join(f"{node}: {why}" for node, why in sorted(bad.items())[:_SHOWN_NODES])
    more = f"; and {len(bad) - _SHOWN_NODES} more" if len(bad) > _SHOWN_NODES else ""
    return JobFinding("NodesHealthy", False, "Unhealthy", shown + more)


def with_conditions(
    status: TrainingJobStatus, found: list[JobFinding], generation: int, now: Instant
) -> TrainingJobStatus:
    """The status with these conditions and their times of change; a finding without a message keeps the former one."""
    known = {each.type: each for each in status.conditions}
    for each in found:
        old, holds = known.get(each.type), "True" if each.holds else "False"
        since = old.last_transition_time if old is not None and old.status == holds else stamp(now)
        message = each.message
        if not message and old is not None and old.status == holds and old.reason == each.reason:
            message = old.message
        known[each.type] = JobCondition(each.type, holds, each.reason, message, since, generation)
    return msgspec.structs.replace(status, conditions=[known[name] for name in sorted(known)])


def refused_status(
    found: dict[str, Any], old: TrainingJobStatus, refusal: SpecRefused, now: Instant
) -> TrainingJobStatus:
    """Status of an object that is not valid. Its pods stay as they are until it is corrected."""
    generation = int(found["metadata"].get("generation", 1))
    finding = JobFinding("SpecValid", False, "Invalid", str(refusal))
    status = with_conditions(old, [finding], generation, now)
    phase = old.phase if old.phase in ("Training", SHORT, "Succeeded", "Failed") else "Invalid"
    return msgspec.structs.replace(status, phase=phase, observed_generation=generation)


def stamp(now: Instant) -> str:
    """A time in Kubernetes' format."""
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
