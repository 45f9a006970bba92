"""Commands about Slurm: jobs of a cluster from a terminal, and what its batch scripts run."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from regrow.core.config import state_home
from regrow.core.errors import UsageError

if TYPE_CHECKING:
    from regrow_clusters.slurm.client import SlurmClient

_FILE = click.argument("file", type=click.Path(dir_okay=False, path_type=Path))


_LONGEST_VARIABLE = 100_000
"""Most characters of the list of hosts: Linux allows 131,072 for one variable."""


def _slurm() -> "SlurmClient":
    from regrow_clusters.slurm.client import SlurmClient

    return SlurmClient(os.environ)


def _command() -> list[str]:
    """Command that starts regrow on the cluster's nodes, with this Python, which they share."""
    return [sys.executable, "-m", "regrow"]


@click.group()
def slurm() -> None:
    """Jobs on Slurm: submit them, and change them while they run; squeue, scontrol and scancel show the same jobs."""


@slurm.command("submit")
@_FILE
def submit_job(file: Path) -> None:
    """Submit the job that FILE describes, if all its keys are known and valid."""
    from regrow_clusters.slurm.commands import submit

    click.echo(submit(file, _command(), _slurm()))


@slurm.command("script")
@_FILE
@click.option("--elastic", is_flag=True, help="That of a replica beyond the gang instead of the gang's.")
def print_script(file: Path, elastic: bool) -> None:
    """Print the batch script of the job that FILE describes, for those who keep their own."""
    from regrow_clusters.slurm.commands import scripts

    click.echo(scripts(file, _command(), which="elastic" if elastic else "gang"), nl=False)


@slurm.command("status")
@click.argument("job")
def job_status(job: str) -> None:
    """Show JOB: its Slurm jobs, the requests to it, its training nodes and its progress."""
    from regrow_clusters.slurm.commands import status_lines

    for line in status_lines(job, _slurm(), _command()):
        click.echo(line)


@slurm.command("scale")
@click.argument("job")
@click.option("--replicas", type=click.IntRange(min=1), required=True, metavar="N", help="How many there shall be.")
def scale_job(job: str, replicas: int) -> None:
    """Ask JOB for another number of replicas; more of them come as Slurm has room."""
    from regrow_clusters.slurm.commands import scale

    click.echo(scale(job, replicas, _slurm(), _command()))


@slurm.command("drain")
@click.argument("job")
@click.argument("node")
@click.option("--force", is_flag=True, help="Even if the job then has to wait until another node joins.")
@click.option("--undo", is_flag=True, help="Let the job have the node again, which it keeps away from.")
def drain_node(job: str, node: str, force: bool, undo: bool) -> None:
    """Release NODE of JOB, by its name in Slurm: its ranks leave it, and the job avoids it.

    The node is avoided for badNodeTimeInSeconds, or until --undo.
    """
    from regrow_clusters.slurm.commands import drain, undo_drain

    if undo and force:
        raise UsageError("--undo and --force are both given", hint="leave one of them out")
    if undo:
        click.echo(undo_drain(job, node, _slurm(), _command()))
    else:
        click.echo(drain(job, node, _slurm(), _command(), force=force))


@slurm.command("cancel")
@click.argument("job")
@click.option("--now", is_flag=True, help="At once, as scancel does.")
def cancel_job(job: str, now: bool) -> None:
    """End JOB, and remove its waiting replicas from the queue."""
    from regrow_clusters.slurm.commands import cancel

    click.echo(cancel(job, _slurm(), _command(), now=now))


@slurm.command("node", hidden=True)
def run_node() -> int:
    """Run one node of a Slurm job; batch scripts start this by srun."""
    import msgspec

    from regrow_clusters.slurm.node import run_task
    from regrow_clusters.slurm.node_arguments import GangNode
    from regrow_clusters.slurm.scripts import HOSTS_VARIABLE, PART_VARIABLE, RESULT_VARIABLE, read_part

    text = os.environ.get(PART_VARIABLE)
    if text is None or "SLURM_PROCID" not in os.environ:
        raise UsageError("this is what batch scripts start by srun", hint="use regrow slurm submit")
    try:
        part = read_part(text)
    except msgspec.MsgspecError as error:
        raise UsageError(f"{PART_VARIABLE} is not what this version of regrow writes: {error}") from error
    gang_node = GangNode(
        job_id=int(os.environ["SLURM_JOB_ID"]),
        index=int(os.environ["SLURM_PROCID"]),
        host=os.environ.get("SLURMD_NODENAME", ""),
        hosts=os.environ["SLURM_JOB_NODELIST"],
        topology=os.environ.get("SLURM_TOPOLOGY_ADDR", ""),
        topology_pattern=os.environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", ""),
        result=os.environ.get(RESULT_VARIABLE, ""),
    )
    if part.place is None:
        gang_node = gang_node.in_order(os.environ.get(HOSTS_VARIABLE, ""))
    return run_task(part, gang_node, os.environ, state_home(), _command())


@slurm.command("order", hidden=True)
def print_order() -> None:
    """Print a Slurm job's hosts in the order of their ranks, grouped by switch; batch scripts call this."""
    from regrow_clusters.cluster.topology import rank_order
    from regrow_clusters.slurm.reading import host_list

    order = ",".join(rank_order(host_list(os.environ.get("SLURM_JOB_NODELIST", "")), _slurm().topology()))
    click.echo(order if len(order) < _LONGEST_VARIABLE else "")


@slurm.command("wish", hidden=True)
@click.argument("run")
@click.option("--set", "requests", default="", metavar="JSON", help="What is asked from now on.")
def keep_requests(run: str, requests: str) -> None:
    """Show or set the requests to RUN, on its gang's first node; the other commands call this there."""
    import msgspec

    from regrow_clusters.slurm.reading import JobRequests
    from regrow_clusters.slurm.requests import read_requests, requests_file, write_requests

    file = requests_file(state_home(), run)
    if requests:
        write_requests(file, msgspec.json.decode(requests, type=JobRequests))
    click.echo(msgspec.json.encode(read_requests(file)).decode())


COMMANDS = (slurm,)
