"""Watches jobs and pods, and does what the planner says; all it knows can be listed again at any moment.

Before a replica is started, its number is written into the job's status, if nobody else has written there since: of
two controllers one alone can start it, and a name never comes twice.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from regrow.core.ids import Instant, Seconds
from regrow.core.process.tasks import TaskScope
from regrow.observe.watch.present import JobFigures
from regrow_clusters.cluster.actions import DrainReplica, PlannedAction, ReleaseReplica, StartGang, StartReplica
from regrow_clusters.operator.api import ApiFailure, ApiKind, ClusterApi, Manifest
from regrow_clusters.operator.asking import JobAsker
from regrow_clusters.operator.backends import backend_of
from regrow_clusters.operator.budgets import BudgetKeeper
from regrow_clusters.operator.cache import ClusterCache, JobKey
from regrow_clusters.operator.events import warning
from regrow_clusters.operator.nodes import BadMark
from regrow_clusters.operator.objects import ReplicaPlace, pods, secret, service
from regrow_clusters.operator.observed.node_watch import NodeWatch
from regrow_clusters.operator.observed.observing import JobReading, against, found_nodes, read, start_trouble
from regrow_clusters.operator.observed.pod_seen import PodSeen
from regrow_clusters.operator.placing.telling import PodPlacer
from regrow_clusters.operator.planning import PodsStart, PodStep, job_plan, next_turn, pod_steps
from regrow_clusters.operator.resource import SpecRefused, TrainingJob, TrainingJobStatus, read_job, read_status
from regrow_clusters.operator.status import (
    JobFinding,
    findings,
    news_of_nodes,
    next_status,
    nodes_finding,
    refused_status,
    with_conditions,
)
from regrow_clusters.operator.work_queue import WorkQueue

RESYNC_EVERY: Final[Seconds] = 30.0
ASK_EVERY: Final[Seconds] = 30.0
_RELIST_PAUSE: Final[Seconds] = 1.0
_NODES_PAUSE: Final[Seconds] = 1.0
"""However many wait for what is known of nodes, they are not listed more often."""
_WORKERS: Final = 8
_LOG = logging.getLogger("regrow.operator")
Wall = Callable[[], Instant]


class Controller:
    """One operator's work, while it is the leader.

    Args:
        api: the cluster.
        key: from which the jobs' secrets are made; the same for all operators of a cluster.
        wall: seconds since the epoch, as the API server's times.
        resync_every: all jobs are looked at so often, whatever was heard.
        ask_every: so often jobs are asked how far they are, and nodes are looked at.
        nodes: what is known of the cluster's nodes; None: nothing.
    """

    def __init__(
        self,
        api: ClusterApi,
        key: bytes,
        *,
        wall: Wall = time.time,
        resync_every: Seconds = RESYNC_EVERY,
        ask_every: Seconds = ASK_EVERY,
        nodes: NodeWatch | None = None,
    ) -> None:
        self._api = api
        self._nodes = nodes
        self._key = key
        self._wall = wall
        self._resync_every, self._ask_every = resync_every, ask_every
        self._figures: dict[JobKey, tuple[str, int, JobFigures]] = {}
        """Of which job's uid and attempt, and what it said."""
        self._queue = WorkQueue()
        self.cache = ClusterCache()
        self._listed = {ApiKind.JOBS: asyncio.Event(), ApiKind.PODS: asyncio.Event()}
        self._prepared: set[str] = set()
        self._budgets = BudgetKeeper(api)
        self._placer = PodPlacer(api, nodes)
        self._unsure: dict[JobKey, set[str]] = {}
        """Pods that were asked for, and the answer was lost: they may be there."""

    async def run(self) -> None:
        """Until it is cancelled."""
        try:
            async with TaskScope() as tasks:
                for kind in self._listed:
                    tasks.start(self._follow(kind))
                for listed in self._listed.values():
                    await listed.wait()
                tasks.start(self._resync())
                tasks.start(self._ask_jobs())
                tasks.start(self._watch_nodes())
                for _ in range(_WORKERS):
                    tasks.start(self._work())
                await tasks.wait()
        finally:
            self._queue.close()

    # --- what is heard -----------------------------------------------------------------------------------------

    async def _follow(self, kind: ApiKind) -> None:
        """List, then watch; where the watch is too old or breaks, list again."""
        while True:
            try:
                items, version = await self._api.list(kind)
                self._touch(self.cache.replace(kind, items))
                self._listed[kind].set()
                async for what, found in self._api.watch(kind, version):
                    self._touch((self.cache.drop if what == "DELETED" else self.cache.put)(kind, found))
            except ApiFailure as failure:
                if not failure.expired:
                    _LOG.warning("%s cannot be watched, listing again: %s", kind, failure)
                    await asyncio.sleep(_RELIST_PAUSE)

    def _touch(self, keys: set[JobKey]) -> None:
        for key in keys:
            self._queue.add(key)

    async def _resync(self) -> None:
        while True:
            self._touch(set(self.cache.jobs()))
            await asyncio.sleep(self._resync_every)

    async def _ask_jobs(self) -> None:
        """How far the jobs are is for people alone: it is asked beside the work, and may fail."""
        async with JobAsker(self._key) as asker:
            while True:
                await asyncio.sleep(self._ask_every)
                jobs = self.cache.jobs()
                self._figures = {key: known for key, known in self._figures.items() if key in jobs}
                for outcome in await asyncio.gather(
                    *(self._ask_job(asker, key) for key in jobs), return_exceptions=True
                ):
                    if isinstance(outcome, BaseException):
                        _LOG.error("how far a job is: a defect of regrow", exc_info=outcome)

    async def _ask_job(self, asker: JobAsker, key: JobKey) -> None:
        found = self.cache.job(key)
        if found is None:
            return
        try:
            job = read_job(found)
        except SpecRefused:
            return
        leader = next((pod for pod in self.cache.pods(key) if pod.leader and pod.owner == job.uid and pod.ip), None)
        if leader is None or leader.phase != "Running" or leader.attempt != job.status.attempt:
            return
        figures = await asker.ask(job, leader.ip)
        if figures is not None:
            self._figures[key] = (job.uid, leader.attempt, figures)
            self._queue.add(key)

    def _figures_of(self, job: TrainingJob) -> JobFigures | None:
        uid, attempt, figures = self._figures.get((job.namespace, job.name), ("", 0, None))
        return figures if (uid, attempt) == (job.uid, job.status.attempt) else None

    async def _watch_nodes(self) -> None:
        """What is known of nodes is for where the next replica goes: nothing waits for it."""
        while self._nodes is not None:
            now = self._wall()
            try:
                if await self._nodes.turn(self._wanted_marks(now), now):
                    self._touch(set(self.cache.jobs()))
            except Exception:  # noqa: BLE001 - whatever a node looks like, jobs are looked after
                _LOG.exception("the health of nodes: a defect of regrow")
            await asyncio.sleep(min(self._ask_every, _NODES_PAUSE))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._nodes.look_soon.wait(), max(0.0, self._ask_every - _NODES_PAUSE))

    def _wanted_marks(self, now: Instant) -> dict[str, BadMark]:
        """Nodes that jobs have quarantined."""
        wanted: dict[str, BadMark] = {}
        for key in self.cache.jobs():
            for each in read_status(self.cache.job(key) or {}).avoided_nodes:
                if each.quarantined and each.until > now:
                    wanted[each.name] = BadMark(each.reason, each.until)
        return wanted

    async def _work(self) -> None:
        while True:
            key = await self._queue.take()
            failed = True
            try:
                await self.reconcile(key)
                failed = False
            except ApiFailure as failure:
                if not failure.conflict:
                    _LOG.warning("job %s/%s: %s", *key, failure)
            except Exception:  # noqa: BLE001 - a defect in one job must not keep the others from being looked at
                _LOG.exception("job %s/%s: a defect of regrow", *key)
            finally:
                self._queue.done(key, failed=failed)

    # --- what is done ------------------------------------------------------------------------------------------

    async def reconcile(self, key: JobKey) -> None:
        """Look at one job, and do what is to be done now. Raises `ApiFailure`: it is looked at again later."""
        found = self.cache.job(key)
        if found is None or "deletionTimestamp" in found["metadata"]:
            return  # what it owns goes with it: each pod is asked to end, and has its grace
        await self._find_unsure(key)
        now = self._wall()
        try:
            job = read_job(found)
        except SpecRefused as refusal:
            old = read_status(found)
            await self._write(found, old, refused_status(found, old, refusal, now))
            return
        seen = [pod for pod in self.cache.pods(key) if pod.owner == job.uid]
        reading = read(job, seen, now, () if self._nodes is None else self._nodes.bad_nodes())
        figures = self._figures_of(job)
        found_bad = found_nodes(job, seen, figures, now)
        planned = job_plan(job, reading, now)
        actions = planned.actions
        said = [*findings(job, reading), *_pod_findings(seen, actions), *await self._queue_trouble(job, reading)]
        said += self._placer.findings(job, seen)
        if self._nodes is not None or found_bad:
            known = {} if self._nodes is None else self._nodes.verdicts
            said.append(nodes_finding(against(seen, known, found_bad)))
        seats = self._placer.seats(job, seen)
        status = next_status(job, reading, actions, now, figures, found_bad, seats)
        status = with_conditions(status, said, job.generation, now)
        await self._write(found, job.status, status)
        await self._carry_out(job, pod_steps(job, planned, seen), seen)
        for other in seen:
            if other.name in reading.rest:
                await self._delete(job, other, force=False)
        for pod in await self._placer.tell(msgspec.structs.replace(job, status=status), seen):
            self.cache.put(ApiKind.PODS, pod)
        await self._tell(job, status, now)
        if not reading.over:
            await self._budgets.keep(job)
        if reading.anew:
            self._queue.add(key)
            return
        later = next_turn(job, reading, now)
        if later is not None:
            self._queue.add_later(key, later - now)

    async def _queue_trouble(self, job: TrainingJob, reading: JobReading) -> list[JobFinding]:
        """A queue that does not exist lets pods wait for ever, and nobody else says why."""
        if job.spec.kueue is None or job.spec.backend != "kueue" or reading.started or not reading.waiting:
            return []
        name = job.spec.kueue.queue_name
        try:
            await self._api.get(ApiKind.LOCAL_QUEUES, job.namespace, name)
        except ApiFailure as failure:
            if failure.reason != "NotFound":
                return []  # who may not ask does not know; nor is anything known of a Kueue without this version
            text = f"spec.kueue.queueName is {name!r}: namespace {job.namespace} has no such LocalQueue; make it"
            return [JobFinding("QueueFound", False, "NoSuchQueue", f"{text}, or name one of kubectl get localqueues")]
        return [JobFinding("QueueFound", True, "Found")]

    async def _write(self, found: Manifest, old: TrainingJobStatus, new: TrainingJobStatus) -> None:
        if new == old:
            return
        body = {**found, "status": _pruned(msgspec.to_builtins(new))}
        self.cache.put(ApiKind.JOBS, await self._api.replace_status(ApiKind.JOBS, body))

    async def _tell(self, job: TrainingJob, new: TrainingJobStatus, now: Instant) -> None:
        """What has just become known of nodes, as events; one that cannot be made changes nothing else."""
        for reason, message in news_of_nodes(job.status, new):
            try:
                await self._api.create(ApiKind.EVENTS, warning(job, reason, message, now))
            except ApiFailure as failure:
                if not failure.conflict:
                    _LOG.warning("job %s/%s: %s: %s; no event: %s", job.namespace, job.name, reason, message, failure)

    async def _carry_out(self, job: TrainingJob, steps: list[PodStep], seen: list[PodSeen]) -> None:
        for step in steps:
            if isinstance(step, PodsStart):
                if step.begins:
                    await self._prepare(job)
                await self._start(job, step.replicas, step.avoid)
            else:
                await self._end(job, step, seen)

    async def _prepare(self, job: TrainingJob) -> None:
        """What the pods need to find and to trust each other."""
        if job.uid in self._prepared:
            return
        for kind, body in ((ApiKind.SECRETS, secret(job, self._key)), (ApiKind.SERVICES, service(job))):
            try:
                await self._api.create(kind, body)
            except ApiFailure as failure:
                if failure.refused:
                    await self._say_refused(job, str(kind).removesuffix("s"), failure)
                if not failure.conflict:
                    raise
        self._prepared.add(job.uid)

    async def _start(self, job: TrainingJob, places: Sequence[ReplicaPlace], avoid: tuple[str, ...]) -> None:
        made: list[Manifest] = []
        for place in places:
            made.extend(pods(job, place, avoid))
        gang = places[0].place < job.spec.replica_count
        total = job.spec.pods_per_replica * job.spec.replica_count if places[0].begins else len(made)
        group = f"{job.name}-gang-{job.status.attempt}" if places[0].begins else places[0].name(job)
        backend_of(job).dress(job, made, group=group, total=total, gang=gang)
        try:
            for pod in made:
                await self._create(job, pod)
        except ApiFailure as failure:
            if failure.refused:
                await self._say_refused(job, "pod", failure)
            if not failure.conflict:
                raise

    async def _create(self, job: TrainingJob, pod: Manifest) -> None:
        unsure = self._unsure.setdefault((job.namespace, job.name), set())
        name = pod["metadata"]["name"]
        unsure.add(name)
        try:
            self.cache.put(ApiKind.PODS, await self._api.create(ApiKind.PODS, pod))
        except ApiFailure as failure:
            if failure.conflict or failure.refused:
                unsure.discard(name)  # a clear answer
            raise
        unsure.discard(name)

    async def _find_unsure(self, key: JobKey) -> None:
        """Before anything is decided it must be known what is there."""
        for name in sorted(self._unsure.get(key, ())):
            try:
                self.cache.put(ApiKind.PODS, await self._api.get(ApiKind.PODS, key[0], name))
            except ApiFailure as failure:
                if not failure.missing:
                    raise
            self._unsure[key].discard(name)
        if not self._unsure.get(key, True):
            del self._unsure[key]

    async def _say_refused(self, job: TrainingJob, what: str, failure: ApiFailure) -> None:
        """Why no pod can be made, in the job's condition: a quota, a name of a class, no permission."""
        found = self.cache.job((job.namespace, job.name))
        if found is None:
            return
        cure = {403: f"ask for quota, or for the operator's permission to make {what}s here", 422: "mend spec.template"}
        text = f"a {what} was refused: {failure}; {cure.get(failure.code, 'see the message')}"
        finding = JobFinding("PodsCreated", False, failure.reason or "Refused", text)
        old = read_status(found)
        await self._write(found, old, with_conditions(old, [finding], job.generation, self._wall()))

    async def _end(self, job: TrainingJob, action: DrainReplica | ReleaseReplica, seen: list[PodSeen]) -> None:
        force = isinstance(action, ReleaseReplica)
        for pod in seen:
            if action.name not in (pod.replica, pod.name) or (pod.deleted_at is not None and not force):
                continue
            _LOG.info("job %s/%s: pod %s ends: %s", job.namespace, job.name, pod.name, action.reason)
            await self._delete(job, pod, force=force)

    async def _delete(self, job: TrainingJob, pod: PodSeen, *, force: bool) -> None:
        try:
            await self._api.delete(ApiKind.PODS, job.namespace, pod.name, force=force)
        except ApiFailure as failure:
            if not failure.missing:
                raise
            self.cache.forget_pod((job.namespace, job.name), pod.name)
            self._queue.add((job.namespace, job.name))


def _pod_findings(seen: list[PodSeen], actions: list[PlannedAction]) -> list[JobFinding]:
    """Whether pods are made and start. A refusal stays until nothing is left to be made."""
    trouble = start_trouble(seen)
    found = [JobFinding("PodsStart", True, "Starting") if trouble is None else JobFinding("PodsStart", False, *trouble)]
    if seen and not any(isinstance(each, StartGang | StartReplica) for each in actions):
        found.append(JobFinding("PodsCreated", True, "Created"))
    return found


def _pruned(status: Any) -> Any:
    """Without nulls, which a schema without `nullable` refuses."""
    if isinstance(status, dict):
        return {key: _pruned(value) for key, value in status.items() if value is not None}
    return [_pruned(each) for each in status] if isinstance(status, list) else status
