"""A job on Ray: its description, and regrow's words for each of its nodes. Pure."""

from collections.abc import Mapping
from typing import Final

import msgspec

from regrow.core.errors import UsageError
from regrow.core.ids import Seconds

WAIT_FOR_PLACE: Final[Seconds] = 60.0
"""A node may come before the job knows that the one whose place it takes is lost."""


class RayJob(msgspec.Struct, frozen=True, kw_only=True):
    """Training on a cluster of Ray.

    `words`: flags of `regrow run`, the script, its arguments. `nodes`: the job begins when there is room for these,
    spares included; `max_nodes`: it grows to this number as Ray has nodes for it; None: it keeps its size.
    `resources`: of one node of the job, as Ray counts them; give all of a machine's, so that each has one.
    `checkpoint_dir`: where all go on from when node 0 was lost. `folder`: where the script runs, on every node.
    `home`: folder for records, another one below it for each node; nothing: as `regrow run` has it.
    `restarts`: how often all may start anew. `patience`: the longest wait for room, in seconds.
    """

    words: tuple[str, ...]
    nodes: int
    max_nodes: int | None = None
    ranks_per_node: int = 1
    replica_ranks: int = 1
    spares: int = 0
    resources: Mapping[str, float] = msgspec.field(default_factory=lambda: {"CPU": 1.0})
    name: str = "ray"
    checkpoint_dir: str = ""
    folder: str = ""
    home: str = ""
    environment: Mapping[str, str] = msgspec.field(default_factory=dict)
    grace: Seconds = 30.0
    restarts: int = 3
    patience: Seconds = 3600.0

    @property
    def most(self) -> int:
        """Nodes that there may be."""
        return self.nodes if self.max_nodes is None else self.max_nodes


class NodeNews(msgspec.Struct, frozen=True):
    """A node of the job `starts`, is `lost`, is `leaving`, or has `ended`. `machine`: Ray's id of the node it is on."""

    what: str
    node: str
    machine: str
    code: int | None = None


def check(job: RayJob) -> None:
    """Raises `UsageError`: a number cannot be."""
    if not job.words:
        raise UsageError("the job has no script", hint='RayJob(words=("train.py",), ...)')
    if not 1 <= job.nodes <= job.most:
        raise UsageError(f"a job of {job.nodes} to {job.most} nodes cannot be", hint="1 <= nodes <= max_nodes")
    if not 0 <= job.spares < job.nodes:
        raise UsageError(f"{job.spares} spares leave none of {job.nodes} nodes", hint="spares are counted in nodes")
    if job.replica_ranks < 1 or any(_world(job, each) % job.replica_ranks for each in (job.nodes, job.most)):
        raise UsageError(
            f"replicas of {job.replica_ranks} ranks do not fit the nodes",
            hint="replica_ranks is the number of ranks that hold one copy of the model",
        )


def gang_arguments(job: RayJob, rank: int, endpoint: str, address: str, *, again: bool) -> list[str]:
    """Of a node that begins the job. `again`: all have started before."""
    least, most = (_world(job, each) // job.replica_ranks for each in (job.nodes, job.most))
    kept = [f"--checkpoint-dir={job.checkpoint_dir}"] if job.checkpoint_dir else []
    return [
        "run",
        f"--job={job.name}",
        f"--nnodes={job.nodes}:{job.most}",
        f"--node-rank={rank}",
        f"--nproc-per-node={job.ranks_per_node}",
        f"--replicas={least}:{most}",
        f"--replica-ranks={job.replica_ranks}",
        *([f"--spares={job.spares}"] if job.spares else []),
        f"--rdzv-endpoint={endpoint}",
        f"--bind={address}",
        f"--local-addr={address}",
        f"--drain-grace={job.grace:g}s",
        "--no-elect",  # the driver starts all anew, and tells who joins one address
        *kept,
        *(["--resume=auto"] if kept and again else []),
        *job.words,
    ]


def joining_arguments(job: RayJob, node: str, endpoint: str, address: str) -> list[str]:
    """Of a node that joins the job that runs."""
    return [
        "agent",
        f"--join={endpoint}",
        f"--wait={WAIT_FOR_PLACE + job.grace:g}s",
        f"--name={node}",
        f"--bind={address}",
        f"--local-addr={address}",
        f"--grace={job.grace:g}s",
    ]


def _world(job: RayJob, nodes: int) -> int:
    return (nodes - job.spares) * job.ranks_per_node
