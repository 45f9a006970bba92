"""Reading of a job from its pods, in the planner's terms. Pure."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

import msgspec

from regrow.core.exit_codes import OK, RUN_AGAIN, UNPROVEN, USAGE
from regrow.core.ids import Instant
from regrow.core.verdicts import HealthVerdict
from regrow.observe.watch.present import JobFigures
from regrow_clusters.cluster.observed import AvoidedNode, JobSeen, JobStage, ReplicaStage
from regrow_clusters.operator.observed.pod_seen import PodSeen, has_ended, index_of
from regrow_clusters.operator.observed.replicas import PodGroups
from regrow_clusters.operator.resource import AvoidedNodeStatus, TrainingJob

MENDED: Final = "Mended"
_FORGIVEN_AFTER: Final = 600.0
_LONGEST_PAUSE: Final = 300.0


class JobReading(msgspec.Struct, frozen=True):
    """A job as it is now. `failed`: why it is over; `anew`: its gang must be restarted, and none of its pods is left.

    Until the gang has begun, each place in `seen` is a pod.
    """

    seen: JobSeen
    started: bool
    first: JobSeen | None = None
    """While the job trains: the pods of replica 0, if it has several, each as if it were a replica."""
    rest: tuple[str, ...] = ()
    """Pods that must leave because another pod of their replica is gone."""
    lingering: tuple[str, ...] = ()
    """Pods that must leave because only containers that do not train still run in them."""
    over: str = ""
    failed: str = ""
    still: tuple[str, ...] = ()
    """After the job is over: containers that still run and hold their pod's node."""
    anew: bool = False
    running: int = 0
    waiting: int = 0


def read(job: TrainingJob, pods: list[PodSeen], now: Instant, bad: tuple[AvoidedNode, ...] | None = ()) -> JobReading:
    """Read the present state from the job's pods. Pods that only a finalizer keeps must be left out of `pods`.

    `bad`: nodes that the cluster reports as bad; None: not listed yet, so waiting pods are left alone.
    """
    if bad is None:
        pods, bad = [msgspec.structs.replace(pod, avoids=()) for pod in pods], ()
    current = [each for each in pods if each.attempt == job.status.attempt]
    leader = next((each for each in current if each.leader), None)
    groups = PodGroups(job, pods, now, leads=leader is not None and not has_ended(leader))
    replicas = groups.replicas()
    running = sum(each.stage is ReplicaStage.RUNNING for each in replicas)
    here = {each.place for each in replicas if each.stage is ReplicaStage.RUNNING}
    whole = here >= set(range(job.spec.replica_count))
    started = job.status.started_attempt >= job.status.attempt or whole
    mended = _mended(job)
    edited = bool(job.edited) and not started  # no pod trains yet: the gang begins with the new specification
    over, failed = (job.status.over, "") if job.status.over else _outcome(job, leader)
    if mended:
        over = ""
    broken = mended or edited or (started and (leader is None or has_ended(leader) or leader.deleted_at is not None))
    if leader is not None and has_ended(leader) and not over:
        broken = True  # also before the gang was whole: the other pods would wait for it in vain
    if over or job.deleting:
        stage = JobStage.OVER if over else JobStage.STOPPED
    elif job.spec.suspend:
        stage = JobStage.STOPPED
    elif broken:
        stage = JobStage.BROKEN
    else:
        stage = JobStage.TRAINING if started else JobStage.NEW
    anew = stage is JobStage.BROKEN and not pods
    apart = job.spec.pods_per_replica > 1
    first = leader.replica if apart and leader is not None and stage is JobStage.TRAINING else ""
    single = apart and stage is JobStage.NEW
    replicas = groups.replicas(first) if first else replicas
    seen = JobSeen(
        stage,
        tuple(groups.places() if single else replicas),
        granted=job.status.granted,
        changed_at=job.status.changed_at,
        retry_at=_retry_at(job, now),
        bad_nodes=(*(_bad(each) for each in job.status.bad_nodes), *bad),
    )
    return JobReading(
        seen,
        started,
        first=msgspec.structs.replace(seen, replicas=tuple(groups.places(first))) if first else None,
        rest=() if not apart or single else groups.left_over() if over else groups.rest(first),
        lingering=() if over else groups.lingering(),
        over=MENDED if mended and not anew else over,
        failed=failed,
        still=tuple(f"{name} of {pod.name}" for pod in pods for name in pod.others_run) if over else (),
        anew=anew,
        running=running,
        waiting=sum(each.waits for each in replicas),
    )


def _bad(node: AvoidedNodeStatus) -> AvoidedNode:
    return AvoidedNode(node.name, node.until, node.reason, leave=node.quarantined)


def node_of(job: TrainingJob, pods: list[PodSeen], name: str) -> str:
    """Cluster node of the pod that is the job's node `name`; empty: there is no such pod, or it has no node."""
    for pod in pods:
        called = name in (pod.name, f"node{job.node_rank(pod.place, index_of(job, pod))}")
        if called and pod.attempt == job.status.attempt and not has_ended(pod):
            return pod.node
    return ""


def _mended(job: TrainingJob) -> bool:
    """True if a job failed before its gang had run, and was edited since: it is tried again."""
    edited = job.generation > job.status.observed_generation
    early = job.status.started_attempt == 0
    return job.status.over == MENDED or (job.status.over == "Failed" and early and edited)


def _outcome(job: TrainingJob, leader: PodSeen | None) -> tuple[str, str]:
    """Final outcome that pod 0 has reported; empty: none."""
    if leader is None or not has_ended(leader) or leader.deleted_at is not None:
        return "", ""
    code = leader.exit_code
    if code == OK or (code is None and leader.phase == "Succeeded"):
        return "Succeeded", ""
    if code is not None and 0 < code < 128 and code != RUN_AGAIN and (code == UNPROVEN or not leader.disrupted):
        hint = "regrow is not in the image" if code in (126, 127) else f"see kubectl logs {leader.name}"
        if code == UNPROVEN:
            hint = f"it was trained to its end, but its result is not proven; {hint}"
        return "Failed", f"pod 0 ({leader.name}) exited with code {code}: {hint}"
    if leader.reason in ("StartError", "ContainerCannotRun"):
        return "Failed", f"pod 0 ({leader.name}) could not start its command: is regrow in the image?"
    if job.status.attempt > job.spec.max_restarts:
        return "Failed", f"the gang was started {job.status.attempt} times; spec.maxRestarts is {job.spec.max_restarts}"
    return "", ""


def _retry_at(job: TrainingJob, now: Instant) -> Instant:
    """Time of the next start: no pause after the first failure, then pauses that double with each failure."""
    failures = job.status.failures
    if failures <= 1 or now - job.status.failed_at > _FORGIVEN_AFTER:
        return 0.0
    return job.status.failed_at + min(_LONGEST_PAUSE, 5.0 * 2.0 ** min(failures - 2, 10))


def start_trouble(pods: list[PodSeen]) -> tuple[str, str] | None:
    """Reason why a pod with a node does not start, and a sentence with the cure; None: there is no such pod."""
    for pod in pods:
        if (held := pod.held_up).reason:
            see = f"kubectl logs {pod.name} -c {held.logs}" if held.logs else f"kubectl describe pod {pod.name}"
            return held.reason, f"pod {pod.name}: {held.text}; see {see}"
    return None


def join_trouble(job: TrainingJob, pods: list[PodSeen]) -> str:
    """Reason why a replica cannot join the running job, with the cure; empty: none was refused.

    It may have another version of regrow than pod 0; flags and messages may differ between versions.
    """
    current = [pod for pod in pods if pod.attempt == job.status.attempt]
    leader = next((pod for pod in current if pod.leader and not has_ended(pod)), None)
    turned = next((pod for pod in current if not pod.leader and pod.exit_code == USAGE), None)
    if leader is None or turned is None:
        return ""
    text = f"pod {turned.name} ended with code {USAGE}: pod 0 refuses it, or its regrow does not know its flags"
    if turned.image == leader.image:
        return f"{text}; kubectl logs {turned.name} says why; the pods that train go on"
    text = f"{text}; its image is {turned.image}, and pod 0 has {leader.image}; the pods that train go on"
    return f"{text}; name pod 0's image in spec.template, or suspend and resume the job to have the other in all pods"


def found_nodes(
    job: TrainingJob, pods: list[PodSeen], figures: JobFigures | None, now: Instant
) -> tuple[AvoidedNodeStatus, ...]:
    """Nodes of the cluster on which the job's own examinations have failed."""
    found = {}
    for each in () if figures is None else figures.nodes:
        if node := node_of(job, pods, each.node):
            until = datetime.fromtimestamp(now + job.spec.bad_node_time_in_seconds, UTC)
            found[node] = AvoidedNodeStatus(node, until, each.reason, each.quarantined)
    return tuple(found[name] for name in sorted(found))


def against(
    pods: list[PodSeen], known: Mapping[str, list[HealthVerdict]], found: tuple[AvoidedNodeStatus, ...]
) -> dict[str, str]:
    """Evidence against the job's present nodes: the cluster's verdicts, and the job's own findings."""
    here = {pod.node for pod in pods if pod.node and not has_ended(pod)}
    own = {each.name: each.reason for each in found if each.name in here}
    return {node: known[node][0].text for node in here if node in known} | own
