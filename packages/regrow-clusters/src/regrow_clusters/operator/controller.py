"""Watches jobs and pods, and does the planner's actions; all its state can be listed again at any moment.

Before a replica is started, its serial is written into the job's status, unless that has been written meanwhile: of
two controllers only one can start the replica, and no name is used twice.
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
from regrow_clusters.operator.api import WATCH_SILENT, ApiFailure, ApiKind, ClusterApi, Manifest
from regrow_clusters.operator.asking import JobAsker
from regrow_clusters.operator.cache import ClusterCache, JobKey
from regrow_clusters.operator.deciding import JobFacts, decide
from regrow_clusters.operator.events import JobNews, event
from regrow_clusters.operator.making.budgets import BudgetKeeper
from regrow_clusters.operator.making.pod_hands import PodHands
from regrow_clusters.operator.making.queues import queue_findings
from regrow_clusters.operator.nodes import AvoidedNodeMark
from regrow_clusters.operator.observed.node_watch import NodeWatch
from regrow_clusters.operator.observed.observing import read
from regrow_clusters.operator.observed.pod_seen import PodSeen, index_of, present
from regrow_clusters.operator.placing.annotating import PodPlacer
from regrow_clusters.operator.planning import PodsStart
from regrow_clusters.operator.resource import SpecRefused, TrainingJob, TrainingJobStatus, read_job, read_status
from regrow_clusters.operator.status import JobFinding, refused_status, with_conditions
from regrow_clusters.operator.terms import by_its_terms
from regrow_clusters.operator.work_queue import WorkQueue

RESYNC_EVERY: Final[Seconds] = 30.0
ASK_EVERY: Final[Seconds] = 30.0
_RELIST_PAUSE: Final[Seconds] = 1.0
_NODES_PAUSE: Final[Seconds] = 1.0
"""Shortest interval between two lists of the nodes, however many jobs wait for one."""
_WORKERS: Final = 8
_LOG = logging.getLogger("regrow.operator")
Wall = Callable[[], Instant]


class Controller:
    """One operator's work, while it is the leader.

    Args:
        api: the cluster.
        key: the jobs' secrets are derived from it; the same for all operators of a cluster.
        wall: clock, in seconds since the epoch, that agrees with the API server's times.
        resync_every: interval at which all jobs are reconciled even without news.
        ask_every: interval of requests to jobs for their progress, and of lists of the nodes.
        nodes: the watch on the cluster's nodes; None: they are not watched.
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
        """By job: its uid, its attempt, and the progress that it reported."""
        self._queue = WorkQueue()
        self.cache = ClusterCache()
        self._listed = {ApiKind.JOBS: asyncio.Event(), ApiKind.PODS: asyncio.Event()}
        self.hands = PodHands(api, self.cache, key, say=self._say, again=self._queue.add, drop=self._drop)
        self._asker = JobAsker(key)
        self._budgets = BudgetKeeper(api)
        self._placer = PodPlacer(api, nodes)

    async def run(self) -> None:
        """Control all jobs until cancelled."""
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

    # --- news from the cluster ---------------------------------------------------------------------------------

    async def _follow(self, kind: ApiKind) -> None:
        """List, then watch; if the watch is too old or breaks, list again."""
        clock = asyncio.get_running_loop().time
        while True:
            begun = clock()
            try:
                items, version = await self._api.list(kind)
                self._touch(self.cache.replace(kind, items))
                self._listed[kind].set()
                async for what, found in self._api.watch(kind, version):
                    self._touch((self.cache.drop if what == "DELETED" else self.cache.put)(kind, found))
            except ApiFailure as failure:
                if not failure.expired and failure.reason != WATCH_SILENT:
                    _LOG.warning("%s cannot be watched, listing again: %s", kind, failure)
                    begun = clock()
                await asyncio.sleep(begun + _RELIST_PAUSE - clock())  # no busy loop if lists arrive expired

    def _touch(self, keys: set[JobKey]) -> None:
        for key in keys:
            self._queue.add(key)

    async def _resync(self) -> None:
        while True:
            self._touch(set(self.cache.jobs()))
            await asyncio.sleep(self._resync_every)

    async def _ask_jobs(self) -> None:
        """Ask the jobs for their progress. Only people use it, so requests run beside the work and may fail."""
        async with self._asker as asker:
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
            job = by_its_terms(read_job(found))
        except SpecRefused:
            return
        leader = self._leader(job)
        if leader is None:
            return
        figures = await asker.ask(job, leader.ip)
        if figures is not None:
            self._figures[key] = (job.uid, leader.attempt, figures)
            self._queue.add(key)

    def _leader(self, job: TrainingJob) -> PodSeen | None:
        """Pod 0, if its coordinator can be asked; else None."""
        here = present(job, self.cache.pods((job.namespace, job.name)), self._wall())
        running = (pod for pod in here if pod.leader and pod.phase == "Running" and pod.ip)
        return next((pod for pod in running if pod.attempt == job.status.attempt), None)

    async def _drop(self, job: TrainingJob, pod: PodSeen) -> None:
        """Ask the job to go on without a pod that is given up: it may still train on an unreachable node."""
        leader = self._leader(job)
        if leader is not None and not pod.leader:
            names = (pod.name, f"node{job.node_rank(pod.place, index_of(job, pod))}")
            await self._asker.drop(job, leader.ip, names)

    def _figures_of(self, job: TrainingJob) -> JobFigures | None:
        uid, attempt, figures = self._figures.get((job.namespace, job.name), ("", 0, None))
        return figures if (uid, attempt) == (job.uid, job.status.attempt) else None

    async def _watch_nodes(self) -> None:
        """Watch the nodes' health, by which nodes are avoided; no job waits for it."""
        while self._nodes is not None:
            now = self._wall()
            try:
                if await self._nodes.turn(self._wanted_marks(now), now):
                    self._touch(set(self.cache.jobs()))
            except Exception:  # noqa: BLE001 - an unexpected node must not stop the work on jobs
                _LOG.exception("the health of nodes: a defect of regrow")
            await asyncio.sleep(min(self._ask_every, _NODES_PAUSE))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._nodes.look_soon.wait(), max(0.0, self._ask_every - _NODES_PAUSE))

    def _wanted_marks(self, now: Instant) -> dict[str, AvoidedNodeMark]:
        """Nodes that jobs have quarantined."""
        wanted: dict[str, AvoidedNodeMark] = {}
        for key in self.cache.jobs():
            for each in read_status(self.cache.job(key) or {}).bad_nodes:
                if each.quarantined and each.until > now:
                    wanted[each.name] = AvoidedNodeMark(each.reason, each.until)
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

    # --- work on one job ---------------------------------------------------------------------------------------

    async def reconcile(self, key: JobKey) -> None:
        """Reconcile one job: decide and do the next steps. Raises `ApiFailure`; the job is then retried later."""
        found = self.cache.job(key)
        if found is None or "deletionTimestamp" in found["metadata"]:
            return  # Kubernetes deletes the objects that it owns: each pod ends within its grace
        await self.hands.find_unsure(key)
        now = self._wall()
        try:
            job = read_job(found)
        except SpecRefused as refusal:
            old = read_status(found)
            await self._write(found, old, refused_status(found, old, refusal, now))
            return
        if self.hands.is_ending(job.namespace, now):
            self._queue.add_later(key, self._resync_every)
            return
        job = by_its_terms(job)
        facts = await self._look(job, now)
        decision = decide(job, facts, now)
        starts = any(isinstance(step, PodsStart) for step in decision.steps)
        if starts and await self.hands.find_others(job):
            self._queue.add(key)
            return
        if not facts.pods and (facts.reading.anew or job.spec.suspend):
            await self.hands.end_groups(job)  # first: the new status does not show that some exist
        await self._write(found, job.status, decision.status)
        if starts:
            self.hands.serials[job.uid] = decision.status.serial
        await self.hands.carry_out(job, decision.steps, facts.pods, now)
        for pod in decision.leaving:
            await self.hands.delete(job, pod, force=False)
        for placed in await self._placer.annotate(msgspec.structs.replace(job, status=decision.status), facts.pods):
            self.cache.put(ApiKind.PODS, placed)
        await self._publish(job, decision.news, now)
        if decision.keeps_budget:
            await self._budgets.keep(job, now)
        if decision.keeps_service:
            await self.hands.keep_prepared(job, now, waited_for=decision.waited_for)
        if decision.again:
            self._queue.add(key)
        elif decision.later is not None:
            self._queue.add_later(key, decision.later - now)

    async def _look(self, job: TrainingJob, now: Instant) -> JobFacts:
        """Collect all facts for the decision on a job."""
        nodes, seen = self._nodes, present(job, self.cache.pods((job.namespace, job.name)), now)
        reading, figures = read(job, seen, now, () if nodes is None else nodes.bad_nodes()), self._figures_of(job)
        said = (*await queue_findings(self._api, job, reading), *self._placer.findings(job, seen))
        verdicts = None if nodes is None else nodes.verdicts
        return JobFacts(seen, reading, said, figures, self._placer.node_ranks(job, seen), verdicts)

    async def _write(self, found: Manifest, old: TrainingJobStatus, new: TrainingJobStatus) -> None:
        if new == old:
            return
        body = {**found, "status": _pruned(msgspec.to_builtins(new))}
        self.cache.put(ApiKind.JOBS, await self._api.replace_status(ApiKind.JOBS, body))

    async def _publish(self, job: TrainingJob, news: Sequence[JobNews], now: Instant) -> None:
        """Create events for news; one that cannot be created changes nothing else."""
        for each in news:
            try:
                await self._api.create(ApiKind.EVENTS, event(job, each, now))
            except ApiFailure as failure:
                if not failure.conflict:
                    joins = (job.namespace, job.name, each.reason, each.message, failure)
                    _LOG.warning("job %s/%s: %s: %s; no event: %s", *joins)

    async def _say(self, job: TrainingJob, finding: JobFinding) -> None:
        """Write one condition."""
        found = self.cache.job((job.namespace, job.name))
        if found is not None:
            old = read_status(found)
            await self._write(found, old, with_conditions(old, [finding], job.generation, self._wall()))


def _pruned(status: Any) -> Any:
    """The status without nulls, which a schema without `nullable` refuses."""
    if isinstance(status, dict):
        return {key: _pruned(value) for key, value in status.items() if value is not None}
    return [_pruned(each) for each in status] if isinstance(status, list) else status
