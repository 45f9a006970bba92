"""Groups a job's pods into replicas for the planner, or into single places where one pod is replaced alone. Pure.

The pods of a replica start and end together: if one is gone, the others are ended too. There are two exceptions. Before
the gang has begun, every pod is a place of its own; and while the job trains, so is every pod of replica 0, because the
coordinator is in the first of them, and must not end because another pod is lost.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from regrow.core.exit_codes import OK, RUN_AGAIN
from regrow.core.ids import Instant
from regrow_clusters.cluster.observed import ReplicaSeen, ReplicaStage
from regrow_clusters.operator.observed.pod_seen import PodSeen, has_ended, index_of
from regrow_clusters.operator.resource import TrainingJob

_QUIET_END: Final = 5.0
"""Seconds before a pod that ended without error is replaced: the job may be over, and pod 0 may report that later."""
_CLOCKS_DIFFER: Final = 15.0  # seconds at most: a pod that ended just now must not seem to have ended long ago
_NODES_FAULT: Final = frozenset(
    {"NodeLost", "NodeShutdown", "Terminated", "NodeAffinity", "UnexpectedAdmissionError", "TopologyAffinityError"}
)
_NO_ROOM: Final = "OutOf"
"""Prefix, before the resource, of a kubelet's reason to refuse a pod: `OutOfcpu`, `OutOfnvidia.com/gpu`."""
_FROM_WORST: Final = (
    ReplicaStage.LEAVING,
    ReplicaStage.LOST,
    ReplicaStage.ENDED,
    ReplicaStage.QUEUED,
    ReplicaStage.STARTING,
    ReplicaStage.RUNNING,
)


class PodGroups:
    """All existing pods of a job at one moment. `leads`: pod 0 exists and has not ended."""

    def __init__(self, job: TrainingJob, pods: Sequence[PodSeen], now: Instant, *, leads: bool) -> None:
        self._job, self._now = job, now
        quiet = _QUIET_END if leads else 0.0
        self._parts = {pod.name: _part(job, pod, quiet, now) for pod in pods}
        self._groups: dict[str, list[PodSeen]] = {}
        for pod in pods:
            self._groups.setdefault(pod.replica, []).append(pod)

    def replicas(self, first: str = "") -> list[ReplicaSeen]:
        """Replicas as wholes. `first`: the one whose pods are replaced alone; it exists as long as its first pod."""
        return [self._first(name) if name == first else self._whole(name) for name in sorted(self._groups)]

    def places(self, replica: str | None = None) -> list[ReplicaSeen]:
        """Each pod of one replica, or of all, as if it were a replica; `place` is then the pod's number."""
        each = self._job.spec.pods_per_replica
        return [
            msgspec.structs.replace(
                self._parts[pod.name], place=index_of(self._job, pod) + (0 if replica else each * pod.place)
            )
            for name in sorted(self._groups)
            if replica in (None, name)
            for pod in self._groups[name]
        ]

    def rest(self, first: str = "") -> tuple[str, ...]:
        """Pods that run or wait while another pod of their replica is gone: they must leave too."""
        broken = [name for name in sorted(self._groups) if name != first and self._is_broken(name)]
        return tuple(part.name for name in broken for part in self._parts_of(name) if part.counts)

    def left_over(self) -> tuple[str, ...]:
        """Pods of a job that is over to be ended: they wait or still run, but their replica does not count any more."""
        over = [name for name in sorted(self._groups) if not self._whole(name).counts]
        parts = [part for name in over for part in self._parts_of(name)]
        return tuple(
            each.name for each in parts if each.counts or (each.stage is ReplicaStage.ENDED and not each.nodes)
        )

    def lingering(self) -> tuple[str, ...]:
        """Pods that must leave because their training has ended while other containers of theirs still run."""
        parts = [self._parts[pod.name] for pods in self._groups.values() for pod in pods if pod.others_run]
        ended = [part for part in parts if part.stage is ReplicaStage.ENDED and part.leave_by is not None]
        return tuple(sorted(part.name for part in ended if (part.leave_by or 0.0) <= self._now))

    def _is_broken(self, name: str) -> bool:
        parts = self._parts_of(name)
        return len(parts) < self._job.spec.pods_per_replica or any(self._is_gone(part) for part in parts)

    def _is_gone(self, part: ReplicaSeen) -> bool:
        ended = part.stage is ReplicaStage.ENDED and part.safe_at is not None and part.safe_at <= self._now
        return ended or part.stage is ReplicaStage.LEAVING

    def _parts_of(self, name: str) -> list[ReplicaSeen]:
        return [self._parts[pod.name] for pod in self._groups[name]]

    def _whole(self, name: str) -> ReplicaSeen:
        """A replica takes the stage of its least advanced pod; it is gone as soon as one of its pods is."""
        parts = self._parts_of(name)
        worst = _worst(parts)
        stage, leave_by = worst.stage, worst.leave_by
        safe = None if any(part.safe_at is None for part in parts) else max(part.safe_at or 0.0 for part in parts)
        if any(part.counts for part in parts):
            if self._is_broken(name):
                stage = ReplicaStage.LEAVING
            elif stage is ReplicaStage.ENDED:
                leave_by = worst.safe_at  # then the other pods must leave
        nodes = tuple(sorted({node for part in parts for node in part.nodes}))
        blamed = tuple(sorted({node for part in parts if part.to_blame for node in part.nodes}))
        return ReplicaSeen(
            name,
            worst.place,
            stage,
            worst.since,
            blamed or nodes,
            leave_by=leave_by,
            safe_at=safe,
            to_blame=bool(blamed),
            says=worst.says,
            avoids=tuple(sorted({node for part in parts for node in part.avoids})),
        )

    def _first(self, name: str) -> ReplicaSeen:
        """Replica 0 of a running job: it runs, or is queued while a pod is missing; its pods are planned one by one."""
        parts = self._parts_of(name)
        leader = self._parts[min(self._groups[name], key=lambda pod: index_of(self._job, pod)).name]
        if leader.stage is not ReplicaStage.RUNNING:
            return msgspec.structs.replace(leader, name=name)
        whole = len(parts) == self._job.spec.pods_per_replica and _worst(parts).stage is ReplicaStage.RUNNING
        stage = ReplicaStage.RUNNING if whole else ReplicaStage.QUEUED
        nodes = tuple(sorted({node for part in parts for node in part.nodes}))
        return msgspec.structs.replace(leader, name=name, stage=stage, nodes=nodes)


def _worst(parts: Sequence[ReplicaSeen]) -> ReplicaSeen:
    return min(parts, key=lambda part: _FROM_WORST.index(part.stage))


def _part(job: TrainingJob, pod: PodSeen, quiet_end: float, now: Instant) -> ReplicaSeen:
    """One pod, as if it were a replica."""
    nodes = (pod.node,) if pod.node else ()

    def seen(stage: ReplicaStage, since: Instant | None, **more: Any) -> ReplicaSeen:
        return ReplicaSeen(pod.name, pod.place, stage, pod.created if since is None else since, nodes, **more)

    if pod.deleted_at is not None:
        safe = pod.deleted_at + job.spec.fence_timeout_in_seconds
        # A deletion is no evidence against a node; but a pod that still exists after `safe` is on an unreachable one.
        return seen(ReplicaStage.LEAVING, pod.deleted_at, leave_by=pod.deleted_at, safe_at=safe, to_blame=now >= safe)
    if pod.shut_out:
        return seen(ReplicaStage.ENDED, pod.created, safe_at=pod.created)
    if has_ended(pod):
        at = pod.finished or pod.created
        quiet = pod.exit_code in (OK, RUN_AGAIN) or pod.phase == "Succeeded"
        if at > now + (_CLOCKS_DIFFER if quiet else 0.0):  # its node's clock is ahead
            at = pod.created
        over = at + quiet_end if quiet else at
        blame = pod.reason in _NODES_FAULT or pod.reason.startswith(_NO_ROOM)
        if pod.others_run:  # it must end by then, and keeps its place until it has
            return seen(ReplicaStage.ENDED, at, leave_by=over, to_blame=blame)
        return seen(ReplicaStage.ENDED, at, safe_at=over, to_blame=blame)
    if pod.phase == "Unknown":
        return seen(ReplicaStage.LOST, pod.created, to_blame=True)
    if pod.phase == "Running":
        return seen(ReplicaStage.RUNNING, pod.started)
    if pod.node:
        return seen(ReplicaStage.STARTING, pod.scheduled, says=pod.held_up.text)
    return seen(ReplicaStage.QUEUED, pod.created, avoids=pod.avoids)
