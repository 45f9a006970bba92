"""Commands about Kubernetes: its operator, and jobs from a terminal."""

import os
import shlex
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import click

from regrow.core.errors import UsageError
from regrow.core.exit_codes import RUN_AGAIN
from regrow.core.process.extras import install_line


def _needs_lightkube() -> None:
    if find_spec("lightkube") is None:
        raise UsageError(
            "this command speaks to Kubernetes", hint=install_line("kubernetes", package="regrow-clusters")
        )


@click.group()
def operator() -> None:
    """Run jobs on Kubernetes: the controller of TrainingJobs, and how it is installed."""


@operator.command("run")
@click.option("--key-file", required=True, metavar="FILE", help="Random bytes from which the jobs' secrets are made.")
@click.option(
    "--namespace", default="", metavar="NAME", help="Namespace of the lease by which one operator leads.  [its own]"
)
@click.option("--no-election", is_flag=True, help="There is no other operator; for trying things out.")
@click.option("--health-table", default="", metavar="FILE", help="Rules for node conditions of clusters.  [regrow's]")
@click.option("--mark-nodes", is_flag=True, help="Taint nodes that jobs have quarantined; at most a tenth of them.")
def run_operator(key_file: str, namespace: str, no_election: bool, health_table: str, mark_nodes: bool) -> int:
    """Control all TrainingJobs of the cluster that KUBECONFIG or this pod is in, until SIGTERM."""
    _needs_lightkube()
    from regrow_clusters.operator.service import run_operator as run

    where = {"key_file": key_file, "namespace": namespace, "health_table": health_table}
    return run(**where, elect=not no_election, mark_nodes=mark_nodes)


@operator.command("manifests")
@click.option(
    "--namespace", default="regrow-system", metavar="NAME", help="Namespace of the operator.  [regrow-system]"
)
@click.option("--image", default="regrow:latest", metavar="IMAGE", help="Of deploy/Dockerfile.  [regrow:latest]")
@click.option("--mark-nodes", is_flag=True, help="With the right to taint nodes that jobs have quarantined.")
def print_manifests(namespace: str, image: str, mark_nodes: bool) -> None:
    """Print the manifests of the operator, for `kubectl apply -f -`: the resource, its rights, one Deployment."""
    from regrow_clusters.operator.manifests import as_text, manifests

    click.echo(as_text(manifests(namespace=namespace, image=image, mark_nodes=mark_nodes)), nl=False)


@click.group()
def k8s() -> None:
    """Jobs on Kubernetes; kubectl can do all of it too."""


_NAMESPACE = click.option(
    "-n", "--namespace", default="", metavar="NAME", help="Namespace of the job.  [that of KUBECONFIG]"
)


@k8s.command("submit")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@_NAMESPACE
def submit_job(file: Path, namespace: str) -> None:
    """Create the TrainingJob that FILE describes, if all its fields are known and valid."""
    _needs_lightkube()
    from regrow_clusters.operator.commands import submit

    click.echo(submit(file, namespace))


@k8s.command("status")
@click.argument("job")
@_NAMESPACE
def job_status(job: str, namespace: str) -> None:
    """Show the status of JOB: replicas, conditions, avoided nodes."""
    _needs_lightkube()
    from regrow_clusters.operator.commands import status_lines

    for line in status_lines(job, namespace):
        click.echo(line)


@k8s.command("scale")
@click.argument("job")
@click.option("--replicas", type=click.IntRange(min=1), required=True, metavar="N", help="Number of replicas.")
@_NAMESPACE
def scale_job(job: str, replicas: int, namespace: str) -> None:
    """Ask JOB for another number of replicas, as kubectl scale does."""
    _needs_lightkube()
    from regrow_clusters.operator.commands import scale

    click.echo(scale(job, namespace, replicas))


@k8s.command("logs")
@click.argument("job")
@click.option("--replica", type=click.IntRange(min=0), metavar="N", help="First pod of replica N.  [0]")
@click.option("--node", type=click.IntRange(min=0), metavar="N", help="The pod that is node N of the job.")
@click.option("-f", "--follow", is_flag=True, help="Go on until the pod ends.")
@click.option("--tail", type=click.IntRange(min=1), metavar="N", help="The last N lines alone.")
@_NAMESPACE
def job_logs(job: str, replica: int | None, node: int | None, follow: bool, tail: int | None, namespace: str) -> None:
    """Show the log of a pod of JOB; pod 0 reports steps and incidents."""
    _needs_lightkube()
    if replica is not None and node is not None:
        raise UsageError("--replica and --node are both given", hint="give one of them")
    from regrow_clusters.operator.commands import logs

    def say(line: str) -> None:
        click.echo(line, nl=False)

    logs(job, namespace, replica=replica, node=node, follow=follow, tail=tail, say=say)


@k8s.command("convert", hidden=True, context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def convert(words: tuple[str, ...]) -> None:
    """Report the new name of this command."""
    hint = install_line("hyperpod", package="regrow-guests")
    raise UsageError("it is `regrow guest convert` now", hint=f"regrow guest convert {shlex.join(words)}; {hint}")


@k8s.command("placed", hidden=True)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--ranked", is_flag=True, help="Wait for the number of its node too.")
@click.option("--domain", is_flag=True, help="Add the failure domain of its node.")
@click.option("--within", default="360s", metavar="TIME", help="Time limit of the wait.  [360s]")
@click.argument("arguments", nargs=-1, required=True)
def be_placed(folder: Path, ranked: bool, domain: bool, within: str, arguments: tuple[str, ...]) -> int:
    """Run regrow with ARGUMENTS as soon as FOLDER has this pod's place; the operator's pods start by this."""
    from regrow.launch.checks import some_time
    from regrow_clusters.operator.placing.waiting import NotPlaced, placed_arguments

    def leave(*_: object) -> None:
        raise SystemExit(RUN_AGAIN)

    signal.signal(signal.SIGTERM, leave)  # the first process of a container ignores it otherwise
    try:
        reported = placed_arguments(
            folder, arguments, ranked=ranked, domain=domain, within=some_time("--within", within)
        )
    except NotPlaced as error:
        click.echo(f"regrow: {error}", err=True)
        return RUN_AGAIN
    os.execv(sys.executable, [sys.executable, "-m", "regrow", *reported])


COMMANDS = (operator, k8s)
