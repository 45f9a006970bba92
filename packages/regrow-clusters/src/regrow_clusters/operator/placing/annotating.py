"""Annotates a job's pods with their places as soon as they have nodes and the nodes' labels are known."""

from collections.abc import Sequence

from regrow_clusters.operator.api import ApiFailure, ApiKind, ClusterApi, Manifest
from regrow_clusters.operator.objects import NODE_RANK, TOPOLOGY
from regrow_clusters.operator.observed.node_watch import NodeWatch
from regrow_clusters.operator.observed.pod_seen import PodSeen, index_of
from regrow_clusters.operator.placing.node_ranks import gang_pods, node_ranks, path_of, path_text
from regrow_clusters.operator.resource import TrainingJob
from regrow_clusters.operator.status import JobFinding


class PodPlacer:
    """Places the pods of all jobs. `nodes`: source of the nodes' labels; None: none are known."""

    def __init__(self, api: ClusterApi, nodes: NodeWatch | None) -> None:
        self._api, self._nodes = api, nodes
        self._refused: dict[str, str] = {}
        """By job uid: the API server's message of the refusal."""

    def node_ranks(self, job: TrainingJob, pods: Sequence[PodSeen]) -> list[int] | None:
        """Node ranks for a gang that has its nodes but no ranks yet; None: no change.

        They are written into the job's status before any pod is annotated, so all pods of a gang get the same order,
        whichever operator annotates them, and even if labels change meanwhile.
        """
        gang = None if job.status.node_ranks else gang_pods(job, pods)
        if gang is None or all(pod.ranked for pod in gang):
            return None
        paths = {pod.node: self._path(job, pod) for pod in gang}
        known = {node: path for node, path in paths.items() if path is not None}
        return node_ranks(job, gang, known) if len(known) == len(paths) else None

    async def annotate(self, job: TrainingJob, pods: Sequence[PodSeen]) -> list[Manifest]:
        """Annotate pods; returns them as they are now. `job`: with node ranks in its status. Raises `ApiFailure`."""
        reported = []
        for pod in pods:
            asks = (bool(job.spec.topology_labels) or not pod.ranked) and not pod.topology
            if not asks or not pod.node or pod.deleted_at is not None or pod.attempt != job.status.attempt:
                continue
            path = self._path(job, pod)
            if path is None or not (pod.ranked or job.status.node_ranks):
                continue
            notes = {TOPOLOGY: path_text(path)}
            if not pod.ranked:
                notes[NODE_RANK] = str(job.node_rank(pod.place, index_of(job, pod)))
            try:
                reported.append(await self._api.annotate(ApiKind.PODS, job.namespace, pod.name, notes, uid=pod.uid))
            except ApiFailure as failure:
                if failure.missing:
                    continue
                if not failure.refused:
                    raise
                self._refused[job.uid] = str(failure)
                break
            else:
                self._refused.pop(job.uid, None)
        return reported

    def findings(self, job: TrainingJob, pods: Sequence[PodSeen]) -> list[JobFinding]:
        """Condition that reports whether pods have their places; empty if they need none or still wait."""
        if job.uid in self._refused:
            text = f"pods cannot be given their places: {self._refused[job.uid]}; apply the operator's manifests again"
            return [JobFinding("PodsPlaced", False, "Refused", f"{text}, which have the right to patch pods")]
        placed = [bool(pod.topology) for pod in pods if pod.node]
        if job.spec.topology_labels and placed and all(placed):
            return [JobFinding("PodsPlaced", True, "Placed")]
        return []

    def _path(self, job: TrainingJob, pod: PodSeen) -> tuple[str, ...] | None:
        keys = job.spec.topology_labels
        labels = {} if self._nodes is None or not keys else self._nodes.labels_of(pod.node, keys)
        return None if labels is None else path_of(labels, keys)
