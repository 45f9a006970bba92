"""`regrow doctor --train`: starts a session from the command line's flags, and prints its report."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
import msgspec

from regrow.core.errors import UsageError
from regrow.drill.checks import BUDGET, CHECKS, chosen
from regrow.drill.ground import DrillSettings
from regrow.drill.session import hold
from regrow.observe.story import count

RANKS: Final = 4
# Several ranks on one GPU need NCCL 2.30 or newer.
SHARED_GPU: Final = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


@dataclass(frozen=True)
class DrillFlags:
    """The flags of `regrow doctor --train`. `ranks`: per node; None: chosen by the number of GPUs."""

    checks: tuple[str, ...] = ()
    quick: bool = False
    json: str = ""
    ranks: int | None = None
    nodes: int = 1
    node_rank: int | None = None
    endpoint: str = ""
    bind: str = ""
    state_gb: float = 10.0


def run_doctor_training(flags: DrillFlags, environment: Mapping[str, str], *, gpus: int) -> int:
    """Run the checks, and print a line as each ends; returns the exit code: 0 only if none has failed.

    Args:
        flags: flags of the command line.
        environment: environment of this process.
        gpus: number of this node's GPUs.

    Raises:
        UsageError: an unknown check, or several nodes without endpoint, rank or secret.
    """
    checks = chosen(flags.checks, quick=flags.quick)
    settings = _settings(flags, gpus)
    if settings.nodes > 1 and not environment.get("REGROW_TOKEN"):
        raise UsageError("several nodes need a secret", hint="set REGROW_TOKEN, the same on every node")
    shared = SHARED_GPU if gpus == 1 and settings.ranks > 1 else {}
    where = "this machine" if settings.nodes == 1 else f"each of {settings.nodes} nodes"
    names = ", ".join(each.name for each in checks)
    _say(f"{count(settings.ranks, 'rank')} on {where}, {BUDGET / 60:.0f} minutes at most: {names}", flags)
    report = hold(checks, settings, {**shared, **environment}, lambda line: _say(line, flags))
    _say(report.verdict, flags)
    text = msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n"
    if flags.json == "-":
        click.echo(text, nl=False)
    elif flags.json:
        Path(flags.json).write_text(text, encoding="utf-8")
        _say(f"the report is in {flags.json}; attach it where you report something", flags)
    return report.code


def _say(line: str, flags: DrillFlags) -> None:
    click.echo(line, err=flags.json == "-")


def _settings(flags: DrillFlags, gpus: int) -> DrillSettings:
    if flags.nodes > 1:
        host, colon, port = flags.endpoint.rpartition(":")
        jobs = sum(each.jobs for each in CHECKS)
        if not (host and colon and port.isdigit() and 0 < int(port) < (1 << 16) - jobs):
            raise UsageError(
                f"--nodes {flags.nodes} needs --rdzv-endpoint HOST:PORT of node 0, not {flags.endpoint!r}",
                hint=f"give the same on every node; {jobs} ports are used from PORT on",
            )
        if flags.node_rank is None or not 0 <= flags.node_rank < flags.nodes:
            raise UsageError(
                f"--nodes {flags.nodes} needs --node-rank, from 0 to {flags.nodes - 1}",
                hint="Slurm's and Kubernetes' own number of the node is taken where there is one",
            )
    ranks = flags.ranks if flags.ranks is not None else _ranks(gpus, flags.nodes, quick=flags.quick)
    return DrillSettings(
        "",
        ranks=ranks,
        nodes=flags.nodes,
        node_rank=(flags.node_rank or 0) if flags.nodes > 1 else 0,
        endpoint=flags.endpoint,
        bind=flags.bind,
        state_gb=flags.state_gb,
    )


def _ranks(gpus: int, nodes: int, *, quick: bool) -> int:
    """Default ranks per node: four in total, two with `--quick`; but at most the node's GPUs if it has several."""
    wanted = 2 if quick else max(2, RANKS // nodes)
    return min(wanted, gpus) if gpus > 1 else wanted
