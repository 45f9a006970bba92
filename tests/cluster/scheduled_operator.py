"""Operators without HTTP and without waiting: what they hear comes when the test says so, and answers get lost."""

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable

from tests.cluster.fake_store import FakeStore, Manifest, Refused

from regrow_clusters.cluster.observed import JobStage
from regrow_clusters.operator.api import ApiFailure, ApiKind
from regrow_clusters.operator.cache import JobKey
from regrow_clusters.operator.controller import Controller
from regrow_clusters.operator.observed.observing import read
from regrow_clusters.operator.observed.pod_seen import PodSeen
from regrow_clusters.operator.resource import TrainingJob, read_job

KEY = b"0123456789abcdef0123456789abcdef"


class StoreApi:
    """`ClusterApi` on the store. `lost`: whether an answer gets lost although what was asked is done."""

    def __init__(self, store: FakeStore, lost: Callable[[], bool] = lambda: False) -> None:
        self._store = store
        self._lost = lost
        self.asked_to_end: set[str] = set()
        """Pods that were deleted with their grace."""
        self.deleted: set[str] = set()
        """Pods that were deleted, with it or without."""

    async def list(self, kind: ApiKind) -> tuple[list[Manifest], str]:
        return self._store.all_of(kind), str(self._store.version)

    async def watch(self, kind: ApiKind, version: str) -> AsyncIterator[tuple[str, Manifest]]:
        for change in self._store.since(int(version)):
            yield change.what, change.new

    async def get(self, kind: ApiKind, namespace: str, name: str) -> Manifest:
        return self._ask(lambda: self._store.get(kind, namespace, name))

    async def create(self, kind: ApiKind, body: Manifest) -> Manifest:
        return self._ask(lambda: self._store.create(kind, body["metadata"]["namespace"], body))

    async def replace(self, kind: ApiKind, body: Manifest) -> Manifest:
        meta = body["metadata"]
        return self._ask(lambda: self._store.replace(kind, meta["namespace"], meta["name"], body))

    async def replace_status(self, kind: ApiKind, body: Manifest) -> Manifest:
        meta = body["metadata"]
        return self._ask(lambda: self._store.replace(kind, meta["namespace"], meta["name"], body, part="status"))

    async def annotate(self, kind: ApiKind, namespace: str, name: str, notes: dict[str, str]) -> Manifest:
        change = {"metadata": {"annotations": notes}}
        return self._ask(lambda: self._store.patch(kind, namespace, name, change))

    async def delete(self, kind: ApiKind, namespace: str, name: str, *, force: bool = False) -> None:
        self.deleted.add(name)
        if not force:
            self.asked_to_end.add(name)
        self._ask(lambda: self._store.delete(kind, namespace, name, grace=0 if force else None))

    def _ask(self, act: Callable[[], Manifest]) -> Manifest:
        try:
            answer = act()
        except Refused as refusal:
            raise ApiFailure(refusal.code, refusal.reason, refusal.message) from refusal
        if self._lost():
            raise ApiFailure(0, "", "the answer was lost")
        return answer


class ScheduledOperator:
    """A controller that hears of changes when it is told to, and looks at jobs when it is told to."""

    def __init__(self, store: FakeStore, lost: Callable[[], bool] = lambda: False) -> None:
        self._store = store
        self._api = StoreApi(store, lost)
        self.controller = Controller(self._api, KEY, wall=store.wall)
        self._heard = 0

    def relist(self) -> None:
        """As after a start, or after a watch that is too old."""
        for kind in (ApiKind.JOBS, ApiKind.PODS):
            self.controller.cache.replace(kind, self._store.all_of(kind))
        self._heard = self._store.version

    def hear(self, most: int | None = None) -> None:
        """The next changes."""
        try:
            news = self._store.since(self._heard)
        except Refused:
            self.relist()
            return
        for change in news[:most]:
            self._heard = change.version
            if change.plural in (ApiKind.JOBS, ApiKind.PODS):
                cache, kind = self.controller.cache, ApiKind(change.plural)
                (cache.drop if change.what == "DELETED" else cache.put)(kind, change.new)

    async def look(self) -> None:
        """At every job once; failures are for the next time."""
        for key in self.controller.cache.jobs():
            await self.look_at(key)

    async def look_at(self, key: JobKey) -> None:
        """At one job; nobody is asked to leave while fewer than the gang would train without it, and pod 0 never."""
        with contextlib.suppress(ApiFailure):
            await self.controller._find_unsure(key)  # as it does before it decides: what it knows then counts
        before = self._training(key)
        self._api.asked_to_end.clear()
        self._api.deleted.clear()
        with contextlib.suppress(ApiFailure):
            await self.controller.reconcile(key)
        if before is not None:
            job, running = before
            each = job.spec.pods_per_replica
            there = Counter(pod.place for pod in running)
            left = Counter(pod.place for pod in running if pod.name not in self._api.asked_to_end)
            whole, stay = (sum(count == each for count in places.values()) for places in (there, left))
            assert stay >= min(job.spec.replica_count, whole), f"below the minimum by its own choice: {running}"
            leaders = {pod.name for pod in running if pod.leader}
            assert not leaders & self._api.deleted, "pod 0 is sent away while the job trains"

    def _training(self, key: JobKey) -> tuple[TrainingJob, list[PodSeen]] | None:
        """A job that trains, as far as it knows, and its pods that run."""
        found = self.controller.cache.job(key)
        if found is None:
            return None
        job = read_job(found)
        pods = [pod for pod in self.controller.cache.pods(key) if pod.owner == job.uid]
        if read(job, pods, self._store.wall()).seen.stage is not JobStage.TRAINING:
            return None
        return job, [pod for pod in pods if pod.phase == "Running" and pod.deleted_at is None]
