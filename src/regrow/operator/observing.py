"""What a job's pods say of it, in the planner's words. Pure."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

import msgspec

from regrow.cluster.observed import BadNode, JobSeen, JobStage, ReplicaSeen, ReplicaStage
from regrow.core.exit_codes import OK, RUN_AGAIN
from regrow.core.ids import Instant
from regrow.core.verdicts import HealthVerdict
from regrow.observe.watch.present import JobFigures
from regrow.operator.objects import (
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
from regrow.operator.resource import KeptNode, TrainingJob

MENDED: Final = "Mended"
_QUIET_END: Final = 5.0
"""Who has ended in peace is not replaced sooner: it may be the job that has ended, and pod 0 says so later."""
_FORGIVEN_AFTER: Final = 600.0
_LONGEST_PAUSE: Final = 300.0
_NODES_FAULT: Final = frozenset(
    {"NodeLost", "NodeShutdown", "Terminated", "NodeAffinity", "UnexpectedAdmissionError", "OutOfcpu", "OutOfmemory"}
)
_CANNOT_START: Final = frozenset(
    {
        "ImagePullBackOff",
        "ErrImagePull",
        "InvalidImageName",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
    }
)


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


class JobReading(msgspec.Struct, frozen=True):
    """A job as it is now. `failed`: why it is over; `anew`: its gang must start again, and nothing is left of it."""

    seen: JobSeen
    started: bool
    over: str = ""
    failed: str = ""
    anew: bool = False
    running: int = 0
    waiting: int = 0


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


def read(job: TrainingJob, pods: list[PodSeen], now: Instant, bad: tuple[BadNode, ...] | None = ()) -> JobReading:
    """What stands now, of all pods of the job there are.

    `bad`: nodes on which the cluster has something to blame; None: it has not been asked yet, so who waits is left to.
    """
    if bad is None:
        pods, bad = [msgspec.structs.replace(pod, avoids=()) for pod in pods], ()
    current = [each for each in pods if each.attempt == job.status.attempt]
    leader = next((each for each in current if each.leader), None)
    quiet = _QUIET_END if leader is not None and not _ended(leader) else 0.0
    replicas = _replicas(job, pods, quiet, now)
    running = sum(each.stage is ReplicaStage.RUNNING for each in replicas)
    waiting = sum(each.waits for each in replicas)
    here = {each.place for each in replicas if each.stage is ReplicaStage.RUNNING}
    whole = here >= set(range(job.spec.replica_count))
    started = job.status.started_attempt >= job.status.attempt or whole
    mended = _mended(job)
    over, failed = (job.status.over, "") if job.status.over else _outcome(job, leader)
    if mended:
        over = ""
    broken = mended or (started and (leader is None or _ended(leader) or leader.deleted_at is not None))
    if leader is not None and _ended(leader) and not over:
        broken = True  # also before the gang was whole: the others would wait for it in vain
    if over or job.deleting:
        stage = JobStage.OVER if over else JobStage.STOPPED
    elif job.spec.suspend:
        stage = JobStage.STOPPED
    elif broken:
        stage = JobStage.BROKEN
    else:
        stage = JobStage.TRAINING if started else JobStage.NEW
    anew = stage is JobStage.BROKEN and not pods
    seen = JobSeen(
        stage,
        tuple(replicas),
        granted=job.status.granted,
        changed_at=job.status.changed_at,
        retry_at=_retry_at(job, now),
        bad_nodes=(*(_bad(each) for each in job.status.avoided_nodes), *bad),
    )
    return JobReading(seen, started, MENDED if mended and not anew else over, failed, anew, running, waiting)


def _bad(node: KeptNode) -> BadNode:
    return BadNode(node.name, node.until, node.reason, leave=node.quarantined)


def node_of(job: TrainingJob, pods: list[PodSeen], name: str) -> str:
    """Where the pod is that regrow calls by this name of a node; empty: it is not there, or has no node."""
    for pod in pods:
        called = name in (pod.name, f"node{job.node_rank(pod.place, index_of(job, pod))}")
        if called and pod.attempt == job.status.attempt and not _ended(pod):
            return pod.node
    return ""


def index_of(job: TrainingJob, pod: PodSeen) -> int:
    """Which of its replica's pods it is."""
    return int(pod.name.rsplit("-", 1)[-1]) if job.spec.pods_per_replica > 1 else 0


def _mended(job: TrainingJob) -> bool:
    """Whether a job that failed before its gang had run has another specification since: it is tried again."""
    edited = job.generation > job.status.observed_generation
    early = job.status.started_attempt == 0
    return job.status.over == MENDED or (job.status.over == "Failed" and early and edited)


def _outcome(job: TrainingJob, leader: PodSeen | None) -> tuple[str, str]:
    """Whether pod 0 has said how the job ended, for good."""
    if leader is None or not _ended(leader) or leader.deleted_at is not None:
        return "", ""
    if leader.phase == "Succeeded" or leader.exit_code == OK:
        return "Succeeded", ""
    code = leader.exit_code
    if code is not None and 0 < code < 128 and code != RUN_AGAIN:
        hint = "regrow is not in the image" if code in (126, 127) else f"see kubectl logs {leader.name}"
        return "Failed", f"pod 0 ({leader.name}) exited with code {code}: {hint}"
    if leader.reason in ("StartError", "ContainerCannotRun"):
        return "Failed", f"pod 0 ({leader.name}) could not start its command: is regrow in the image?"
    if job.status.attempt > job.spec.max_restarts:
        return "Failed", f"the gang was started {job.status.attempt} times; spec.maxRestarts is {job.spec.max_restarts}"
    return "", ""


def _retry_at(job: TrainingJob, now: Instant) -> Instant:
    """The first failure costs no time, each further one twice as much."""
    failures = job.status.failures
    if failures <= 1 or now - job.status.failed_at > _FORGIVEN_AFTER:
        return 0.0
    return job.status.failed_at + min(_LONGEST_PAUSE, 5.0 * 2.0 ** min(failures - 2, 10))


def _replicas(job: TrainingJob, pods: list[PodSeen], quiet_end: float, now: Instant) -> list[ReplicaSeen]:
    groups: dict[str, list[PodSeen]] = {}
    for pod in pods:
        groups.setdefault(pod.replica, []).append(pod)
    return [_replica(job, name, groups[name], quiet_end, now) for name in sorted(groups)]


def _replica(job: TrainingJob, name: str, pods: list[PodSeen], quiet_end: float, now: Instant) -> ReplicaSeen:
    """Of several pods the one that is least far speaks for the replica; one that is gone speaks for all."""
    missing = len(pods) < job.spec.pods_per_replica
    parts = [_part(job, pod, quiet_end, now) for pod in pods]
    order = [
        ReplicaStage.LEAVING,
        ReplicaStage.LOST,
        ReplicaStage.ENDED,
        ReplicaStage.QUEUED,
        ReplicaStage.STARTING,
        ReplicaStage.RUNNING,
    ]
    worst = min(parts, key=lambda part: order.index(part.stage))
    nodes = tuple(sorted({node for part in parts for node in part.nodes}))
    safe = None if any(part.safe_at is None for part in parts) else max(part.safe_at or 0.0 for part in parts)
    stage = worst.stage
    if missing and worst.counts and any(pod.started for pod in pods):
        stage = ReplicaStage.ENDED  # one of its pods is gone for good: the others are ended too
        safe = max(pod.created for pod in pods)
    blamed = {node for part in parts if part.to_blame for node in part.nodes}
    return ReplicaSeen(
        name,
        pods[0].place,
        stage,
        worst.since,
        tuple(sorted(blamed)) or nodes,
        leave_by=worst.leave_by,
        safe_at=safe,
        to_blame=bool(blamed),
        avoids=tuple(sorted({node for part in parts for node in part.avoids})),
    )


def _part(job: TrainingJob, pod: PodSeen, quiet_end: float, now: Instant) -> ReplicaSeen:
    """One pod, as if it were a replica."""
    nodes = (pod.node,) if pod.node else ()

    def seen(stage: ReplicaStage, since: Instant | None, **more: Any) -> ReplicaSeen:
        return ReplicaSeen(pod.name, pod.place, stage, pod.created if since is None else since, nodes, **more)

    if pod.deleted_at is not None:
        safe = pod.deleted_at + job.spec.fence_timeout_in_seconds
        # A deletion says nothing of a node; but whoever is still there after that is on one that nobody reaches.
        return seen(ReplicaStage.LEAVING, pod.deleted_at, leave_by=pod.deleted_at, safe_at=safe, to_blame=now >= safe)
    if _ended(pod):
        at = pod.finished or pod.created
        quiet = pod.exit_code in (OK, RUN_AGAIN) or pod.phase == "Succeeded"
        return seen(
            ReplicaStage.ENDED,
            at,
            safe_at=at + quiet_end if quiet else at,
            to_blame=pod.reason in _NODES_FAULT,
        )
    if pod.phase == "Unknown":
        return seen(ReplicaStage.LOST, pod.created, to_blame=True)
    if pod.phase == "Running":
        return seen(ReplicaStage.RUNNING, pod.started)
    if pod.node:
        return seen(ReplicaStage.STARTING, pod.scheduled)
    return seen(ReplicaStage.QUEUED, pod.created, avoids=pod.avoids)


def _ended(pod: PodSeen) -> bool:
    return pod.phase in ("Succeeded", "Failed")


def start_trouble(pods: list[PodSeen]) -> tuple[str, str] | None:
    """Why a pod does not come to run though it has a node: its reason, and a sentence with the cure."""
    for pod in pods:
        if pod.waiting in _CANNOT_START:
            what = "image" if "Image" in pod.waiting else "container"
            return pod.waiting, f"pod {pod.name}: its {what} cannot be started; see kubectl describe pod {pod.name}"
    return None


def found_nodes(
    job: TrainingJob, pods: list[PodSeen], figures: JobFigures | None, now: Instant
) -> tuple[KeptNode, ...]:
    """Nodes of the cluster on which the job's own examinations have failed."""
    found = {}
    for each in () if figures is None else figures.nodes:
        if node := node_of(job, pods, each.node):
            until = now + job.spec.bad_node_time_in_seconds
            found[node] = KeptNode(node, until, each.reason, each.quarantined)
    return tuple(found[name] for name in sorted(found))


def against(
    pods: list[PodSeen], known: Mapping[str, list[HealthVerdict]], found: tuple[KeptNode, ...]
) -> dict[str, str]:
    """What speaks against the nodes that the job has now: the cluster's word, and what it found itself."""
    here = {pod.node for pod in pods if pod.node and not _ended(pod)}
    own = {each.name: each.reason for each in found if each.name in here}
    return {node: known[node][0].text for node in here if node in known} | own
