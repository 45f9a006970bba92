"""Creates and deletes a job's pods, their service and their secret, as the controller has decided."""

import logging
import zlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from regrow.core.ids import Instant, Seconds
from regrow_clusters.cluster.actions import DrainReplica, ReleaseReplica
from regrow_clusters.operator.api import ApiFailure, ApiKind, ClusterApi, Manifest
from regrow_clusters.operator.backends import KUEUE_FINALIZER, backend_of
from regrow_clusters.operator.cache import ClusterCache, JobKey
from regrow_clusters.operator.making.refusals import cure_of, namespace_ends
from regrow_clusters.operator.objects import ReplicaPlace, group_name, pods, secret, service
from regrow_clusters.operator.observed.pod_seen import PodSeen, has_ended, open_group
from regrow_clusters.operator.planning import PodsStart, PodStep
from regrow_clusters.operator.resource import TrainingJob
from regrow_clusters.operator.status import JobFinding

KEEP_EVERY: Final[Seconds] = 300.0
"""Interval at which service and secret are created again, as they may be deleted; a start of pods does so too."""
_KEEP_SOON: Final[Seconds] = 20.0
"""Interval at which they are created again while a pod waits for them."""
_ENDING_FOR: Final[Seconds] = 60.0
_LOG = logging.getLogger("regrow.operator")
Say = Callable[[TrainingJob, JobFinding], Awaitable[None]]


class PodHands:
    """Creates and deletes the objects of all jobs.

    Args:
        cache: receives the created and deleted pods.
        key: the jobs' secrets are derived from it.
        say: writes a condition of a job.
        again: requests another reconciliation of a job.
        drop: asks a job to go on without a pod.
    """

    def __init__(
        self,
        api: ClusterApi,
        cache: ClusterCache,
        key: bytes,
        *,
        say: Say,
        again: Callable[[JobKey], None],
        drop: Callable[[TrainingJob, PodSeen], Awaitable[None]],
    ) -> None:
        self._api, self._cache, self._key = api, cache, key
        self._say, self._again, self._drop = say, again, drop
        self._prepared: dict[str, Instant] = {}
        """By job uid: the time when service and secret were last created or found."""
        self._ended_groups: dict[str, int] = {}
        """By job uid: the attempt of which no PodGroup is left."""
        self._unsure: dict[JobKey, set[str]] = {}
        """Pods whose creation or deletion had no clear answer: they may exist."""
        self.serials: dict[str, int] = {}
        """By job uid: the serial up to which all started replicas are in the cache."""
        self._ending: dict[str, Instant] = {}
        """Namespaces that refuse new objects, and the time of the refusal."""

    def is_ending(self, namespace: str, now: Instant) -> bool:
        """True if the namespace was just reported as being deleted: no object can be created there."""
        return now < self._ending.get(namespace, -_ENDING_FOR) + _ENDING_FOR

    async def find_unsure(self, key: JobKey) -> None:
        """Look up pods that may exist, which must be known before any decision."""
        for name in sorted(self._unsure.get(key, ())):
            try:
                self._cache.put(ApiKind.PODS, await self._api.get(ApiKind.PODS, key[0], name))
            except ApiFailure as failure:
                if not failure.missing:
                    raise
            self._unsure[key].discard(name)
        if not self._unsure.get(key, True):
            del self._unsure[key]

    async def find_others(self, job: TrainingJob) -> bool:
        """Look for pods that another operator has started; True if some were not in the cache.

        Jobs and pods are watched separately: the serial of a replica may arrive before its pods.
        """
        key = (job.namespace, job.name)
        if self.serials.get(job.uid) == job.status.serial:
            return False
        known = {pod.uid for pod in self._cache.pods(key)}
        for each in await self._api.pods_of(*key):
            self._cache.put(ApiKind.PODS, each)
        self.serials[job.uid] = job.status.serial
        return any(pod.uid not in known for pod in self._cache.pods(key))

    async def carry_out(
        self, job: TrainingJob, steps: Sequence[PodStep], seen: Sequence[PodSeen], now: Instant
    ) -> None:
        """Do the steps in their order. Raises `ApiFailure`."""
        for step in steps:
            if isinstance(step, PodsStart):
                await self._prepare(job, now)
                await self._start(job, step.replicas, step.avoid, now)
            else:
                await self._end(job, step, seen)

    async def keep_prepared(self, job: TrainingJob, now: Instant, *, waited_for: bool) -> None:
        """Create service and secret again if they may have been deleted. `waited_for`: a pod cannot start."""
        # The offset spreads the jobs in time when an operator begins to lead.
        last = self._prepared.setdefault(job.uid, now - zlib.crc32(job.uid.encode()) % int(KEEP_EVERY))
        if now < last + (_KEEP_SOON if waited_for else KEEP_EVERY):
            return
        try:
            await self._prepare(job, now)
        except ApiFailure as failure:
            if not failure.refused and not failure.unserved:
                raise
            self._prepared[job.uid] = now  # running pods need none of it; writing `PodsCreated` would cause a retry

    async def delete(self, job: TrainingJob, pod: PodSeen, *, force: bool) -> None:
        """Delete a pod. `force`: none of its processes runs any more."""
        if force and pod.phase == "Running" and not has_ended(pod):
            await self._drop(job, pod)
        key = (job.namespace, job.name)
        try:
            if force and pod.group and not has_ended(pod):
                # Kueue would count the pod as active, and its replacement as surplus.
                await self._api.drop_finalizer(ApiKind.PODS, job.namespace, pod.name, KUEUE_FINALIZER, uid=pod.uid)
        except ApiFailure as failure:
            if not failure.missing:
                raise
        try:
            await self._api.delete(ApiKind.PODS, job.namespace, pod.name, uid=pod.uid, force=force)
        except ApiFailure as failure:
            if not failure.missing and not failure.conflict:
                raise
            if failure.conflict:  # another pod has its name, so this pod is gone
                self._unsure.setdefault(key, set()).add(pod.name)
            self._cache.forget_pod(key, pod)
            self._again(key)

    async def end_groups(self, job: TrainingJob) -> None:
        """Delete the PodGroups of an attempt without pods: a suspended job keeps none."""
        if self._ended_groups.get(job.uid) == job.status.attempt:
            return
        for kind, each in backend_of(job).groups(job):
            try:
                await self._api.delete(kind, job.namespace, each["metadata"]["name"], uid="")
            except ApiFailure as failure:
                if not failure.missing and not failure.refused:
                    raise
                if failure.refused:  # the gang's next start does not depend on it
                    _LOG.warning("job %s/%s: a PodGroup is left: %s", job.namespace, job.name, failure)
        self._ended_groups[job.uid] = job.status.attempt

    async def _prepare(self, job: TrainingJob, now: Instant) -> None:
        self._ended_groups.pop(job.uid, None)
        for kind, body in (
            (ApiKind.SECRETS, secret(job, self._key)),
            (ApiKind.SERVICES, service(job)),
            *backend_of(job).groups(job),
        ):
            try:
                await self._api.create(kind, body)
            except ApiFailure as failure:
                if failure.refused and not namespace_ends(failure) and await self._is_there(job, kind, body):
                    continue  # it exists: admission (quota, queue, class) refuses before the name is compared
                if failure.refused or failure.unserved:
                    await self._say_refused(job, body["kind"].lower(), failure, now)
                if not failure.conflict:
                    raise
        self._prepared[job.uid] = now

    async def _is_there(self, job: TrainingJob, kind: ApiKind, body: Manifest) -> bool:
        if kind in (ApiKind.SECRETS, ApiKind.SERVICES):  # no right to read them: they exist if a gang has run
            return job.status.started_attempt > 0
        try:
            await self._api.get(kind, body["metadata"]["namespace"], body["metadata"]["name"])
        except ApiFailure:
            return False
        return True

    async def _start(
        self, job: TrainingJob, places: Sequence[ReplicaPlace], avoid: tuple[str, ...], now: Instant
    ) -> None:
        made: list[Manifest] = []
        for place in places:
            made.extend(pods(job, place, avoid))
        gang = places[0].place < job.spec.replica_count
        known = [pod for pod in self._cache.pods((job.namespace, job.name)) if pod.owner == job.uid]
        joins = open_group(job, known) if gang else ""
        whole = job.spec.pods_per_replica * job.spec.replica_count
        total = whole if joins or places[0].begins else len(made)
        group = joins or group_name(job, places[0].serial)
        backend_of(job).dress(job, made, group=group, total=total, gang=gang)
        try:
            for pod in made:
                await self._create(job, pod)
        except ApiFailure as failure:
            if failure.refused:
                await self._say_refused(job, "pod", failure, now)
            if not failure.conflict:
                raise

    async def _create(self, job: TrainingJob, pod: Manifest) -> None:
        unsure = self._unsure.setdefault((job.namespace, job.name), set())
        name = pod["metadata"]["name"]
        unsure.add(name)
        try:
            self._cache.put(ApiKind.PODS, await self._api.create(ApiKind.PODS, pod))
        except ApiFailure as failure:
            if failure.conflict or failure.refused:
                unsure.discard(name)  # a clear answer
            raise
        unsure.discard(name)

    async def _end(self, job: TrainingJob, action: DrainReplica | ReleaseReplica, seen: Sequence[PodSeen]) -> None:
        released = isinstance(action, ReleaseReplica)
        for pod in seen:
            if action.name not in (pod.replica, pod.name) or (pod.deleted_at is not None and not released):
                continue
            _LOG.info("job %s/%s: pod %s ends: %s", job.namespace, job.name, pod.name, action.reason)
            await self.delete(job, pod, force=released)

    async def _say_refused(self, job: TrainingJob, what: str, failure: ApiFailure, now: Instant) -> None:
        """Write into the job's condition why an object was refused: a quota, a class's name, no permission."""
        if namespace_ends(failure):
            self._ending[job.namespace] = now
        text = f"a {what} was refused: {failure}; {cure_of(what, failure)}"
        await self._say(job, JobFinding("PodsCreated", False, failure.reason or "Refused", text))
