"""A pod of a job as the API server has it: the little that counts. Pure."""

from datetime import datetime
from typing import Any

import msgspec

from regrow.core.ids import Instant
from regrow_clusters.operator.objects import (
    ATTEMPT_LABEL,
    AVOIDS,
    JOB_LABEL,
    NODE_RANK,
    PLACE_LABEL,
    REPLICA_LABEL,
    TOPOLOGY,
    UID_LABEL,
    is_leader,
)
from regrow_clusters.operator.resource import TrainingJob


class PodSeen(msgspec.Struct, frozen=True):
    """The little that counts of a pod; the rest is not kept."""

    name: str
    version: str
    job: str
    replica: str
    place: int
    attempt: int
    owner: str
    leader: bool
    phase: str
    created: Instant
    node: str = ""
    ip: str = ""
    gated: bool = False
    ready: bool = False
    deleted_at: Instant | None = None
    """When it should have ended, its grace included, after it was deleted."""
    scheduled: Instant | None = None
    started: Instant | None = None
    finished: Instant | None = None
    exit_code: int | None = None
    reason: str = ""
    waiting: str = ""
    """Why its container does not start."""
    avoids: tuple[str, ...] = ()
    """Nodes that it was kept away from when it was made."""
    topology: str = ""
    """Where it was told that its node is; empty: nobody has yet."""
    seated: bool = True
    """Whether it knows which node of the job it is, or does not ask."""


def read_pod(found: dict[str, Any]) -> PodSeen | None:
    """Of a pod that is a replica's; None: of any other."""
    meta, status = found["metadata"], found.get("status") or {}
    labels = meta.get("labels") or {}
    if not {JOB_LABEL, REPLICA_LABEL, PLACE_LABEL, ATTEMPT_LABEL} <= labels.keys():
        return None
    spec = found.get("spec") or {}
    conditions = {each.get("type"): each for each in status.get("conditions") or []}
    first = (status.get("containerStatuses") or [{}])[0].get("state") or {}
    ended, running = first.get("terminated") or {}, first.get("running") or {}
    scheduled = conditions.get("PodScheduled") or {}
    notes = meta.get("annotations") or {}
    return PodSeen(
        name=meta["name"],
        version=str(meta.get("resourceVersion", "")),
        job=labels[JOB_LABEL],
        replica=labels[REPLICA_LABEL],
        place=int(labels[PLACE_LABEL]),
        attempt=int(labels[ATTEMPT_LABEL]),
        owner=labels.get(UID_LABEL, ""),
        leader=is_leader(found),
        phase=status.get("phase", "Pending"),
        created=instant(meta.get("creationTimestamp")) or 0.0,
        node=spec.get("nodeName", ""),
        ip=status.get("podIP", ""),
        gated=bool(spec.get("schedulingGates")),
        ready=(conditions.get("Ready") or {}).get("status") == "True",
        deleted_at=instant(meta.get("deletionTimestamp")),
        scheduled=instant(scheduled.get("lastTransitionTime")) if scheduled.get("status") == "True" else None,
        started=instant(running.get("startedAt") or ended.get("startedAt")),
        finished=instant(ended.get("finishedAt")),
        exit_code=ended.get("exitCode"),
        reason=status.get("reason") or ended.get("reason") or "",
        waiting=(first.get("waiting") or {}).get("reason", ""),
        avoids=tuple(node for node in notes.get(AVOIDS, "").split(",") if node),
        topology=notes.get(TOPOLOGY, ""),
        seated=notes.get(NODE_RANK, "-") != "",
    )


def instant(text: str | None) -> Instant | None:
    """Seconds since the epoch of a time as the API server writes it."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() if text else None


def index_of(job: TrainingJob, pod: PodSeen) -> int:
    """Which of its replica's pods it is."""
    return int(pod.name.rsplit("-", 1)[-1]) if job.spec.pods_per_replica > 1 else 0


def has_ended(pod: PodSeen) -> bool:
    """Whether its containers run no more and never will."""
    return pod.phase in ("Succeeded", "Failed")
