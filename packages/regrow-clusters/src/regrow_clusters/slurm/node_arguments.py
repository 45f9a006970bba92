"""Command of each node of a Slurm job: `regrow run` in the gang, `regrow agent` beyond it. Pure."""

from typing import Final

import msgspec

from regrow.core.exit_codes import OK, RUN_AGAIN
from regrow_clusters.cluster.sizes import allowed_sizes
from regrow_clusters.slurm.observing import nodes_of_replica
from regrow_clusters.slurm.reading import failure_domain, host_list
from regrow_clusters.slurm.scripts import JobPart

DO_NOT_RESTART: Final = 93
"""Exit code of a Slurm job for which a retry would end the same way."""
_FIRST_PORT: Final = 20000
_PORTS: Final = 12000
"""Number of ports; all are below the kernel's ephemeral ports."""


class GangNode(msgspec.Struct, frozen=True):
    """One node's task in a Slurm job, as the task's environment describes it.

    Attributes:
        index: number of the task, or the node's rank once `in_order` has been applied.
        hosts: all hosts of the Slurm job, as Slurm abbreviates them (`gpu[01-03]`), or as `in_order` lists them.
        result: folder with the pipe `code`, from which the batch script reads the exit code; empty outside the gang.
    """

    job_id: int
    index: int
    host: str
    hosts: str
    topology: str = ""
    topology_pattern: str = ""
    result: str = ""

    @property
    def first_host(self) -> str:
        """Host on which the batch script runs."""
        return host_list(self.hosts)[0]

    def in_order(self, hosts: str) -> "GangNode":
        """The node with its index in another order of the same hosts; unchanged if `hosts` are not the same ones."""
        order = hosts.split(",")
        if sorted(order) != sorted(host_list(self.hosts)):
            return self
        return msgspec.structs.replace(self, index=order.index(self.host), hosts=hosts)


def port_of(part: JobPart, job_id: int) -> int:
    """Port of a gang's coordinator: different for Slurm jobs that may share the host."""
    return part.spec.port or _FIRST_PORT + job_id % _PORTS


def run_name(part: JobPart, job_id: int) -> str:
    """Regrow's name for the run of a gang."""
    return f"{part.spec.name}-{job_id}"


def gang_arguments(part: JobPart, gang_node: GangNode, at: str, own: str) -> list[str]:
    """Arguments of `regrow run` on a node of the gang. `at`: the coordinator's address; `own`: this node's."""
    spec = part.spec
    sizes, each = allowed_sizes(spec.elastic_spec()), spec.nodes_per_replica
    arguments = [
        "run",
        f"--job={run_name(part, gang_node.job_id)}",
        f"--nnodes={spec.gang_nodes}:{sizes[-1] * each + spec.spares}",
        f"--node-rank={gang_node.index}",
        f"--nproc-per-node={spec.ranks_per_node}",
        f"--replicas={sizes[0]}:{sizes[-1]}",
        f"--replica-ranks={each * spec.ranks_per_node}",
        f"--rdzv-endpoint={at}",
        f"--drain-grace={spec.grace:g}s",
        *([] if spec.elect else ["--no-elect"]),  # a survivor resubmits the gang
        *_here(gang_node, own),
    ]
    if spec.spares:
        arguments.append(f"--spares={spec.spares}")
    if sizes != list(range(sizes[0], sizes[-1] + 1)):
        arguments.append(f"--replica-sizes={','.join(map(str, sizes))}")
    if spec.checkpoint_dir:
        arguments.append(f"--checkpoint-dir={spec.checkpoint_dir}")
        if part.attempt > 1:
            arguments.append("--resume=auto")
    return [*arguments, *spec.run_flags, *spec.script]


def replica_arguments(part: JobPart, gang_node: GangNode, at: str, own: str) -> list[str]:
    """Arguments of `regrow agent` on a node of a replica beyond the gang."""
    name = nodes_of_replica(part.spec, part.place or 0, gang_node.job_id)[gang_node.index]
    return ["agent", f"--join={at}", f"--name={name}", f"--grace={part.spec.grace:g}s", *_here(gang_node, own)]


def _here(gang_node: GangNode, own: str) -> list[str]:
    domain = failure_domain(gang_node.topology, gang_node.topology_pattern)
    return [f"--bind={own}", f"--local-addr={own}", *([f"--domain={domain}"] if domain else [])]


def exit_code(code: int, *, asked_to_leave: bool) -> int:
    """Exit code of a Slurm task, from its process's code: 0 done, 75 retry later, 93 a retry would end the same way."""
    if code == OK:
        return RUN_AGAIN if asked_to_leave else OK
    return RUN_AGAIN if code == RUN_AGAIN or code < 0 else DO_NOT_RESTART
