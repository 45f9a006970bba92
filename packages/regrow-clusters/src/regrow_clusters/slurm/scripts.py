"""Batch scripts of a job: one for the gang, one for each replica beyond it. Pure.

A script contains the whole job, so that later changes of the job's file do not affect a submitted job.
"""

import contextlib
import shlex
from typing import Final

import msgspec

from regrow.core.errors import UsageError
from regrow_clusters.slurm.job_file import PartSpec, SlurmJobSpec

PART_VARIABLE: Final = "REGROW_SLURM_PART"
RESULT_VARIABLE: Final = "REGROW_SLURM_RESULT"
HOSTS_VARIABLE: Final = "REGROW_SLURM_HOSTS"
"""Variable with the gang's hosts in the order of their ranks; empty: Slurm's order."""
_STRAGGLERS_S: Final = 30
"""Time for the other nodes to end after the job's end is reported."""


class JobPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """Part of a job that runs as one Slurm job. `place`: of a replica beyond the gang; None: it is the gang.

    `attempt`: number of the gang's start, from 1. `avoid`: excluded nodes. `gang` and `at`: for a replica, the Slurm
    job of the gang that requests it, and the address of the coordinator.
    """

    spec: SlurmJobSpec
    place: int | None = None
    attempt: int = 1
    avoid: tuple[str, ...] = ()
    gang: int = 0
    at: str = ""

    @property
    def job_name(self) -> str:
        """Name of the Slurm job."""
        return self.spec.name if self.place is None else f"{self.spec.name}+{self.place}"

    @property
    def nodes(self) -> int:
        """Number of its nodes."""
        return self.spec.gang_nodes if self.place is None else self.spec.nodes_per_replica


def script_of(part: JobPart, command: list[str]) -> str:
    """The batch script. `command`: starts regrow, if the job's file gives no command."""
    given = part.spec.gang if part.place is None else part.spec.elastic
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(part, given)), "", _part_line(part)]
    if part.place is None:
        lines.append('export REGROW_TOKEN="${REGROW_TOKEN:-$(od -An -N32 -tx1 /dev/urandom | tr -d " \\n")}"')
    # This overrides sbatch's options: a requeued job would run beside the one that regrow submits, from the beginning.
    lines.append('scontrol update "jobid=$SLURM_JOB_ID" requeue=0')
    if part.spec.setup:
        lines.append(part.spec.setup.rstrip("\n"))
    step = "srun --no-kill --kill-on-bad-exit=0 --wait=0 --ntasks-per-node=1 --export=ALL "
    step += f"--nodes={part.nodes} --ntasks={part.nodes} "
    ours = shlex.join(part.spec.command or command)
    if part.place is None and part.nodes > 2:
        # Computed once for all nodes, because they must agree.
        lines.append(f'export {HOSTS_VARIABLE}="$({ours} slurm order 2>/dev/null)"')
    body = _gang_body if part.place is None else _replica_body
    return "\n".join([*lines, *body(f"{step}{ours} slurm node", _trial(ours))]) + "\n"


def script_again(script: str, part: JobPart) -> str:
    """Adapt a script of `script_of`, perhaps changed by a user, to another part. Raises `UsageError`."""
    lines = script.splitlines()
    if not any(_is_part_line(line) for line in lines):
        raise UsageError(
            f"the batch script for {part.job_name} has no line export {PART_VARIABLE}=...",
            hint="begin with what regrow slurm script prints, and keep that line",
        )
    ours = [option for option in _options(part, PartSpec()) if option.startswith(("--job-name", "--exclude"))]
    kept = [line for line in lines[1:] if not line.startswith(("#SBATCH --job-name", "#SBATCH --exclude"))]
    changed = [_part_line(part) if _is_part_line(line) else line for line in kept]
    return "\n".join([lines[0], *(f"#SBATCH {option}" for option in ours), *changed]) + "\n"


def _part_line(part: JobPart) -> str:
    return f"export {PART_VARIABLE}={shlex.quote(msgspec.json.encode(part).decode())}"


def _is_part_line(line: str) -> bool:
    return line.startswith(f"export {PART_VARIABLE}=")


def part_in(script: str) -> JobPart | None:
    """The part in a batch script of `script_of`, even if a user has changed the script; None: there is none."""
    for line in script.splitlines():
        if _is_part_line(line):
            with contextlib.suppress(ValueError, msgspec.MsgspecError):
                return read_part(shlex.split(line)[1].partition("=")[2])
    return None


def read_part(text: str) -> JobPart:
    """Parse the variable's value. Raises `msgspec.MsgspecError`."""
    return msgspec.json.decode(text, type=JobPart)


def _options(part: JobPart, given: PartSpec) -> list[str]:
    spec = part.spec
    options = [
        f"--job-name={part.job_name}",
        f"--nodes={part.nodes}",
        "--ntasks-per-node=1",
        "--no-requeue",
        f"--output={spec.output or 'slurm-%j.out'}",
        "--open-mode=append",
    ]
    if part.place is None:
        options.append("--no-kill")
    if given.partition:
        options.append(f"--partition={given.partition}")
    if spec.signal_before_end_in_seconds:
        options.append(f"--signal=TERM@{spec.signal_before_end_in_seconds}")
    if part.avoid:
        options.append(f"--exclude={','.join(part.avoid)}")
    return [*options, *given.options]


def _trial(ours: str) -> str:
    """Shell text that tries to start regrow here: its failure may explain why no node reported the end."""
    text = "regrow: %s cannot be started on %s: install regrow there, or set command or setup in job.toml\\n"
    complaint = f'printf {shlex.quote(text)} {shlex.quote(ours)} "$(hostname)" >&2'
    return f"{ours} --version >/dev/null || {{ {complaint}; code=93; }}"


def _replica_body(step: str, trial: str) -> list[str]:
    return [step, "code=$?", f'case "$code" in 0|75|93) ;; *) {trial};; esac', 'exit "$code"']


def _gang_body(step: str, trial: str) -> list[str]:
    """Body of the gang's script: the first node reports the exit code; a lost node does not keep the allocation."""
    folder = f"${RESULT_VARIABLE}"
    return [
        f'{RESULT_VARIABLE}="$(mktemp -d)" && mkfifo "{folder}/code" && export {RESULT_VARIABLE} || exit 75',
        f"trap 'rm -rf \"{folder}\"' EXIT",
        f'exec 9<>"{folder}/code"  # both ways: who writes never waits for a reader',
        f"{{ {step}; echo none >&9; }} &",
        "read -r code <&9",
        f'if [ "$code" = none ]; then code=75; {trial}; fi',
        f"timeout {_STRAGGLERS_S} tail --pid=$! -f /dev/null  # a node that was lost never says that it has ended",
        'exit "$code"',
    ]
