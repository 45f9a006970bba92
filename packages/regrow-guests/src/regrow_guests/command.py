"""`regrow guest`: manifests of jobs inside another engine, the command of their pods, and conversion of jobs."""

import os
import sys
from pathlib import Path

import click

from regrow.core.errors import UsageError
from regrow.core.process.extras import install_line


@click.group()
def guest() -> None:
    """Train inside another engine: JobSet, Kubeflow Trainer; Ray by regrow_guests.ray."""


@guest.command("runtime")
@click.option("--jobset", "as_jobset", is_flag=True, help="A JobSet by itself, not a runtime for TrainJobs.")
@click.option("--name", default="regrow", metavar="NAME", help="Of the object.  [regrow]")
@click.option("--image", required=True, metavar="IMAGE", help="With regrow, regrow-guests, torch and the script.")
@click.option("--nodes", type=click.IntRange(1, 100_000), default=2, metavar="N", help="Pods.  [2]")
@click.option("--ranks", default="1", metavar="N", help="Workers in each pod of a JobSet, as --nproc-per-node.  [1]")
@click.option("--replica-ranks", type=click.IntRange(1), default=1, metavar="N", help="That hold one model.  [1]")
@click.option("--spares", type=click.IntRange(0), default=0, metavar="N", help="Pods that wait without ranks.  [0]")
@click.option("--gpus", type=click.IntRange(0), default=0, metavar="N", help="Of NVIDIA, in each pod.  [none]")
@click.option("--grace", type=click.IntRange(1), default=30, metavar="SECONDS", help="For a pod to leave.  [30]")
@click.option("--checkpoint-dir", default="", metavar="DIR", help="Where all go on from when pod 0 was lost.")
@click.option("--lost-pods", type=click.IntRange(0), default=100, metavar="N", help="Lost one by one, at most.  [100]")
@click.option("--restarts", type=click.IntRange(0), default=3, metavar="N", help="Of all pods together.  [3]")
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def print_runtime(
    as_jobset: bool,
    name: str,
    image: str,
    nodes: int,
    ranks: str,
    replica_ranks: int,
    spares: int,
    gpus: int,
    grace: int,
    checkpoint_dir: str,
    lost_pods: int,
    restarts: int,
    words: tuple[str, ...],
) -> None:
    """Print a ClusterTrainingRuntime, or a JobSet that runs WORDS, for `kubectl apply -f -`.

    A pod that is lost comes back into the running job, and no other pod is started anew. WORDS, behind --: flags of
    regrow run, the script, its arguments. A TrainJob has them in spec.trainer.args.
    """
    from regrow_guests.pods.manifests import GuestJob, as_text, jobset, training_runtime

    if as_jobset != bool(words):
        lacks = "a JobSet needs a script" if as_jobset else "a runtime has no script: its TrainJobs bring theirs"
        raise UsageError(lacks, hint="regrow guest runtime --jobset ... -- train.py, or neither of the two")
    job = GuestJob(
        name=name,
        image=image,
        nodes=nodes,
        ranks=ranks,
        replica_ranks=replica_ranks,
        spares=spares,
        gpus=gpus,
        grace=grace,
        checkpoint_dir=checkpoint_dir,
        lost_pods=lost_pods,
        restarts=restarts,
        words=words,
    )
    click.echo(as_text(jobset(job) if as_jobset else training_runtime(job)), nl=False)


@guest.command("convert")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--script", default="", metavar="WORDS", help="The script and its arguments, where FILE hides them.")
@click.option(
    "--pods-per-replica", type=click.IntRange(1, 1024), default=1, metavar="K", help="That hold one model.  [1]"
)
def convert(file: Path, script: str, pods_per_replica: int) -> int:
    """Print the HyperPodPyTorchJob in FILE (YAML) as a TrainingJob; notes on its fields go to standard error.

    Exit code 1: a field is not known here, so nothing is printed.
    """
    try:
        from regrow_guests.hyperpod.converting import converted
    except ModuleNotFoundError as error:
        raise UsageError(
            "TrainingJobs come with regrow-clusters", hint=install_line("hyperpod", package="regrow-guests")
        ) from error

    made = converted(file, script=script, pods_per_replica=pods_per_replica)
    for note in made.notes:
        click.echo(f"regrow: {note}", err=True)
    for unknown in made.unknown:
        click.echo(f"regrow: {unknown} is not known here: take it out of {file}, and see what it was for", err=True)
    if not made.unknown:
        click.echo(made.text, nl=False)
    return 1 if made.unknown else 0


@guest.command("pod", hidden=True)
@click.option("--job", required=True, metavar="NAME")
@click.option("--nodes", type=click.IntRange(1), required=True, metavar="N")
@click.option("--node-rank", type=click.IntRange(0), required=True, metavar="N")
@click.option("--ranks", required=True, metavar="N")
@click.option("--rdzv-endpoint", required=True, metavar="HOST:PORT")
@click.option("--address", required=True, metavar="IP")
@click.option("--replica-ranks", type=click.IntRange(1), default=1, metavar="N")
@click.option("--spares", type=click.IntRange(0), default=0, metavar="N")
@click.option("--grace", default="30s", metavar="TIME")
@click.option("--checkpoint-dir", default="", metavar="DIR")
@click.option("--steps", type=click.IntRange(0), default=0, envvar="REGROW_GUEST_STEPS", metavar="N")
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def run_pod(
    job: str,
    nodes: int,
    node_rank: int,
    ranks: str,
    rdzv_endpoint: str,
    address: str,
    replica_ranks: int,
    spares: int,
    grace: str,
    checkpoint_dir: str,
    steps: int,
    words: tuple[str, ...],
) -> int:
    """Run a node of the job, at its start or after a loss; pods of `regrow guest runtime` start by this."""
    from regrow.cli.training import surroundings
    from regrow.launch.checks import nproc_of
    from regrow_guests.pods.arguments import PodPlace, run_arguments
    from regrow_guests.pods.reporting import StatusReporter, StatusServer, run_and_report

    around = surroundings("")
    place = PodPlace(
        job=job,
        nodes=nodes,
        node_rank=node_rank,
        ranks=nproc_of(ranks, cpus=around.cpus, gpus=around.gpus),
        endpoint=rdzv_endpoint,
        address=address,
        replica_ranks=replica_ranks,
        spares=spares,
        grace=grace,
        checkpoint_dir=checkpoint_dir,
    )
    made = run_arguments(place, words)
    settings = {key: os.environ.get(f"KUBEFLOW_TRAINER_SERVER_{key}", "") for key in ("URL", "CA_CERT", "TOKEN")}
    if nodes == 1 or node_rank != 0 or not all(settings.values()):
        os.execv(sys.executable, [sys.executable, "-m", "regrow", *made])
    server = StatusServer(settings["URL"], Path(settings["CA_CERT"]), Path(settings["TOKEN"]))
    host = f"[{address}]" if ":" in address else address
    return run_and_report(
        made, StatusReporter(server, f"{host}:{rdzv_endpoint.rpartition(':')[2]}", around.token, steps)
    )
