"""Cache of the cluster: the jobs, and the relevant fields of their pods."""

from regrow_clusters.operator.api import ApiKind, Manifest
from regrow_clusters.operator.observed.pod_seen import PodSeen, read_pod

JobKey = tuple[str, str]
"""Namespace and name."""


class ClusterCache:
    """Jobs and pods as the controller last received or wrote them; older versions are ignored."""

    def __init__(self) -> None:
        self._jobs: dict[JobKey, Manifest] = {}
        self._pods: dict[JobKey, dict[str, PodSeen]] = {}
        self._gone: dict[tuple[str, str], int] = {}

    def jobs(self) -> list[JobKey]:
        """All jobs that are known themselves or that pods name."""
        return sorted({*self._jobs, *self._pods})

    def job(self, key: JobKey) -> Manifest | None:
        """The object as it was last seen."""
        return self._jobs.get(key)

    def pods(self, key: JobKey) -> list[PodSeen]:
        """Pods of one job, ordered by name."""
        return sorted(self._pods.get(key, {}).values(), key=lambda pod: pod.name)

    def replace(self, kind: ApiKind, items: list[Manifest]) -> set[JobKey]:
        """Replace all objects of a kind by a new list; returns the jobs concerned."""
        touched = set(self.jobs())
        if kind is ApiKind.JOBS:
            self._jobs.clear()
        else:
            self._pods.clear()
            self._gone.clear()
        for item in items:
            touched |= self.put(kind, item)
        return touched

    def put(self, kind: ApiKind, found: Manifest) -> set[JobKey]:
        """Store an object that was created or changed; returns the job concerned."""
        meta = found["metadata"]
        if kind is ApiKind.JOBS:
            key = (meta["namespace"], meta["name"])
            old = self._jobs.get(key)
            if old is None or _version(old["metadata"]) <= _version(meta) or old["metadata"]["uid"] != meta["uid"]:
                meta.pop("managedFields", None)
                self._jobs[key] = found
            return {key}
        pod = read_pod(found)
        if pod is None:
            return set()
        key = (meta["namespace"], pod.job)
        if _version(meta) <= self._gone.get((meta["namespace"], pod.name), -1):
            return set()
        known = self._pods.setdefault(key, {})
        before = known.get(pod.name)
        if before is None or int(before.version or 0) <= _version(meta):
            known[pod.name] = pod
        return {key}

    def drop(self, kind: ApiKind, found: Manifest) -> set[JobKey]:
        """Remove an object that is gone; returns the job concerned."""
        meta = found["metadata"]
        if kind is ApiKind.JOBS:
            key = (meta["namespace"], meta["name"])
            known_job = self._jobs.get(key)
            if known_job is not None and _version(known_job["metadata"]) <= _version(meta):
                del self._jobs[key]
            return {key}
        pod = read_pod(found)
        if pod is None:
            return set()
        key = (meta["namespace"], pod.job)
        self._gone[(meta["namespace"], pod.name)] = _version(meta)
        known = self._pods.get(key, {}).get(pod.name)
        if known is not None and int(known.version or 0) <= _version(meta):
            self.forget_pod(key, known)  # else another pod of this name was created since
        return {key}

    def forget_pod(self, key: JobKey, pod: PodSeen) -> None:
        """Remove a pod that does not exist any more; a newer pod of the same name stays."""
        known = self._pods.get(key, {})
        if pod.name in known and known[pod.name].uid == pod.uid:
            del known[pod.name]
        if not known:
            self._pods.pop(key, None)


def _version(meta: Manifest) -> int:
    """Version as a number: versions of one kind rise, and Kubernetes' own clients compare them since 1.35."""
    try:
        return int(meta.get("resourceVersion", 0))
    except ValueError:
        return 0
