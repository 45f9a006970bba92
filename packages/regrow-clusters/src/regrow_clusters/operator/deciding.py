"""Decision on one job, from all facts about it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from regrow.core.ids import Instant
from regrow.core.verdicts import HealthVerdict
from regrow.observe.watch.present import JobFigures
from regrow_clusters.cluster.actions import PlannedAction, StartGang, StartReplica
from regrow_clusters.cluster.observed import JobStage
from regrow_clusters.cluster.sizes import wanted_size
from regrow_clusters.operator.events import JobNews, news_of_job, news_of_nodes
from regrow_clusters.operator.observed.observing import JobReading, against, found_nodes, join_trouble, start_trouble
from regrow_clusters.operator.observed.pod_seen import PodSeen
from regrow_clusters.operator.planning import PodStep, job_plan, next_turn, pod_steps
from regrow_clusters.operator.resource import TrainingJob, TrainingJobStatus
from regrow_clusters.operator.status import JobFinding, findings, next_status, nodes_finding, with_conditions


@dataclass(frozen=True)
class JobFacts:
    """All facts about a job's pods and nodes. `said`: findings on its queue and on the placing of its pods."""

    pods: list[PodSeen]
    reading: JobReading
    said: tuple[JobFinding, ...] = ()
    figures: JobFigures | None = None
    node_ranks: list[int] | None = None
    verdicts: Mapping[str, list[HealthVerdict]] | None = None
    """Verdicts on nodes from the cluster's facts; None: nodes are not watched."""


@dataclass(frozen=True)
class JobDecision:
    """All steps for a job now. The status is written first, so that only one of two controllers starts a replica."""

    status: TrainingJobStatus
    steps: list[PodStep]
    leaving: list[PodSeen]
    news: list[JobNews]
    keeps_budget: bool
    keeps_service: bool
    """Service and secret must be kept; `waited_for`: a pod waits for them."""
    waited_for: bool
    again: bool
    """True: reconcile the job again at once; else at `later`, or, if that is None, only after news."""
    later: Instant | None


def decide(job: TrainingJob, facts: JobFacts, now: Instant) -> JobDecision:
    """Decide the steps for a job, and its next status."""
    pods, reading = facts.pods, facts.reading
    planned = job_plan(job, reading, now)
    bad, trouble = found_nodes(job, pods, facts.figures, now), start_trouble(pods)
    said = [*findings(job, reading), *_pod_findings(job, facts, planned.actions, trouble, now), *facts.said]
    if facts.verdicts is not None or bad:
        said.append(nodes_finding(against(pods, facts.verdicts or {}, bad)))
    status = next_status(job, reading, planned.actions, now, facts.figures, bad, facts.node_ranks)
    status = with_conditions(status, said, job.generation, now)
    return JobDecision(
        status,
        steps=pod_steps(job, planned, pods),
        leaving=[each for each in pods if each.name in (*reading.rest, *reading.lingering)],
        news=[*news_of_nodes(job.status, status), *news_of_job(job, status, planned.actions)],
        keeps_budget=not reading.over,
        keeps_service=bool(pods) and reading.seen.stage in (JobStage.NEW, JobStage.TRAINING),
        waited_for=trouble is not None,
        again=reading.anew,
        later=None if reading.anew else next_turn(job, reading, now),
    )


def _pod_findings(
    job: TrainingJob, facts: JobFacts, actions: list[PlannedAction], trouble: tuple[str, str] | None, now: Instant
) -> list[JobFinding]:
    """Findings on the creation, the start and the join of pods. A refusal stays until no pod is left to be created.

    The reason why pods do not start stays until the next ones are created.
    """
    reading = facts.reading
    found = [] if trouble is None else [JobFinding("PodsStart", False, *trouble)]
    if trouble is None and reading.seen.retry_at <= now:
        found.append(JobFinding("PodsStart", True, "Starting"))
    if facts.pods and not any(isinstance(each, StartGang | StartReplica) for each in actions):
        found.append(JobFinding("PodsCreated", True, "Created"))
    if reading.started and (text := join_trouble(job, facts.pods)):
        found.append(JobFinding("ReplicasJoin", False, "Refused", text))
    elif reading.anew or reading.over or reading.running >= wanted_size(job.spec.elastic()):
        reported = any(each.type == "ReplicasJoin" for each in job.status.conditions)
        found += [JobFinding("ReplicasJoin", True, "NoneRefused")] if reported else []
    return found
