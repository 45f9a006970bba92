"""Arguments of `regrow run` for a pod of an Indexed Job; the same begin the job and bring a lost pod back. Pure."""

from collections.abc import Sequence

import msgspec

from regrow.core.errors import UsageError


class PodPlace(msgspec.Struct, frozen=True):
    """A pod's part of the job.

    `nodes`: number of pods; `node_rank`: its completion index; `ranks`: workers in each pod; `replica_ranks`: workers
    that hold one copy of the model; `spares`: pods, of `nodes`, that wait without ranks; `endpoint`: `HOST:PORT` of
    pod 0; `address`: the pod's own; `checkpoint_dir`: where all resume after a loss of pod 0; empty: from the start.
    """

    job: str
    nodes: int
    node_rank: int
    ranks: int
    endpoint: str
    address: str
    replica_ranks: int = 1
    spares: int = 0
    grace: str = "30s"
    checkpoint_dir: str = ""


def run_arguments(pod: PodPlace, given: Sequence[str]) -> list[str]:
    """Arguments of `regrow`; `given`: the user's flags, the script, and its arguments.

    The world has one size, written as a range: otherwise a pod that is asked to end would stop the whole job.

    Raises:
        UsageError: the numbers do not fit each other, or there is no script.
    """
    if not given:
        raise UsageError("there is no script", hint="write it after --, as for regrow run: -- train.py --lr 1e-3")
    if not 0 <= pod.node_rank < pod.nodes:
        raise UsageError(f"--node-rank {pod.node_rank} is none of {pod.nodes} pods", hint="it begins with 0")
    if not 0 <= pod.spares < pod.nodes:
        raise UsageError(f"--spares {pod.spares} leaves none of {pod.nodes} pods", hint="spares are counted in --nodes")
    world = (pod.nodes - pod.spares) * pod.ranks
    if pod.replica_ranks < 1 or world % pod.replica_ranks:
        raise UsageError(
            f"--replica-ranks {pod.replica_ranks} does not divide the {world} ranks of the job",
            hint="it is the number of ranks that hold one copy of the model: 1 for DistributedDataParallel",
        )
    copies = world // pod.replica_ranks
    kept = [f"--checkpoint-dir={pod.checkpoint_dir}", "--resume=auto"] if pod.checkpoint_dir else []
    sizes = [f"--nproc-per-node={pod.ranks}", f"--replicas={copies}:{copies}", f"--replica-ranks={pod.replica_ranks}"]
    nodes = [
        f"--nnodes={pod.nodes}:{pod.nodes}",
        f"--node-rank={pod.node_rank}",
        f"--rdzv-endpoint={pod.endpoint}",
        f"--bind={pod.address}",
        f"--local-addr={pod.address}",
        f"--drain-grace={pod.grace}",
        *([f"--spares={pod.spares}"] if pod.spares else []),
        "--no-elect",  # the endpoint is pod 0's, which is recreated under the same name
    ]
    return ["run", f"--job={pod.job}", *sizes, *(nodes if pod.nodes > 1 else []), *kept, *given]
