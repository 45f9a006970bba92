"""The options of `regrow run` other than torchrun's, and those of `regrow agent`, `regrow try` and `regrow doctor`."""

import functools
from collections.abc import Callable
from typing import Any, Final

import click

from regrow.core.config import use_tls
from regrow.core.messages.vocabulary import Warmth

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _text(name: str, form: str, text: str, usual: str = "", **more: Any) -> Decorator:
    return click.option(name, default=usual, metavar=form, help=text, **more)


def _number(name: str, form: str, text: str, usual: int, **more: Any) -> Decorator:
    return click.option(name, type=int, default=usual, metavar=form, help=text, **more)


def _flag(name: str, text: str, **more: Any) -> Decorator:
    return click.option(name, is_flag=True, help=text, **more)


def _encrypt(_: click.Context, option: click.Parameter, path: str) -> None:
    use_tls(**{str(option.name).removeprefix("tls_"): path})


_TLS: Final[tuple[Decorator, ...]] = tuple(
    click.option(f"--tls-{name}", default="", metavar="FILE", expose_value=False, callback=_encrypt, help=text)
    for name, text in (
        ("cert", "This node's certificate, PEM: encrypt what leaves it.  [$REGROW_TLS_CERT]"),
        ("key", "Key of this certificate.  [$REGROW_TLS_KEY]"),
        ("ca", "Signer of the nodes' certificates.  [$REGROW_TLS_CA; none: all have the same one]"),
    )
)
_NODE: Final[tuple[Decorator, ...]] = (
    _text("--bind", "HOST", "Listen here, not on loopback only."),
    _text("--state-addr", "ADDRESS,...", "Give state to newcomers at these addresses too."),
    _text("--data-cache", "DIR", "Folder for batches, or off.  [/dev/shm]"),
    _text(
        "--node-metrics",
        "[HOST:]PORT",
        "Each agent serves metrics of its node there, to any client.  [$REGROW_NODE_METRICS]",
        envvar="REGROW_NODE_METRICS",
    ),
    *_TLS,
)
"""Options of one node, for `regrow run` and `regrow agent`."""

_RUN: Final[tuple[Decorator, ...]] = (
    _number("--standby", "N", "Warm workers per node that replace lost ranks.", 0),
    _text(
        "--warmth",
        "|".join(Warmth),
        "How far standbys prepare.  [built; imports where ranks use all devices of a node]",
    ),
    _number("--max-faults", "N", "Most faults tolerated within --window.  [100]", 100),
    _text("--window", "TIME", "Time in which --max-faults counts.  [1h]", "1h"),
    _text("--checkpoint-dir", "DIR", "Folder or URL of durable checkpoints; else none."),
    click.option("--checkpoint-every", metavar="TIME", help="Time between checkpoints.  [10min]"),
    _number("--checkpoint-keep", "K", "Number of newest checkpoints to keep.  [2]", 2),
    _text(
        "--resume",
        "auto|must|never",
        "Go on from the newest durable checkpoint; auto, or no word: if there is one.  [never]",
        "never",
    ),
    click.option(
        "--local-nodes", type=int, metavar="N", help="Nodes of the job, all on this machine, to try them out."
    ),
    _number("--spares", "N", "Of the job's nodes, these have no ranks but warm workers, and take a lost node's.", 0),
    _text("--node-timeout", "TIME", "Time to wait for a lost node.  [10min]", "10min"),
    _text("--node-lease", "TIME", "A node that does not answer for this long is lost.  [10s]", "10s"),
    _text("--replicas", "MIN:MAX", "Smallest and largest number of replicas.  [as --nnodes]"),
    _number("--replica-ranks", "N", "Ranks of one replica.  [1]", 1),
    _text("--replica-sizes", "N,...", "Only these numbers of replicas."),
    _text("--change-pause", "TIME", "Least time between requested changes of size.  [0s: none]", "0s"),
    _flag("--no-elect", "No other node takes over the coordinator when node 0 is lost."),
    _text("--witness", "DIR", "Folder on a shared disk: it votes when node 0 is lost."),
    click.option("--slots", type=int, metavar="N", help="Ranks for which a node has room.  [its part of --replicas]"),
    _text("--drain-grace", "TIME", "Time to leave a node that a signal gives back, or to save.  [30s]", "30s"),
    _text("--domain", "LABEL", "Failure domain of this node, such as its rack; for --buddy-every."),
    _number("--buddy-every", "K", "Copy state to another node each K steps.", 0),
    _number("--digest-every", "N", "Compare replicas each N steps, 0.2 s a GB.  [0: never]", 0),
    click.option(
        "--on-divergence",
        type=click.Choice(["warn", "stop"]),
        default="warn",
        help="If replicas differ: train on and end with 76, or end at once.  [warn]",
    ),
    _flag("--no-audit", "Do not look for replicas that differ."),
    _text(
        "--proof",
        "auto|fork|off",
        "Prove that standbys compute the same as ranks; `fork`: or that a newcomer does.  [auto, $REGROW_PROOF]",
        "auto",
        envvar="REGROW_PROOF",
    ),
    _flag(
        "--no-health",
        "Do not examine nodes when they join and after incidents.  [$REGROW_NO_HEALTH]",
        envvar="REGROW_NO_HEALTH",
    ),
    click.option(
        "--health-check",
        type=click.Path(exists=True, dir_okay=False, executable=True),
        multiple=True,
        metavar="EXE",
        help="Program of your own that checks a node; repeatable.",
    ),
    _number("--straggler-steps", "K", "Report a rank slower than the others this often in a row.  [20; 0: never]", 20),
    _flag("--replace-stragglers", "Move stragglers to other nodes if these have room."),
    _flag("--check-for-nan", "On NaN or inf in loss or gradients: run the step again, end if it repeats."),
    _flag("--no-script-rewrite", "Write nothing into the script's frames; refuse scripts that need it."),
    _text("--log-rules", "FILE", "Rules for lines in workers' output, in TOML."),
    _text("--data-cache-bytes", "SIZE", "Size of a node's cache.  [4GiB, a quarter of what is free]"),
    _text("--hang-timeout", "TIME", "Most time without progress in a step.  [by evidence]"),
    click.option("--preload", multiple=True, metavar="MODULE", help="Import before workers are forked; repeatable."),
    _text(
        "--hydration",
        "sockets|memory|nixl",
        "How newcomers read state: out of a holder's memory within a node, or by RDMA.  [sockets]",
        "sockets",
    ),
    _text("--watch", "[HOST:]PORT", "Show metrics and a live page there, to any client."),
    _text("--token-file", "FILE", "File with the secret of a job of several nodes; or REGROW_TOKEN."),
    *_NODE,
    click.option("--trial-steps", type=int, default=0, hidden=True),
    _text("--fault-plan", "FILE", "Faults to inject, in TOML."),
    _text("--job", "NAME", "The job's name."),
    _text("--tag", "NAME", "Name of a sweep: regrow jobs --tag NAME shows its jobs."),
    _flag("--quiet", "Print only errors and warnings."),
)
_AGENT: Final[tuple[Decorator, ...]] = (
    click.option(
        "--join",
        is_flag=False,
        flag_value="",
        metavar="[HOST:PORT|JOB]",
        help="Address of node 0, or a job on this machine; without either, the job that runs here.",
    ),
    click.option("--slots", type=int, metavar="N", help="Ranks for which this node has room.  [as the job's others]"),
    _text("--stay", "TIME", "Time for which this node is expected to stay."),
    _text("--name", "NODE", "Name of this node.  [the next free nodeN]"),
    _text("--domain", "LABEL", "Failure domain of this node, such as its rack."),
    _text("--local-addr", "HOST", "Address at which other nodes reach this one."),
    _text("--data-cache-bytes", "SIZE", "Size of the cache.  [4GiB, a quarter of what is free]"),
    _text("--grace", "TIME", "Time to leave this node after a signal.  [30s]", "30s"),
    _text("--wait", "TIME", "Time to wait for a job without an answer or a place.  [not at all]"),
    _text("--token-file", "FILE", "File with the job's secret; or REGROW_TOKEN."),
    *_NODE,
    _flag("--quiet", "Print only errors and warnings."),
)


_TRY: Final[tuple[Decorator, ...]] = (
    click.option("--nproc-per-node", "nproc", type=click.IntRange(min=1), default=2, metavar="N", help="Ranks.  [2]"),
    click.option("--steps", type=click.IntRange(min=1), metavar="N", help="Steps of a run.  [as the kills need]"),
    click.option("--kills", type=click.IntRange(min=1), metavar="N", help="Kills in a run.  [each rank in each phase]"),
    click.option("--buddy-every", type=click.IntRange(min=0), default=0, metavar="K", help="As in regrow run."),
    click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in python -m."),
)

_DOCTOR: Final[tuple[Decorator, ...]] = (
    click.option(
        "--check", "checks", multiple=True, metavar="EXE", help="Program of your own that checks a node; repeatable."
    ),
    _text("--check-timeout", "TIME", "Time limit of each check.  [30s]", "30s"),
    click.option(
        "--peer", "peers", multiple=True, metavar="HOST:PORT", help="Connect to this address too; repeatable."
    ),
    _flag("--quick", "Only checks without a context on a GPU: about a second."),
    _text("--node", "NAME", "Name of this machine in verdicts.  [its host name]"),
    click.option("--json", is_flag=False, flag_value="-", default="", metavar="[FILE]", help="Print JSON."),
    _flag(
        "--train",
        "Train, strike and compare, for 10 minutes at most. --check then names one of its checks, and --quick "
        "takes fewer and two ranks.",
    ),
    click.option(
        "--nproc-per-node", "ranks", type=click.IntRange(min=2), metavar="N", help="With --train: ranks of a node."
    ),
    click.option(
        "--state-gb", type=click.FloatRange(min=0), default=10.0, metavar="GB", help="Size of a node's state.  [10]"
    ),
    click.option("--nodes", type=click.IntRange(min=1), default=1, metavar="N", help="Run this on N nodes at once."),
    click.option(
        "--node-rank",
        type=int,
        envvar=["PET_NODE_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX"],
        metavar="N",
        help="Number of this node, from 0.",
    ),
    click.option("--rdzv-endpoint", "endpoint", default="", metavar="HOST:PORT", help="Address of node 0."),
    _text("--bind", "IP", "With --nodes: listen here."),
)


class RunCommand(click.Command):
    """A command with the options of `regrow run`; `--resume` may be given without a value."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse `--resume` as `--resume=auto`; leaves a `--resume` after the script to the script."""
        spelled = ["--resume=auto" if each == "--resume" else each for each in args]
        if ctx.allow_interspersed_args:
            return super().parse_args(ctx, spelled)
        found, _, _ = self.make_parser(ctx).parse_args(list(spelled))
        behind = found["args"]
        own = len(args) - (len(behind) if isinstance(behind, tuple | list) else 0)
        return super().parse_args(ctx, [*spelled[:own], *args[own:]])


def _with(added: tuple[Decorator, ...], command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(added):
        command = option(command)
    return command


of_run = functools.partial(_with, _RUN)
"""Add regrow's own options to `regrow run`; the next three functions do so for their commands."""
of_agent = functools.partial(_with, _AGENT)
of_try = functools.partial(_with, _TRY)
of_doctor = functools.partial(_with, _DOCTOR)
