"""Operators without HTTP and without waiting: what they hear comes when the test says so, and answers get lost."""

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence

from tests.cluster.fake_store import FakeStore, Manifest, Refused

from regrow_clusters.cluster.observed import JobStage
from regrow_clusters.operator.api import ApiFailure, ApiKind
from regrow_clusters.operator.cache import JobKey
from regrow_clusters.operator.controller import Controller
from regrow_clusters.operator.objects import JOB_LABEL
from regrow_clusters.operator.observed.observing import read
from regrow_clusters.operator.observed.pod_seen import PodSeen, has_ended, present
from regrow_clusters.operator.resource import TrainingJob, read_job
from regrow_clusters.operator.terms import by_its_terms

KEY = b"0123456789abcdef0123456789abcdef"


class StoreApi:
    """`ClusterApi` on the store.

    Args:
        lost: whether an answer gets lost although what was asked is done.
        before: called with what is about to be asked; raises `ApiFailure` where it is not done.
    """

    def __init__(
        self,
        store: FakeStore,
        lost: Callable[[], bool] = lambda: False,
        before: Callable[[str, ApiKind, str, str], None] = lambda verb, kind, namespace, name: None,
    ) -> None:
        self._store = store
        self._lost = lost
        self.before = before
        self.asked_to_end: set[str] = set()
        """Pods that were deleted with their grace."""
        self.deleted: set[str] = set()
        """Pods that were deleted, with it or without."""
        self.forced: set[str] = set()
        """Pods that were deleted without it, ever."""
        self.calls = 0
        """All that was asked, but for lists and watches."""

    async def list(self, kind: ApiKind) -> tuple[list[Manifest], str]:
        return self._store.all_of(kind), str(self._store.version)

    async def watch(self, kind: ApiKind, version: str) -> AsyncIterator[tuple[str, Manifest]]:
        for change in self._store.since(int(version)):
            yield change.what, change.new

    async def pods_of(self, namespace: str, job: str) -> Sequence[Manifest]:
        self.before("list", ApiKind.PODS, namespace, "")
        self.calls += 1
        return self._store.all_of(
            ApiKind.PODS, namespace, lambda pod: (pod["metadata"].get("labels") or {}).get(JOB_LABEL) == job
        )

    async def get(self, kind: ApiKind, namespace: str, name: str) -> Manifest:
        self.before("get", kind, namespace, name)
        return self._ask(lambda: self._store.get(kind, namespace, name))

    async def create(self, kind: ApiKind, body: Manifest) -> Manifest:
        meta = body["metadata"]
        self.before("create", kind, meta["namespace"], meta.get("name", ""))
        return self._ask(lambda: self._store.create(kind, meta["namespace"], body))

    async def replace(self, kind: ApiKind, body: Manifest) -> Manifest:
        meta = body["metadata"]
        self.before("update", kind, meta["namespace"], meta["name"])
        return self._ask(lambda: self._store.replace(kind, meta["namespace"], meta["name"], body))

    async def replace_status(self, kind: ApiKind, body: Manifest) -> Manifest:
        meta = body["metadata"]
        self.before("update", kind, meta["namespace"], meta["name"])
        return self._ask(lambda: self._store.replace(kind, meta["namespace"], meta["name"], body, part="status"))

    async def annotate(self, kind: ApiKind, namespace: str, name: str, notes: dict[str, str], *, uid: str) -> Manifest:
        change = {"metadata": {"annotations": notes, "uid": uid}}
        self.before("patch", kind, namespace, name)
        return self._ask(lambda: self._store.patch(kind, namespace, name, change))

    async def drop_finalizer(self, kind: ApiKind, namespace: str, name: str, finalizer: str, *, uid: str) -> None:
        def drop() -> Manifest:
            found = self._store.get(kind, namespace, name)
            if found["metadata"]["uid"] != uid:
                return found
            found["metadata"]["finalizers"] = [
                each for each in found["metadata"].get("finalizers") or [] if each != finalizer
            ]
            return self._store.replace(kind, namespace, name, found)

        self.before("patch", kind, namespace, name)
        self._ask(drop)

    async def delete(self, kind: ApiKind, namespace: str, name: str, *, uid: str, force: bool = False) -> None:
        self.before("delete", kind, namespace, name)
        self.deleted.add(name)
        (self.forced if force else self.asked_to_end).add(name)
        self._ask(lambda: self._store.delete(kind, namespace, name, grace=0 if force else None, uid=uid))

    def _ask(self, act: Callable[[], Manifest]) -> Manifest:
        self.calls += 1
        try:
            answer = act()
        except Refused as refusal:
            raise ApiFailure(refusal.code, refusal.reason, refusal.message) from refusal
        if self._lost():
            raise ApiFailure(0, "", "the answer was lost")
        return answer


class ScheduledOperator:
    """A controller that hears of changes when it is told to, and looks at jobs when it is told to."""

    def __init__(
        self,
        store: FakeStore,
        lost: Callable[[], bool] = lambda: False,
        before: Callable[[str, ApiKind, str, str], None] = lambda verb, kind, namespace, name: None,
    ) -> None:
        self._store = store
        self.api = StoreApi(store, lost, before)
        self.controller = Controller(self.api, KEY, wall=store.wall)
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
        try:
            await self.controller.hands.find_unsure(key)  # as it does before it decides: what it knows then counts
        except ApiFailure:
            return  # nor does it decide
        before = self._training(key)
        self.api.asked_to_end.clear()
        self.api.deleted.clear()
        with contextlib.suppress(ApiFailure):
            await self.controller.reconcile(key)
        if before is not None:
            job, running = before
            each = job.spec.pods_per_replica
            there = Counter(pod.place for pod in running)
            left = Counter(pod.place for pod in running if pod.name not in self.api.asked_to_end)
            whole, stay = (sum(count == each for count in places.values()) for places in (there, left))
            assert stay >= min(job.spec.replica_count, whole), f"below the minimum by its own choice: {running}"
            leaders = {pod.name for pod in running if pod.leader}
            assert not leaders & self.api.deleted, "pod 0 is sent away while the job trains"

    def _training(self, key: JobKey) -> tuple[TrainingJob, list[PodSeen]] | None:
        """A job that trains, as far as it knows, and its pods that run."""
        found = self.controller.cache.job(key)
        if found is None:
            return None
        job = by_its_terms(read_job(found))
        pods = present(job, self.controller.cache.pods(key), self._store.wall())
        if read(job, pods, self._store.wall()).seen.stage is not JobStage.TRAINING:
            return None
        return job, [pod for pod in pods if not has_ended(pod) and pod.phase == "Running" and pod.deleted_at is None]
