"""The relevant fields of a job's pod, read from the API server's object. Pure."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import msgspec

from regrow.core.ids import Instant, Seconds
from regrow_clusters.operator.backends import GANG_ROLE, GROUP_LABEL, KUEUE_FINALIZER, KUEUE_GATE, ROLE
from regrow_clusters.operator.objects import (
    ATTEMPT_LABEL,
    AVOIDS,
    JOB_LABEL,
    NODE_RANK,
    PLACE_LABEL,
    REPLICA_LABEL,
    TOPOLOGY,
    TRAINS,
    UID_LABEL,
    is_leader,
)
from regrow_clusters.operator.resource import TrainingJob

ENDED: Final = ("Succeeded", "Failed")
_ENDED_BY_NODE: Final = ("Evicted", "NodeShutdown", "Terminated", "Preempting")
"""Reasons that a kubelet gives; old kubelets set no condition `DisruptionTarget`."""
_CANNOT_START: Final = (
    *("ImagePullBackOff", "ErrImagePull", "ErrImageNeverPull", "InvalidImageName"),
    *("CreateContainerConfigError", "CreateContainerError", "RunContainerError"),
)
_USUAL: Final = ("", "waiting", "PodInitializing", "ContainerCreating")


class HeldUp(msgspec.Struct, frozen=True):
    """Why a pod does not start, by its kubelet; empty: unknown. `logs`: the init container whose logs show why."""

    reason: str = ""
    text: str = ""
    logs: str = ""


class PodSeen(msgspec.Struct, frozen=True):
    """The relevant fields of a pod; the rest is not kept."""

    name: str
    uid: str
    version: str
    job: str
    replica: str
    place: int
    attempt: int
    owner: str
    leader: bool
    phase: str
    created: Instant
    image: str = ""
    """Image of the container that trains."""
    node: str = ""
    ip: str = ""
    gated: bool = False
    ready: bool = False
    deleted_at: Instant | None = None
    """After a deletion: the time by which it should have ended, its grace included."""
    forced: bool = False
    """It was deleted without remaining grace: it exists only for its finalizers, or as its node is unreachable."""
    group: str = ""
    """Its pod group in Kueue."""
    role: str = ""
    """Its role in Kueue's group, from the annotation."""
    shut_out: bool = False
    """It waits at Kueue's scheduling gate, but Kueue manages it no more: its group was over when it was created."""
    scheduled: Instant | None = None
    started: Instant | None = None
    finished: Instant | None = None
    exit_code: int | None = None
    reason: str = ""
    disrupted: bool = False
    """Its node or the cluster has ended it; the exit code of its script does not count."""
    held_up: HeldUp = HeldUp()
    others_run: tuple[str, ...] = ()
    """Containers that still run although the one that trains has ended."""
    avoids: tuple[str, ...] = ()
    """Nodes that its affinity excluded when it was created."""
    topology: str = ""
    """Place of its node in the network, as annotated; empty: not annotated yet."""
    ranked: bool = True
    """True if its node rank is annotated, or it needs none."""


def read_pod(found: dict[str, Any]) -> PodSeen | None:
    """Read a pod of a replica; None for any other pod."""
    meta, status = found["metadata"], found.get("status") or {}
    labels = meta.get("labels") or {}
    if not {JOB_LABEL, REPLICA_LABEL, PLACE_LABEL, ATTEMPT_LABEL} <= labels.keys():
        return None
    if not (labels[PLACE_LABEL].isdecimal() and labels[ATTEMPT_LABEL].isdecimal()):
        return None  # these labels are not the operator's
    spec = found.get("spec") or {}
    conditions = {each.get("type"): each for each in status.get("conditions") or []}
    states = {each.get("name", ""): each.get("state") or {} for each in status.get("containerStatuses") or []}
    scheduled = conditions.get("PodScheduled") or {}
    notes = meta.get("annotations") or {}
    trains = training_container(found)
    # The kubelet sorts statuses by name: the first one may belong to any container.
    state = states.get(trains.get("name", ""), {})
    ended, running = state.get("terminated") or {}, state.get("running") or {}
    kept = KUEUE_FINALIZER in (meta.get("finalizers") or [])
    disrupted = (conditions.get("DisruptionTarget") or {}).get("status") == "True"
    taken = ended or running or disrupted or status.get("reason") or meta.get("deletionTimestamp")
    gates = [each.get("name") for each in spec.get("schedulingGates") or []]
    return PodSeen(
        name=meta["name"],
        uid=str(meta.get("uid", "")),
        version=str(meta.get("resourceVersion", "")),
        job=labels[JOB_LABEL],
        replica=labels[REPLICA_LABEL],
        place=int(labels[PLACE_LABEL]),
        attempt=int(labels[ATTEMPT_LABEL]),
        owner=labels.get(UID_LABEL, ""),
        leader=is_leader(found),
        phase=status.get("phase", "Pending"),
        created=instant(meta.get("creationTimestamp")) or 0.0,
        image=trains.get("image", ""),
        node=spec.get("nodeName", ""),
        ip=status.get("podIP", ""),
        gated=bool(gates),
        ready=(conditions.get("Ready") or {}).get("status") == "True",
        deleted_at=instant(meta.get("deletionTimestamp")),
        forced=meta.get("deletionGracePeriodSeconds") == 0,
        group=labels.get(GROUP_LABEL, ""),
        role=notes.get(ROLE, ""),
        shut_out=GROUP_LABEL in labels and gates == [KUEUE_GATE] and not kept,
        scheduled=instant(scheduled.get("lastTransitionTime")) if scheduled.get("status") == "True" else None,
        started=instant(running.get("startedAt") or ended.get("startedAt")),
        finished=instant(ended.get("finishedAt")),
        exit_code=ended.get("exitCode"),
        reason=status.get("reason") or ended.get("reason") or "",
        disrupted=disrupted or status.get("reason") in _ENDED_BY_NODE,
        held_up=HeldUp() if taken else _held_up(status),
        others_run=tuple(sorted(name for name, state in states.items() if ended and "running" in state)),
        avoids=tuple(node for node in notes.get(AVOIDS, "").split(",") if node),
        topology=notes.get(TOPOLOGY, ""),
        ranked=notes.get(NODE_RANK, "-") != "",
    )


def training_container(found: dict[str, Any]) -> dict[str, Any]:
    """The container of a pod that trains; the first one if no annotation names it."""
    containers = (found.get("spec") or {}).get("containers") or [{}]
    name = (found["metadata"].get("annotations") or {}).get(TRAINS)
    return next((each for each in containers if each.get("name") == name), containers[0])


def instant(text: str | None) -> Instant | None:
    """Seconds since the epoch of a time in the API server's format."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() if text else None


def index_of(job: TrainingJob, pod: PodSeen) -> int:
    """Number of the pod in its replica."""
    return int(pod.name.rsplit("-", 1)[-1]) if job.spec.pods_per_replica > 1 else 0


def has_ended(pod: PodSeen) -> bool:
    """True if the container that trains has ended for good."""
    return pod.exit_code is not None or pod.phase in ENDED


def is_gone(pod: PodSeen, fence: Seconds, now: Instant) -> bool:
    """True if it was deleted and none of its processes runs: a finalizer keeps only the object.

    A deleted pod without a node gets none any more. `fence`: time after which no process of a force-deleted pod runs.
    """
    if pod.deleted_at is None:
        return False
    return pod.phase in ENDED or not pod.node or (pod.forced and now >= pod.deleted_at + fence)


def open_group(job: TrainingJob, pods: Sequence[PodSeen]) -> str:
    """Name of the group in which a pod of the gang can replace a lost one; empty: there is none.

    A group is over when none of its pods runs or waits. A pod that ended with 0 keeps its place there, though not its
    quota; and pods of an older operator have other roles. `pods`: all existing ones, also those that are gone.
    """
    gang = [
        pod for pod in pods if pod.group and pod.attempt == job.status.attempt and pod.place < job.spec.replica_count
    ]
    here = [pod for pod in gang if pod.deleted_at is None and not has_ended(pod) and not pod.shut_out]
    group = here[0].group if here else ""
    shut = any(pod.phase == "Succeeded" or pod.role != GANG_ROLE for pod in gang if pod.group == group)
    return "" if shut else group


def present(job: TrainingJob, pods: Sequence[PodSeen], now: Instant) -> list[PodSeen]:
    """The pods under the job's name that belong to this job and are not gone."""
    fence = job.spec.fence_timeout_in_seconds
    return [pod for pod in pods if pod.owner == job.uid and not is_gone(pod, fence, now)]


def _held_up(status: dict[str, Any]) -> HeldUp:
    """Why a pod waits, or ended before its containers began.

    Init containers begin one after another, so the last one that has begun counts; a restarted sidecar holds up no
    container once the next one has begun.
    """
    waits = status.get("phase") == "Pending"
    reason = next((each for each in map(_word, status.get("containerStatuses") or []) if each in _CANNOT_START), "")
    if waits and reason:
        return HeldUp(reason, f"its {_failing(reason)} cannot be started")
    begun = [each for each in status.get("initContainerStatuses") or [] if _word(each) not in _USUAL]
    name, reason = (begun[-1].get("name", ""), _word(begun[-1])) if begun else ("", "")
    if waits and reason in _CANNOT_START:
        return HeldUp(f"Init:{reason}", f"the {_failing(reason)} of its init container {name} cannot be started")
    ended = (begun[-1].get("lastState" if waits else "state") or {}).get("terminated") or {} if begun else {}
    code, again = ended.get("exitCode"), ", again and again" if waits else ""
    if reason == "CrashLoopBackOff" if waits else code:
        reason = reason if waits else ended.get("reason") or "Error"
        return HeldUp(f"Init:{reason}", f"its init container {name} ended with code {code}{again}", name)
    return HeldUp()


def _failing(reason: str) -> str:
    return "image" if "Image" in reason else "container"


def _word(container: dict[str, Any]) -> str:
    """Reason why a container waits, or the name of its state."""
    state = container.get("state") or {}
    return (state.get("waiting") or {}).get("reason") or next(iter(state), "")
