"""Events on a job, as kubectl describe shows them: new facts, and actions. Pure."""

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from regrow.core.ids import Instant
from regrow_clusters.cluster.actions import DrainReplica, PlannedAction, ReleaseReplica, StartGang, StartReplica
from regrow_clusters.operator.resource import GROUP, KIND, VERSION, TrainingJob, TrainingJobStatus
from regrow_clusters.operator.status import stamp


class JobNews(msgspec.Struct, frozen=True):
    """One piece of news: a reason in one word, and a sentence. `warns`: people may have to act."""

    reason: str
    message: str
    warns: bool = False


def news_of_nodes(old: TrainingJobStatus, new: TrainingJobStatus) -> list[JobNews]:
    """News of nodes that are avoided from now on, and of unhealthy nodes of the job."""
    before = {each.name for each in old.bad_nodes}
    reported = []
    for each in new.bad_nodes:
        if each.name not in before:
            until = stamp(Instant(each.until))
            text = f"no replica is started on node {each.name} until {until}: {each.reason}"
            reported.append(JobNews("NodeAvoided", text, warns=True))
    was, now = (
        next((each.message for each in status.conditions if each.type == "NodesHealthy" and each.status == "False"), "")
        for status in (old, new)
    )
    if now and now != was:
        reported.append(JobNews("NodesUnhealthy", now, warns=True))
    return reported


def news_of_job(job: TrainingJob, new: TrainingJobStatus, actions: Sequence[PlannedAction]) -> list[JobNews]:
    """News of the gang and of its replicas. `new`: the status, once the actions are done."""
    old, reported = job.status, [_news_of(each) for each in actions]
    if new.attempt > old.attempt:
        where = f"the newest checkpoint in {job.spec.checkpoint_dir}" if job.spec.checkpoint_dir else "the beginning"
        text = f"the gang starts anew, for the {_ordinal(new.attempt)} time, from {where}"
        reported.append(JobNews("GangRestarts", text, warns=old.phase != "Suspended"))
    if new.started_attempt > old.started_attempt:
        reported.append(JobNews("GangRuns", f"all {job.spec.replica_count} replicas of the gang run"))
    if new.over != old.over and new.over in ("Succeeded", "Failed"):
        failed = new.over == "Failed"
        text = "the job has failed; condition Failed says why" if failed else "the job is done"
        reported.append(JobNews(f"Job{new.over}", text, warns=failed))
    return reported


def _news_of(action: PlannedAction) -> JobNews:
    if isinstance(action, StartGang):
        return JobNews("GangAsked", f"{len(action.places)} replicas are asked for, to begin together")
    if isinstance(action, StartReplica):
        why = "in place of one that is gone" if action.replacement else "to grow"
        return JobNews("ReplicaAsked", f"a replica is asked for at place {action.place}, {why}")
    if isinstance(action, DrainReplica):
        return JobNews("ReplicaLeaves", f"{action.name} is asked to leave: {action.reason}", warns=bool(action.blame))
    return JobNews("ReplicaGone", f"{action.name} is given back: {action.reason}", _lost(action))


def _lost(action: ReleaseReplica) -> bool:
    return action.reason != "ended" or bool(action.blame)


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"{number}{ending}"


def event(job: TrainingJob, news: JobNews, now: Instant) -> dict[str, Any]:
    """Manifest of an event; the same news of the same second gives the same event."""
    at, kind = stamp(now), {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND}
    mark = hashlib.sha256(f"{job.uid} {news.reason} {news.message} {at}".encode()).hexdigest()[:16]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{job.name}.{mark}", "namespace": job.namespace},
        "involvedObject": {**kind, "name": job.name, "namespace": job.namespace, "uid": job.uid},
        "type": "Warning" if news.warns else "Normal",
        "reason": news.reason,
        "message": news.message[:1024],
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
        "source": {"component": "regrow-operator"},
        "reportingComponent": "regrow-operator",
        "reportingInstance": "",
    }
