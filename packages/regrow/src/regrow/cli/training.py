"""Commands that train, test a script, and examine machines."""

import functools
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec
from click.core import ParameterSource

from regrow.cli.help_sections import SectionedCommand
from regrow.core import tls
from regrow.core.config import (
    data_home,
    given_back_code,
    hang_floor,
    inherited_environment,
    jobs_home,
    read_token,
    tls_files,
    visible_gpus,
)
from regrow.core.errors import UsageError
from regrow.launch import options, torchrun

if TYPE_CHECKING:
    from regrow.launch.job import HostEnvironment, RunFlags

_AS_GIVEN: Final = {"allow_interspersed_args": False, "token_normalize_func": torchrun.spelled_out}


@click.command(cls=SectionedCommand, context_settings=_AS_GIVEN, no_args_is_help=False)
@torchrun.options
@options.of_run
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(context: click.Context, /, **values: Any) -> int:
    """Run SCRIPT in workers that survive each other's failures.

    Takes torchrun's flags, with - or _. Everything after SCRIPT is passed to the script.
    """
    return start(flags_of(context, values), surroundings(values["token_file"]), values["fault_plan"])


def flags_of(context: click.Context, values: Mapping[str, Any]) -> "RunFlags":
    """The flags of a job, from the parsed options of `regrow run`. Raises `UsageError`."""
    from regrow.health.log_rules import load_rules
    from regrow.launch.job import RunFlags
    from regrow.launch.script import check_names

    check_names([*values.values(), str(Path.cwd())])
    named = {name: word for name, word in values.items() if name not in ("fault_plan", "token_file")}
    named |= {name: list(named[name]) for name in ("args", "preload", "health_check")}
    named["log_rules"] = load_rules(Path(values["log_rules"])) if values["log_rules"] else []
    return RunFlags(**named, without_meaning=torchrun.ignored(context, inherited_environment()))


def start(flags: "RunFlags", around: "HostEnvironment", fault_plan: str) -> int:
    """Run a job to its end; returns the exit code. `fault_plan`: a file of faults to inject, or empty."""
    from regrow.launch.job import make_plan
    from regrow.launch.join_node import join
    from regrow.launch.local import run as run_local
    from regrow.launch.plan import load_faults
    from regrow.launch.script import check_script

    job = make_plan(flags, around)
    if fault_plan:
        job = msgspec.structs.replace(job, faults=load_faults(Path(fault_plan), world=job.spec.most_world))
    check_script(job.script, job.preload)
    run_node = functools.partial(join, given_back_code=given_back_code())
    return run_local(job, rejoin=run_node) if job.node_rank == 0 else run_node(job)


@click.command()
@options.of_agent
@click.argument("job", required=False)
def agent(job: str | None, join: str | None, token_file: str, **values: Any) -> int:
    """Add this machine to the running JOB as another node, until the job ends or the node is given back.

    SIGTERM, SIGUSR1 or Ctrl-C gives the node back within --grace; a second one ends it at once.
    """
    from regrow.launch.join_node import join as run_node
    from regrow.launch.late_node import AgentFlags, make_join_plan
    from regrow.launch.script import check_names

    check_names([job, join, *values.values()])
    if join is None or (job and join):
        raise UsageError("regrow agent needs to know which job", hint="give --join HOST:PORT, or --join and a job here")
    plan = make_join_plan(AgentFlags(join=join or job or "", **values), surroundings(token_file))
    return run_node(plan, given_back_code=given_back_code())


def surroundings(token_file: str) -> "HostEnvironment":
    """Facts about this machine and its environment."""
    from regrow.launch.job import HostEnvironment

    return HostEnvironment(
        cpus=os.cpu_count() or 1,
        gpus=_count_gpus(),
        stamp=f"{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}",
        jobs_home=jobs_home(),
        token=read_token(token_file),
        data_home=data_home(),
        hang_floor=hang_floor(),
        encrypted=tls_files() is not None,
        certificate=tls.check(time.time()),
    )


def _count_gpus() -> int:
    """Number of GPUs that CUDA would see, found without loading CUDA."""
    visible = visible_gpus()
    if visible is not None:
        return len(visible)
    known = Path("/proc/driver/nvidia/gpus")
    return len(list(known.iterdir())) if known.is_dir() else 0


@click.command("try", context_settings=_AS_GIVEN)
@options.of_try
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def try_(script: str, **values: Any) -> int:
    """Test SCRIPT: run a few steps undisturbed, then kill each rank in each phase, and compare bit by bit.

    SCRIPT writes its own files as in any run. Exit code 0: all is mended and equal. 1: the table shows differences.
    """
    from regrow.launch.trial import TrialFlags, run_trial

    return run_trial(TrialFlags(script, **values))


_WITHOUT_TRAINING: Final = {"check_timeout": "--check-timeout", "peers": "--peer", "node": "--node"}
_WITH_TRAINING: Final = {
    "ranks": "--nproc-per-node",
    "state_gb": "--state-gb",
    "nodes": "--nodes",
    "node_rank": "--node-rank",
    "endpoint": "--rdzv-endpoint",
    "bind": "--bind",
}


def _refuse_without_meaning(context: click.Context, *, train: bool) -> None:
    """Raise `UsageError` for a `regrow doctor` flag without effect. Ignores flags that environment variables set."""
    for name, flag in (_WITHOUT_TRAINING if train else _WITH_TRAINING).items():
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            if train:
                raise UsageError(
                    f"{flag} has no effect with --train", hint="run regrow doctor with it, without --train"
                )
            raise UsageError(f"{flag} is about a training", hint="give --train with it")


@click.command()
@options.of_doctor
@click.pass_context
def doctor(
    context: click.Context,
    /,
    check_timeout: str,
    checks: tuple[str, ...],
    peers: tuple[str, ...],
    quick: bool,
    node: str,
    json: str,
    train: bool,
    **training: Any,
) -> int:
    """Examine this machine: GPUs, CPU, memory, disk, network. Nothing is changed.

    With --train: run small trainings here, inject faults, and compare the results bitwise; nothing is left behind.

    Exit code 0: fit, or only suspect; no check has failed. 1: a verdict is leave or fatal, or a check has failed.
    """
    from regrow.launch.checks import some_time, writable

    _refuse_without_meaning(context, train=train)
    if json not in ("", "-"):
        writable("--json", json)
    if train:
        from regrow.drill.command import DrillFlags, run_doctor_training

        flags = DrillFlags(checks, quick, json, **training)
        return run_doctor_training(flags, inherited_environment(), gpus=_count_gpus())
    from regrow.health.doctor import run_doctor

    return run_doctor(
        check_timeout=some_time("--check-timeout", check_timeout),
        checks=checks,
        peers=peers,
        quick=quick,
        node=node,
        json_file=json,
    )


@click.command()
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="File for the figures.")
@click.option("--steps", type=click.IntRange(min=1), help="Steps to train.")
@click.option("--seed", type=click.IntRange(min=0), help="Seed of the model, the data and the faults.")
@click.option("--plain", is_flag=True, help="Print lines instead of the live view.")
def demo(json_path: Path | None, steps: int | None, seed: int | None, plain: bool) -> int:
    """Train a small GPT while three of its workers are killed. The result is compared with the undisturbed run."""
    from regrow.launch.demo import run_demo

    given: dict[str, Any] = {"steps": steps, "seed": seed}
    return int(run_demo(json_path=json_path, plain=plain, **{k: v for k, v in given.items() if v is not None}))


COMMANDS = (run, agent, try_, doctor, demo)
