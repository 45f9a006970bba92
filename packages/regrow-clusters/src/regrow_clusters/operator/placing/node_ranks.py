"""Node ranks for the pods of a job's gang, by their places in the network. Pure."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final

from regrow_clusters.cluster.topology import rank_order
from regrow_clusters.operator.observed.pod_seen import PodSeen, index_of
from regrow_clusters.operator.resource import TrainingJob

_LONGEST_NAME: Final = 64
"""Most characters of a failure domain's name, as `--domain` accepts it."""
Paths = Mapping[str, Sequence[str]]
"""By node: its path in the network, from the root down."""


def path_of(labels: Mapping[str, str], keys: Sequence[str]) -> tuple[str, ...]:
    """Path of a node by its labels, from the widest level to the last known one."""
    path = [labels.get(key, "") for key in keys]
    while path and not path[-1]:
        path.pop()
    return tuple(path)


def path_text(path: Sequence[str]) -> str:
    """Path as an annotation: `/zone/rack`; `/`: unknown."""
    return "/" + "/".join(path)


def domain_in(text: str) -> str:
    """Failure domain by that annotation: nodes with the same path share it; empty: the node is a domain of its own."""
    name = ".".join(word for word in text.split("/") if word)
    return name if len(name) <= _LONGEST_NAME else hashlib.sha256(name.encode()).hexdigest()[:_LONGEST_NAME]


def gang_pods(job: TrainingJob, pods: Sequence[PodSeen]) -> list[PodSeen] | None:
    """The gang's pods in the order of their places; None: not all of them have nodes."""
    count, each = job.spec.replica_count, job.spec.pods_per_replica
    found = {
        pod.place * each + index_of(job, pod): pod
        for pod in pods
        if pod.attempt == job.status.attempt and pod.place < count and pod.node and pod.deleted_at is None
    }
    return [found[at] for at in range(count * each)] if len(found) == count * each else None


def node_ranks(job: TrainingJob, gang: Sequence[PodSeen], paths: Paths) -> list[int]:
    """Node rank in the job for each pod of the gang.

    Nodes near each other get neighbouring ranks, at every level; pods of a replica stay together, because a replica
    leaves as a whole. The first pod stays the first: the coordinator is in it.
    """
    each = job.spec.pods_per_replica
    full = [(*paths.get(pod.node, ()), f"node {pod.node}") for pod in gang]
    blocks = [range(start, start + each) for start in range(0, len(gang), each)]
    order: list[int] = []
    for block in _near([_common([full[at] for at in block]) for block in blocks]):
        inside = _near([full[at] for at in blocks[block]])
        order.extend(blocks[block][at] for at in inside)
    rank_of = {at: rank for rank, at in enumerate(order)}
    return [rank_of[at] for at in range(len(gang))]


def _near(paths: Sequence[Sequence[str]]) -> list[int]:
    names = [str(number) for number in range(len(paths))]
    return [int(name) for name in rank_order(names, dict(zip(names, paths, strict=True)))]


def _common(paths: Sequence[Sequence[str]]) -> Sequence[str]:
    """Common prefix of the paths."""
    first = paths[0]
    same = next(
        (at for at in range(len(first)) if any(path[at : at + 1] != first[at : at + 1] for path in paths)), None
    )
    return first[:same]
