"""Commands for running and ended jobs."""

import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from regrow.core.config import jobs_home
from regrow.core.errors import UsageError
from regrow.core.exit_codes import REFUSED
from regrow.core.messages.vocabulary import FaultHow, FaultStage

if TYPE_CHECKING:
    from regrow.launch.folder import JobEntry
    from regrow.launch.remote import CoordinatorClient
    from regrow.membership.orders import AnswerScale


def client_of(job: str | None) -> tuple["JobEntry", "CoordinatorClient"]:
    """A running job and a client of its coordinator. Raises `UsageError` if there is none."""
    from regrow.launch.folder import find_job
    from regrow.launch.remote import CoordinatorClient

    entry = find_job(jobs_home(), job)
    entry.encrypt()
    return entry, CoordinatorClient(entry.address, entry.token)


@click.command()
@click.argument("job", required=False)
@click.option("--rank", type=int, required=True, help="Rank that fails.")
@click.option("--how", type=click.Choice([str(how) for how in FaultHow]), default=str(FaultHow.SIGKILL))
@click.option("--at", type=click.Choice([str(stage) for stage in FaultStage]), default=str(FaultStage.NOW))
@click.option("--step", type=click.IntRange(min=0), help="Step to fail in; without it, the next one.")
def kill(job: str | None, rank: int, how: str, at: str, step: int | None) -> None:
    """Inject a fault into one worker of JOB, to test its recovery. JOB may be left out when only one is running."""
    from regrow.core.ids import Rank, StepNo
    from regrow.core.messages.vocabulary import FaultSpec

    entry, client = client_of(job)
    fault = FaultSpec(
        fault=f"asked-{secrets.token_hex(4)}",
        rank=Rank(rank),
        how=FaultHow(how),
        stage=FaultStage(at),
        step=None if step is None else StepNo(step),
    )
    client.kill(fault)
    when = "" if at == FaultStage.NOW and step is None else f" at {at}" + ("" if step is None else f" of step {step}")
    late = "; if nothing runs there, the job reports it" if at == FaultStage.BETWEEN else ""
    click.echo(f"job {entry.job}: rank {rank} will suffer {how}{when}{late}")


@click.command()
@click.argument("job", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(job: str | None, as_json: bool) -> None:
    """Show the nodes and workers of JOB and its progress."""
    import msgspec

    from regrow.launch.listing import status_lines

    _, client = client_of(job)
    view = client.status()
    if as_json:
        click.echo(msgspec.json.encode(view).decode())
        return
    for line in status_lines(view):
        click.echo(line)


@click.command()
@click.argument("job", required=False)
@click.option("--plain", is_flag=True, help="Print lines instead of the live view.")
def top(job: str | None, plain: bool) -> None:
    """Watch JOB: its ranks, loss, incidents and goodput. Ctrl-C ends the view, not the job."""
    from regrow.launch.listing import watch_job

    watch_job(jobs_home(), job, plain=plain)


@click.command("jobs")
@click.option("--tag", default="", metavar="NAME", help="Only jobs of regrow run --tag NAME, with their results.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list of objects.")
def list_jobs(tag: str, as_json: bool) -> None:
    """List jobs, the newest last. With --tag or --json also steps, incidents and goodput, from their records."""
    import msgspec

    from regrow.launch import folder
    from regrow.launch.listing import job_lines, job_rows, tagged_lines

    home = jobs_home()
    entries = [entry for entry in folder.list_jobs(home) if not tag or entry.tag == tag]
    if as_json:
        click.echo(msgspec.json.encode(job_rows(home, entries)).decode())
        return
    for line in tagged_lines(job_rows(home, entries)) if tag else job_lines(entries):
        click.echo(line)


@click.command()
@click.argument("job", required=False)
@click.option("--replicas", type=int, metavar="N", help="Number of replicas.")
@click.option("--ranks", type=int, metavar="N", help="Number of ranks instead, in whole replicas.")
@click.option("--stay", metavar="TIME", help="Time for which the capacity stays; growth must pay off within it.")
@click.option("--reason", default="", metavar="TEXT", help="Reason to record.")
def scale(job: str | None, replicas: int | None, ranks: int | None, stay: str | None, reason: str) -> int:
    """Change the number of replicas of JOB. Exit code 1: the job refuses, gives the reason, and goes on unchanged."""
    from regrow.launch.checks import some_time
    from regrow.membership.server.requests import ScaleRequest

    if (replicas is None) == (ranks is None):
        raise UsageError("how large shall the job be?", hint="give either --replicas N or --ranks N")
    entry, client = client_of(job)
    seconds = None if stay is None else some_time("--stay", stay)
    return answered(entry, client.scale(ScaleRequest(replicas, ranks, seconds, reason or "regrow scale")))


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="[JOB] NODE")
@click.option("--grace", default="30s", metavar="TIME", help="Time for its ranks to leave it.  [30s]")
@click.option("--force", is_flag=True, help="Even if the job then has to wait for another node.")
@click.option("--reason", default="", metavar="TEXT", help="Reason to record.")
def drain(names: tuple[str, ...], grace: str, force: bool, reason: str) -> int:
    """Give NODE of JOB back. Its ranks leave at the next step boundary, then its agent ends; the job goes on."""
    from regrow.core.ids import NodeId
    from regrow.launch.checks import some_time
    from regrow.membership.server.requests import DrainRequest

    if len(names) > 2:
        raise UsageError(f"drain takes one job and one node, not {' '.join(names)}")
    seconds = some_time("--grace", grace, zero=True)
    entry, client = client_of(names[0] if len(names) == 2 else None)
    return answered(entry, client.drain(DrainRequest(NodeId(names[-1]), seconds, reason or "regrow drain", force)))


def answered(entry: "JobEntry", answer: "AnswerScale") -> int:
    """Print the coordinator's answer to a request; returns the exit code."""
    if not answer.accepted:
        click.echo(f"regrow: job {entry.job}: {answer.reason}", err=True)
        return REFUSED
    click.echo(f"job {entry.job}: {answer.reason}")
    return 0


@click.command()
@click.argument("job", required=False)
def token(job: str | None) -> None:
    """Print the secret of JOB, which runs on this machine; the live page needs it to drain, scale and kill."""
    entry, _ = client_of(job)
    click.echo(entry.token)


@click.command()
@click.argument("job", required=False)
@click.option("--grace", default="30s", metavar="TIME", help="Time to save the state, with --checkpoint-every.  [30s]")
def stop(job: str | None, grace: str) -> None:
    """Ask JOB to save its state and end. It saves only if it writes checkpoints, and exits with 75."""
    from regrow.launch.checks import some_time

    patience = some_time("--grace", grace, zero=True)
    entry, client = client_of(job)
    client.stop("asked to by regrow stop", patience=patience)
    click.echo(f"job {entry.job} is stopping")


@click.command()
@click.argument("job", required=False)
@click.option("--rank", type=click.IntRange(min=0), required=True, help="Rank whose output is printed.")
def logs(job: str | None, rank: int) -> None:
    """Print the output of one rank of JOB. It includes all workers that held the rank; JOB may have ended."""
    from regrow.launch.folder import find_job
    from regrow.launch.listing import print_logs

    entry = find_job(jobs_home(), job, running=False)
    print_logs(entry, rank, sys.stdout.buffer)


@click.command()
@click.argument("run", required=False, metavar="[JOB|FOLDER|FILE]")
def story(run: str | None) -> None:
    """Describe a run in plain words: each incident, its cause, how it was mended, and what it cost.

    Default: the running job, else the newest.
    """
    from regrow.launch.verifying import find_run
    from regrow.observe.run_story import run_lines

    found = find_run(jobs_home(), run)
    for line in run_lines(found.records, live=found.live):
        click.echo(line)


@click.command()
@click.argument("run", required=False, metavar="[JOB|FOLDER|FILE]")
@click.option("--price", type=float, default=0.0, metavar="$", help="Price of a node-hour.  [0]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def goodput(run: str | None, price: float, as_json: bool) -> None:
    """Show where each rank-second of a run went, and what each incident, node and cause cost.

    Default: the running job, else the newest.
    """
    import msgspec

    if not 0.0 <= price < float("inf"):
        raise UsageError(f"--price {price:g} is no price", hint="give the price of a node-hour: a number from 0 on")
    from regrow.launch.verifying import find_run_on_one_clock
    from regrow.observe.goodput_report import report, report_lines

    records = find_run_on_one_clock(jobs_home(), run).records
    found = report(records, price=price)
    lines = [msgspec.json.encode(found).decode()] if as_json else report_lines(found, records)
    for line in lines:
        click.echo(line)


@click.command()
@click.argument("run", required=False, metavar="[JOB|FOLDER|FILE]")
@click.option("--out", type=click.Path(path_type=Path), metavar="PATH", help="A .png, a .svg, or a folder for both.")
@click.option("--x", "axis", type=click.Choice(["time", "step"]), default="time", help="The x axis.  [time]")
@click.option("--metric", default="loss", metavar="NAME", help="Logged number to show.  [loss]")
def plot(run: str | None, out: Path | None, axis: str, metric: str) -> None:
    """Draw world size, throughput and loss of a run. Marks incidents; needs regrow[plot].

    Default: the running job, else the newest. Writes plot.png and plot.svg next to the records.
    """
    from regrow.launch.plotting import plot as draw
    from regrow.observe.plot_series import Axis

    for path in draw(jobs_home(), run, out=out, axis=Axis(axis), metric=metric):
        click.echo(str(path))


@click.command()
@click.argument("run", required=False, metavar="[JOB|FOLDER]")
@click.option("--otlp", required=True, metavar="URL", help="Address of an OpenTelemetry collector, http://HOST:4318.")
@click.option("--follow", is_flag=True, help="Until the job ends, send each incident as soon as it is over.")
def spans(run: str | None, otlp: str, follow: bool) -> None:
    """Send the incidents of a run as OpenTelemetry traces, their stages as spans; needs regrow[otel].

    Default: the running job, else the newest. An incident sent twice has the same trace id.
    """
    from regrow.launch.folder import read_entry
    from regrow.launch.verifying import locate
    from regrow.observe.spans.export import OtlpSender, follow_spans

    folder = locate(jobs_home(), run).absolute()
    if not (folder / "events.jsonl").exists():
        raise UsageError(f"there are no records in {folder}", hint="name a job, or its folder")

    def running() -> bool:
        entry = read_entry(folder) if follow else None
        return entry is not None and entry.running

    def say(text: str) -> None:
        click.echo(f"regrow: {text}", err=True)

    try:
        sent = follow_spans(folder, OtlpSender(otlp), running=running, say=say)
    except KeyboardInterrupt:  # ends the export, not the job
        return
    click.echo(f"{sent} spans sent to {otlp}")


COMMANDS = (kill, status, top, list_jobs, scale, drain, token, stop, logs, story, goodput, plot, spans)
