"""A pod of a job as the API server has it: the little that counts. Pure."""

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
"""Reasons that a kubelet gives; older ones give no condition `DisruptionTarget`."""
_CANNOT_START: Final = (
    *("ImagePullBackOff", "ErrImagePull", "ErrImageNeverPull", "InvalidImageName"),
    *("CreateContainerConfigError", "CreateContainerError", "RunContainerError"),
)
_USUAL: Final = ("", "waiting", "PodInitializing", "ContainerCreating")


class HeldUp(msgspec.Struct, frozen=True):
    """Why a pod does not come to run, by its kubelet; empty: nothing is known. `logs`: the init container."""

    reason: str = ""
    text: str = ""
    logs: str = ""


class PodSeen(msgspec.Struct, frozen=True):
    """The little that counts of a pod; the rest is not kept."""

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
    """Of the container that trains."""
    node: str = ""
    ip: str = ""
    gated: bool = False
    ready: bool = False
    deleted_at: Instant | None = None
    """Time when it should have ended, its grace included, after it was deleted."""
    forced: bool = False
    """It was deleted, and has no grace (any more): it is there for its finalizers alone, or since nobody reaches it."""
    group: str = ""
    """Of Kueue's groups the one that it belongs to."""
    role: str = ""
    """As Kueue is told it."""
    shut_out: bool = False
    """It waits at Kueue's gate, and Kueue has let go of it: its group was over when it came."""
    scheduled: Instant | None = None
    started: Instant | None = None
    finished: Instant | None = None
    exit_code: int | None = None
    reason: str = ""
    disrupted: bool = False
    """Its node or the cluster has ended it, with whatever code its script has left."""
    held_up: HeldUp = HeldUp()
    others_run: tuple[str, ...] = ()
    """Containers that go on although the one that trains has ended."""
    avoids: tuple[str, ...] = ()
    """Nodes that it was kept away from when it was made."""
    topology: str = ""
    """Place of its node as it was told; empty: not yet."""
    ranked: bool = True
    """True if it knows which node of the job it is, or does not ask."""


def read_pod(found: dict[str, Any]) -> PodSeen | None:
    """Of a pod that is a replica's; None: of any other."""
    meta, status = found["metadata"], found.get("status") or {}
    labels = meta.get("labels") or {}
    if not {JOB_LABEL, REPLICA_LABEL, PLACE_LABEL, ATTEMPT_LABEL} <= labels.keys():
        return None
    if not (labels[PLACE_LABEL].isdecimal() and labels[ATTEMPT_LABEL].isdecimal()):
        return None  # somebody else has written them
    spec = found.get("spec") or {}
    conditions = {each.get("type"): each for each in status.get("conditions") or []}
    states = {each.get("name", ""): each.get("state") or {} for each in status.get("containerStatuses") or []}
    scheduled = conditions.get("PodScheduled") or {}
    notes = meta.get("annotations") or {}
    trains = training_container(found)
    # The kubelet sorts statuses by name: the first one may be any container's.
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
    """The container that trains, of a pod's; the first one where none is named."""
    containers = (found.get("spec") or {}).get("containers") or [{}]
    name = (found["metadata"].get("annotations") or {}).get(TRAINS)
    return next((each for each in containers if each.get("name") == name), containers[0])


def instant(text: str | None) -> Instant | None:
    """Seconds since the epoch of a time as the API server writes it."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() if text else None


def index_of(job: TrainingJob, pod: PodSeen) -> int:
    """Number of the pod in its replica."""
    return int(pod.name.rsplit("-", 1)[-1]) if job.spec.pods_per_replica > 1 else 0


def has_ended(pod: PodSeen) -> bool:
    """True if the container that trains has ended for good."""
    return pod.exit_code is not None or pod.phase in ENDED


def is_gone(pod: PodSeen, fence: Seconds, now: Instant) -> bool:
    """True if it was deleted and nothing of it runs: only an object that some finalizer keeps is left.

    A pod without a node gets none after it was deleted. `fence`: time after which nothing of a pod ended by force runs.
    """
    if pod.deleted_at is None:
        return False
    return pod.phase in ENDED or not pod.node or (pod.forced and now >= pod.deleted_at + fence)


def open_group(job: TrainingJob, pods: Sequence[PodSeen]) -> str:
    """The group in which a pod of the gang takes the place of one that is gone; empty: there is none.

    A group is over when nobody of it runs or waits. Who has ended with 0 keeps its place there, though not its quota;
    and pods of an older operator have other roles. `pods`: all there are, also those that are gone.
    """
    gang = [
        pod for pod in pods if pod.group and pod.attempt == job.status.attempt and pod.place < job.spec.replica_count
    ]
    here = [pod for pod in gang if pod.deleted_at is None and not has_ended(pod) and not pod.shut_out]
    group = here[0].group if here else ""
    shut = any(pod.phase == "Succeeded" or pod.role != GANG_ROLE for pod in gang if pod.group == group)
    return "" if shut else group


def present(job: TrainingJob, pods: Sequence[PodSeen], now: Instant) -> list[PodSeen]:
    """Of all pods under the job's name those that are its own, and not gone."""
    fence = job.spec.fence_timeout_in_seconds
    return [pod for pod in pods if pod.owner == job.uid and not is_gone(pod, fence, now)]


def _held_up(status: dict[str, Any]) -> HeldUp:
    """Of a pod that waits, or has ended before its containers began.

    Init containers begin one after another, so the last one that has begun counts; a sidecar that is restarted holds up
    nobody once the next one has begun.
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
    """Why it waits, or its state."""
    state = container.get("state") or {}
    return (state.get("waiting") or {}).get("reason") or next(iter(state), "")
