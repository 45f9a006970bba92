"""A job on Ray: its description, and regrow's arguments for each of its nodes. Pure."""

from collections.abc import Mapping
from typing import Final

import msgspec

from regrow.core.errors import UsageError
from regrow.core.ids import Seconds

WAIT_FOR_PLACE: Final[Seconds] = 60.0
"""Wait of a joining node: it may start before the job has noticed the loss of its predecessor."""


class RayJob(msgspec.Struct, frozen=True, kw_only=True):
    """Training on a cluster of Ray.

    `words`: flags of `regrow run`, the script, its arguments. `nodes`: the job begins when there is room for these,
    spares included; `max_nodes`: it grows to this number as Ray gets nodes for it; None: it keeps its size.
    `resources`: of one node of the job, in Ray's units; give all of a machine's, so that each machine gets one node.
    `checkpoint_dir`: where all resume after a loss of node 0. `folder`: working directory of the script on every node.
    `home`: folder for records, with a subfolder for each node; empty: the default of `regrow run`.
    `restarts`: most restarts of all nodes. `patience`: the longest wait for room, in seconds.
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
        """Largest number of nodes."""
        return self.nodes if self.max_nodes is None else self.max_nodes


class NodeNews(msgspec.Struct, frozen=True):
    """A node of the job `starts`, is `lost`, is `leaving`, or has `ended`. `machine`: Ray's id of its machine."""

    what: str
    node: str
    machine: str
    code: int | None = None


def check(job: RayJob) -> None:
    """Check a job's settings. Raises `UsageError` if one is not valid."""
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
    """Arguments for a node that begins the job. `again`: this is a restart of all nodes."""
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
        "--no-elect",  # the driver restarts all, and gives joining nodes one fixed address
        *kept,
        *(["--resume=auto"] if kept and again else []),
        *job.words,
    ]


def joining_arguments(job: RayJob, node: str, endpoint: str, address: str) -> list[str]:
    """Arguments for a node that joins the running job."""
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
