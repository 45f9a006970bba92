"""The command tree: parses words, calls one function, prints the result. What a command needs is imported in it."""

import os
import secrets
import sys
import time
import traceback
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from regrow.core.config import data_home, hang_floor, jobs_home, read_token, runtime_home, state_home, visible_gpus
from regrow.core.errors import DeadlineExceeded, RegrowError, UsageError
from regrow.core.exit_codes import INTERNAL_ERROR, REFUSED, RUN_AGAIN, USAGE
from regrow.core.messages import FaultHow, FaultStage
from regrow.infer.batch.command import batch
from regrow.launch import options, torchrun
from regrow.observe.forecast_command import plan

if TYPE_CHECKING:
    from regrow.launch.folder import JobEntry
    from regrow.launch.job import HostEnvironment
    from regrow.launch.remote import CoordinatorClient
    from regrow.membership.orders import AnswerScale

_AS_GIVEN: Final = {"allow_interspersed_args": False, "token_normalize_func": torchrun.spelled_out}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code, and shows no stack of ours.

    0: done. 1: the script's own error, or a running job refuses. 2: usage. 75: run me again. 70: a defect of regrow.
    """
    try:
        code = commands.main(args=None if argv is None else list(argv), prog_name="regrow", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return USAGE
    except click.UsageError as error:
        place = f" ({error.ctx.command_path} --help lists what there is)" if error.ctx is not None else ""
        return _fail(f"{error.format_message().rstrip('.')}{place}", USAGE)
    except click.ClickException as error:
        return _fail(error.format_message(), USAGE)
    except (click.Abort, KeyboardInterrupt):
        return _fail("interrupted", RUN_AGAIN)
    except RegrowError as error:
        return _fail(str(error), RUN_AGAIN if isinstance(error, DeadlineExceeded) else USAGE)
    except BrokenPipeError:
        # Whoever read the output (`| head`) has gone; the interpreter must not fail on flushing it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # noqa: BLE001 - a user is shown a sentence, the stack goes to a file
        return _fail(_defect(error), INTERNAL_ERROR)
    return code if isinstance(code, int) else 0


def _fail(text: str, code: int) -> int:
    click.echo(f"regrow: {text}", err=True)
    return code


def _defect(error: Exception) -> str:
    """Keep the stack in a file; the sentence that says where."""
    stack = "".join(traceback.format_exception(error))
    path = state_home() / f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    what = f"a defect of regrow: {type(error).__name__}: {error}"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(stack, encoding="utf-8")
    except OSError as failure:
        return f"{what}; its trace could not be written to {path}: {failure.strerror or failure}"
    return f"{what}; please report it with {path}"


def _version() -> str:
    try:
        return version("regrow")
    except PackageNotFoundError:
        return "not installed"


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, commands=[batch, plan])
@click.version_option(_version(), prog_name="regrow")
def commands() -> None:
    """Training that goes straight on when workers are lost."""


# --- run ---------------------------------------------------------------------------------------------------------


@commands.command(context_settings=_AS_GIVEN, no_args_is_help=False)
@torchrun.options
@options.of_run
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(context: click.Context, /, **words: Any) -> int:
    """Train: run SCRIPT in several workers that survive one another.

    Takes torchrun's flags, with - or _. Everything after SCRIPT belongs to the script.
    """
    from regrow.launch.job import RunFlags, make_plan, world_of
    from regrow.launch.join_node import join
    from regrow.launch.local import run as run_local
    from regrow.launch.plan import load_faults
    from regrow.launch.script import check_script

    fault_plan, token_file = words.pop("fault_plan"), words.pop("token_file")
    words |= {name: list(words[name]) for name in ("args", "preload", "health_check")}
    flags = RunFlags(**words, without_meaning=torchrun.ignored(context))
    around = _surroundings(token_file)
    faults = load_faults(Path(fault_plan), world=world_of(flags, around)) if fault_plan else []
    job = make_plan(flags, around, faults)
    check_script(job.script, job.preload)
    return run_local(job) if job.node_rank == 0 else join(job)


@commands.command()
@options.of_agent
@click.argument("job", required=False)
def agent(job: str | None, join: str | None, token_file: str, **words: Any) -> int:
    """Bring this machine into JOB, which runs, as one node more: until the job's end, or until the node is given back.

    SIGTERM, SIGUSR1 or Ctrl-C gives it back within --grace; a second one ends it at once.
    """
    from regrow.launch.join_node import join as run_node
    from regrow.launch.late_node import AgentFlags, make_join_plan

    if join is None or (job and join):
        raise UsageError("regrow agent needs to know which job", hint="give --join HOST:PORT, or --join and a job here")
    return run_node(make_join_plan(AgentFlags(join=join or job or "", **words), _surroundings(token_file)))


def _surroundings(token_file: str) -> "HostEnvironment":
    from regrow.launch.job import HostEnvironment

    return HostEnvironment(
        cpus=os.cpu_count() or 1,
        gpus=_count_gpus(),
        stamp=f"{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}",
        jobs_home=jobs_home(),
        socket_home=runtime_home(),
        token=read_token(token_file),
        data_home=data_home(),
        hang_floor=hang_floor(),
    )


def _count_gpus() -> int:
    """GPUs that CUDA would show, without loading it."""
    visible = visible_gpus()
    if visible is not None:
        return len(visible)
    known = Path("/proc/driver/nvidia/gpus")
    return len(list(known.iterdir())) if known.is_dir() else 0


@commands.command("try", context_settings=_AS_GIVEN)
@options.of_try
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def try_(script: str, **words: Any) -> int:
    """Try SCRIPT out: some steps alone, then each rank killed in each phase, and what differs, bit by bit.

    SCRIPT writes its own files as in any run. Exit code 0: every kill was mended, nothing differs. 1: the table says.
    """
    from regrow.launch.trial import TrialFlags, run_trial

    return run_trial(TrialFlags(script, **words))


@commands.command()
@options.of_doctor
def doctor(check_timeout: str, **words: Any) -> int:
    """Examine this machine: GPUs, memory, disk, network, products with a known answer; nothing is changed or mended.

    Exit code 0: fit, or only suspect. 1: a verdict is leave or fatal.
    """
    from regrow.health.doctor import run_doctor
    from regrow.launch.checks import some_time

    return run_doctor(check_timeout=some_time("--check-timeout", check_timeout), **words)


# --- data --------------------------------------------------------------------------------------------------------


@commands.group()
def data() -> None:
    """Prepare training data, and check what a run has read."""


@data.command()
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="DIR", help="The corpus's folder.")
@click.option(
    "--tokenizer", required=True, metavar="SPEC", help="bytes, the path of a tokenizer.json, or module:function."
)
@click.option("--column", default="text", metavar="NAME", help="Where the text is in a record.  [text]")
@click.option("--append-eos", metavar="ID", help="The token after each document: its number, or its text.")
@click.option("--dtype", type=click.Choice(["uint16", "uint32"]), help="Of the tokens.  [what the vocabulary needs]")
@click.option("--workers", type=click.IntRange(min=1), default=None, metavar="N", help="Processes.  [one a CPU]")
@click.option(
    "--shard-bytes", type=click.IntRange(min=1), default=1 << 26, metavar="N", help="A shard's size.  [67108864]"
)
def pack(inputs: tuple[str, ...], **words: Any) -> None:
    """Tokenize INPUTs into a corpus that regrow.data.PackedTokens reads.

    INPUT is a path, a glob or a URL of JSON Lines (.jsonl, .json, also .gz), Parquet or Arrow files. Run again after an
    interruption, it uses what was done. Needs regrow[data].
    """
    from rich.console import Console

    from regrow.data.packing.packer import PackWords
    from regrow.data.packing.packer import pack as run_pack

    words["workers"] = words["workers"] or 0
    run_pack(PackWords(inputs=inputs, **words), Console())


@data.command()
@click.argument("jobs", nargs=-1, metavar="[JOB|FOLDER|FILE]...")
@click.option("--against", multiple=True, metavar="JOB", help="Each step must have read the same here; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def verify(jobs: tuple[str, ...], against: tuple[str, ...], as_json: bool) -> int:
    """Prove from its records that JOB has read every sample once, whatever happened to it.

    Several JOBs are one training, each resumed from the one before it. Without any it is the one that runs, or the
    newest. Exit code 0: proven. 1: something is wrong, or the records do not tell all.
    """
    import msgspec

    from regrow.launch.verifying import verify as decide
    from regrow.observe.proof import Verdict, proof_lines

    proof = decide(jobs_home(), jobs, against)
    for line in [msgspec.json.encode(proof).decode()] if as_json else proof_lines(proof):
        click.echo(line)
    return 0 if proof.verdict is Verdict.PROVEN else 1


# --- jobs that run -----------------------------------------------------------------------------------------------


def _client(job: str | None) -> tuple["JobEntry", "CoordinatorClient"]:
    from regrow.launch.folder import find_job
    from regrow.launch.remote import CoordinatorClient

    entry = find_job(jobs_home(), job)
    return entry, CoordinatorClient(entry.address, entry.token)


@commands.command()
@click.argument("job", required=False)
@click.option("--rank", type=int, required=True, help="Whom it strikes.")
@click.option("--how", type=click.Choice([str(how) for how in FaultHow]), default=str(FaultHow.SIGKILL))
@click.option("--at", type=click.Choice([str(stage) for stage in FaultStage]), default=str(FaultStage.NOW))
@click.option("--step", type=click.IntRange(min=0), help="In this step; without it, in the next one.")
def kill(job: str | None, rank: int, how: str, at: str, step: int | None) -> None:
    """Let one worker of JOB fail, to see that the job goes on. JOB may be left out when one is running."""
    from regrow.core.ids import Rank, StepNo
    from regrow.core.messages import FaultSpec

    entry, client = _client(job)
    fault = FaultSpec(
        fault=f"asked-{secrets.token_hex(4)}",
        rank=Rank(rank),
        how=FaultHow(how),
        stage=FaultStage(at),
        step=None if step is None else StepNo(step),
    )
    client.kill(fault)
    when = "" if at == FaultStage.NOW and step is None else f" at {at}" + ("" if step is None else f" of step {step}")
    click.echo(f"job {entry.job}: rank {rank} will suffer {how}{when}")


@commands.command()
@click.argument("job", required=False)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def status(job: str | None, as_json: bool) -> None:
    """Show who is in JOB and how far it is."""
    import msgspec

    from regrow.launch.listing import status_lines

    _, client = _client(job)
    view = client.status()
    if as_json:
        click.echo(msgspec.json.encode(view).decode())
        return
    for line in status_lines(view):
        click.echo(line)


@commands.command()
def jobs() -> None:
    """List jobs, the newest last."""
    from regrow.launch.folder import list_jobs
    from regrow.launch.listing import job_lines

    for line in job_lines(list_jobs(jobs_home())):
        click.echo(line)


@commands.command()
@click.argument("job", required=False)
@click.option("--replicas", type=int, metavar="N", help="How many there shall be.")
@click.option("--ranks", type=int, metavar="N", help="Instead: how many ranks, whole replicas of them.")
@click.option("--stay", metavar="TIME", help="How long the capacity will be there; growing must pay in that time.")
@click.option("--reason", default="", metavar="TEXT", help="For the record.")
def scale(job: str | None, replicas: int | None, ranks: int | None, stay: str | None, reason: str) -> int:
    """Ask JOB to have another number of replicas. Exit code 1: it refuses, says why, and goes on as it is."""
    from regrow.launch.checks import some_time
    from regrow.membership.server.http_api import ScaleWish

    if (replicas is None) == (ranks is None):
        raise UsageError("how large shall the job be?", hint="give either --replicas N or --ranks N")
    entry, client = _client(job)
    seconds = None if stay is None else some_time("--stay", stay)
    return _answered(entry, client.scale(ScaleWish(replicas, ranks, seconds, reason or "regrow scale")))


@commands.command()
@click.argument("names", nargs=-1, required=True, metavar="[JOB] NODE")
@click.option("--grace", default="30s", metavar="TIME", help="How long its ranks may take to leave it.  [30s]")
@click.option("--reason", default="", metavar="TEXT", help="For the record.")
def drain(names: tuple[str, ...], grace: str, reason: str) -> int:
    """Give NODE of JOB back: its ranks leave it at the next boundary, then its agent ends, and the job goes on."""
    from regrow.core.ids import NodeId
    from regrow.launch.checks import some_time
    from regrow.membership.server.http_api import DrainWish

    if len(names) > 2:
        raise UsageError(f"drain takes one job and one node, not {' '.join(names)}")
    seconds = some_time("--grace", grace, zero=True)
    entry, client = _client(names[0] if len(names) == 2 else None)
    return _answered(entry, client.drain(DrainWish(NodeId(names[-1]), seconds, reason or "regrow drain")))


def _answered(entry: "JobEntry", answer: "AnswerScale") -> int:
    """Say what becomes of what was asked; the exit code."""
    if not answer.accepted:
        return _fail(f"job {entry.job}: {answer.reason}", REFUSED)
    click.echo(f"job {entry.job}: {answer.reason}")
    return 0


@commands.command()
@click.argument("job", required=False)
def stop(job: str | None) -> None:
    """Ask JOB to end; it then exits with 75."""
    entry, client = _client(job)
    client.stop("asked to by regrow stop")
    click.echo(f"job {entry.job} is stopping")


@commands.command()
@click.argument("job", required=False)
@click.option("--rank", type=click.IntRange(min=0), required=True, help="Whose output.")
def logs(job: str | None, rank: int) -> None:
    """Print what the workers of one rank of JOB have written, one after the other; for ended jobs too."""
    from regrow.launch.folder import find_job
    from regrow.launch.listing import print_logs

    entry = find_job(jobs_home(), job, running=False)
    print_logs(entry, rank, sys.stdout.buffer)


@commands.command()
@click.argument("run", required=False, metavar="[JOB|FOLDER|FILE]")
@click.option("--out", type=click.Path(path_type=Path), metavar="PATH", help="A .png, a .svg, or a folder for both.")
@click.option("--x", "axis", type=click.Choice(["time", "step"]), default="time", help="The x axis.  [time]")
@click.option("--metric", default="loss", metavar="NAME", help="Which logged number is shown.  [loss]")
def plot(run: str | None, out: Path | None, axis: str, metric: str) -> None:
    """Draw world size, throughput and loss of a run, with its incidents; needs regrow[plot].

    Without a name it is the job that runs, or the newest. Writes plot.png and plot.svg beside the records.
    """
    from regrow.launch.plotting import plot as draw
    from regrow.observe.plot_series import Axis

    for path in draw(jobs_home(), run, out=out, axis=Axis(axis), metric=metric):
        click.echo(str(path))


@commands.command()
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures here.")
@click.option("--steps", type=click.IntRange(min=1), help="Steps to train.")
@click.option("--seed", type=click.IntRange(min=0), help="Of the model, the data and the faults.")
@click.option("--plain", is_flag=True, help="Lines instead of the live view.")
def demo(json_path: Path | None, steps: int | None, seed: int | None, plain: bool) -> int:
    """Train a small GPT, kill three of its four workers, and compare with the undisturbed run."""
    from regrow.launch.demo import run_demo

    given: dict[str, Any] = {"steps": steps, "seed": seed}
    return int(run_demo(json_path=json_path, plain=plain, **{k: v for k, v in given.items() if v is not None}))
