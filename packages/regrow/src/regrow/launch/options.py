"""The options of `regrow run` beside torchrun's, of `regrow agent`, `regrow try` and `regrow doctor`."""

from collections.abc import Callable
from typing import Any, Final

import click

from regrow.core.config import use_tls
from regrow.core.messages.vocabulary import Warmth

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _encrypt(_: click.Context, option: click.Parameter, path: str) -> None:
    use_tls(**{str(option.name).removeprefix("tls_"): path})


_TLS: Final[tuple[Decorator, ...]] = tuple(
    click.option(f"--tls-{name}", default="", metavar="FILE", expose_value=False, callback=_encrypt, help=text)
    for name, text in (
        ("cert", "This node's certificate, PEM: encrypt what leaves it.  [$REGROW_TLS_CERT]"),
        ("key", "Its key.  [$REGROW_TLS_KEY]"),
        ("ca", "Who has signed the nodes' certificates.  [$REGROW_TLS_CA; none: all have the same one]"),
    )
)

_RUN: Final[tuple[Decorator, ...]] = (
    click.option(
        "--standby", type=int, default=0, metavar="N", help="Warm workers a node that wait to take a lost place."
    ),
    click.option(
        "--warmth",
        default="",
        metavar="|".join(Warmth),
        help="How far standbys go ahead.  [built; imports where ranks use all devices of a node]",
    ),
    click.option("--max-faults", type=int, default=100, metavar="N", help="Most faults within --window.  [100]"),
    click.option("--window", default="1h", metavar="TIME", help="See --max-faults.  [1h]"),
    click.option(
        "--checkpoint-dir", default="", metavar="DIR", help="Folder or URL of durable checkpoints; else none."
    ),
    click.option("--checkpoint-every", metavar="TIME", help="Time between them.  [10min]"),
    click.option("--checkpoint-keep", type=int, default=2, metavar="K", help="How many of the newest stay.  [2]"),
    click.option(
        "--resume",
        default="never",
        metavar="auto|must|never",
        help="Go on from the newest durable checkpoint; auto, or no word: if there is one.  [never]",
    ),
    click.option(
        "--local-nodes", type=int, metavar="N", help="Nodes of the job, all on this machine, to try them out."
    ),
    click.option(
        "--spares",
        type=int,
        default=0,
        metavar="N",
        help="Of the nodes, so many wait with warm workers to take a lost one's ranks.",
    ),
    click.option(
        "--node-timeout", default="10min", metavar="TIME", help="How long a lost node is waited for.  [10min]"
    ),
    click.option(
        "--node-lease", default="10s", metavar="TIME", help="A node that answers nothing for so long is lost.  [10s]"
    ),
    click.option(
        "--replicas", default="", metavar="MIN:MAX", help="The world may have so many replicas.  [as --nnodes]"
    ),
    click.option("--replica-ranks", type=int, default=1, metavar="N", help="Ranks of one replica.  [1]"),
    click.option("--replica-sizes", default="", metavar="N,...", help="Only these numbers of replicas."),
    click.option(
        "--change-pause",
        default="0s",
        metavar="TIME",
        help="Least time between two wanted changes of size.  [0s: none]",
    ),
    click.option("--no-elect", is_flag=True, help="No other node takes over the coordinator when node 0 is lost."),
    click.option("--witness", default="", metavar="DIR", help="On a disk of all nodes: votes when node 0 is lost."),
    click.option("--slots", type=int, metavar="N", help="Ranks for which a node has room.  [its part of --replicas]"),
    click.option(
        "--drain-grace",
        default="30s",
        metavar="TIME",
        help="To leave a node that a signal gives back, or to save first.  [30s]",
    ),
    click.option("--domain", default="", metavar="LABEL", help="What fails with this node, a rack; for --buddy-every."),
    click.option("--buddy-every", type=int, default=0, metavar="K", help="Copy state to another node each K steps."),
    click.option(
        "--digest-every",
        type=int,
        default=0,
        metavar="N",
        help="Compare replicas each N steps, 0.2 s a GB.  [0: never]",
    ),
    click.option(
        "--on-divergence",
        type=click.Choice(["warn", "stop"]),
        default="warn",
        help="Replicas differ: train on and end with 76, or end at once.  [warn]",
    ),
    click.option("--no-audit", is_flag=True, help="Do not look for replicas that differ."),
    click.option(
        "--proof",
        default="auto",
        envvar="REGROW_PROOF",
        metavar="auto|fork|off",
        help="Standbys prove that they compute what ranks do; `fork`: without one, a newcomer.  [auto, $REGROW_PROOF]",
    ),
    click.option(
        "--no-health",
        is_flag=True,
        envvar="REGROW_NO_HEALTH",
        help="Do not examine nodes when they join and after incidents.  [$REGROW_NO_HEALTH]",
    ),
    click.option(
        "--health-check",
        type=click.Path(exists=True, dir_okay=False, executable=True),
        multiple=True,
        metavar="EXE",
        help="A check of yours beside these; repeatable.",
    ),
    click.option(
        "--straggler-steps",
        type=int,
        default=20,
        metavar="K",
        help="Tell of a rank that is slower than the others so often in a row.  [20; 0: never]",
    ),
    click.option("--replace-stragglers", is_flag=True, help="Replace their nodes where others have room."),
    click.option(
        "--check-for-nan",
        is_flag=True,
        help="A NaN or inf in loss or gradients: run the step again, end if it repeats.",
    ),
    click.option("--log-rules", default="", metavar="FILE", help="What to look for in workers' output, in TOML."),
    click.option("--data-cache", default="", metavar="DIR", help="Where batches are kept, or off.  [/dev/shm]"),
    click.option("--data-cache-bytes", default="", metavar="SIZE", help="A node's.  [4GiB, a quarter of what is free]"),
    click.option(
        "--hang-timeout", default="", metavar="TIME", help="Most time without progress in a step.  [by evidence]"
    ),
    click.option("--preload", multiple=True, metavar="MODULE", help="Import it before workers are forked; repeatable."),
    click.option("--bind", default="", metavar="HOST", help="Listen here, not on loopback only."),
    click.option(
        "--state-addr", default="", metavar="ADDRESS,...", help="Give state to newcomers at these addresses too."
    ),
    click.option(
        "--hydration",
        default="sockets",
        metavar="sockets|memory|nixl",
        help="How newcomers read state: out of a holder's memory within a node, or by RDMA.  [sockets]",
    ),
    click.option(
        "--watch", default="", metavar="[HOST:]PORT", help="Show metrics and a live page there, to whoever asks."
    ),
    click.option(
        "--node-metrics",
        default="",
        envvar="REGROW_NODE_METRICS",
        metavar="[HOST:]PORT",
        help="Each agent serves metrics of its node there, to whoever asks.  [$REGROW_NODE_METRICS]",
    ),
    click.option(
        "--token-file", default="", metavar="FILE", help="The secret of a job of several nodes; or REGROW_TOKEN."
    ),
    *_TLS,
    click.option("--trial-steps", type=int, default=0, hidden=True),
    click.option("--fault-plan", default="", metavar="FILE", help="Faults on demand, in TOML."),
    click.option("--job", default="", metavar="NAME", help="The job's name."),
    click.option("--tag", default="", metavar="NAME", help="Of a sweep: regrow jobs --tag NAME shows its jobs."),
    click.option("--quiet", is_flag=True, help="Say only what went wrong."),
)
_AGENT: Final[tuple[Decorator, ...]] = (
    click.option(
        "--join",
        is_flag=False,
        flag_value="",
        metavar="[HOST:PORT|JOB]",
        help="Where node 0 is found, or a job on this machine; without either the one that runs here.",
    ),
    click.option("--slots", type=int, metavar="N", help="Ranks for which this node has room.  [as the job's others]"),
    click.option("--stay", default="", metavar="TIME", help="How long this node is expected to be there."),
    click.option("--name", default="", metavar="NODE", help="What it is called.  [the next free nodeN]"),
    click.option("--domain", default="", metavar="LABEL", help="What fails with this node, a rack."),
    click.option("--bind", default="", metavar="HOST", help="Listen here, not on loopback only."),
    click.option("--local-addr", default="", metavar="HOST", help="How other nodes reach this one."),
    click.option(
        "--state-addr", default="", metavar="ADDRESS,...", help="Give state to newcomers at these addresses too."
    ),
    click.option("--data-cache", default="", metavar="DIR", help="Where batches are kept, or off.  [/dev/shm]"),
    click.option("--data-cache-bytes", default="", metavar="SIZE", help="How much.  [4GiB, a quarter of what is free]"),
    click.option(
        "--node-metrics",
        default="",
        envvar="REGROW_NODE_METRICS",
        metavar="[HOST:]PORT",
        help="Each agent serves metrics of its node there, to whoever asks.  [$REGROW_NODE_METRICS]",
    ),
    click.option("--grace", default="30s", metavar="TIME", help="To leave this node after a signal.  [30s]"),
    click.option("--wait", default="", metavar="TIME", help="For a job without an answer or a place.  [not at all]"),
    click.option("--token-file", default="", metavar="FILE", help="The job's secret; or REGROW_TOKEN."),
    *_TLS,
    click.option("--quiet", is_flag=True, help="Say only what went wrong."),
)


_TRY: Final[tuple[Decorator, ...]] = (
    click.option("--nproc-per-node", "nproc", type=click.IntRange(min=1), default=2, metavar="N", help="Ranks.  [2]"),
    click.option("--steps", type=click.IntRange(min=1), metavar="N", help="Steps of a run.  [as the kills need]"),
    click.option("--kills", type=click.IntRange(min=1), metavar="N", help="Kills in a run.  [each rank in each phase]"),
    click.option("--buddy-every", type=click.IntRange(min=0), default=0, metavar="K", help="As that of regrow run."),
    click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in python -m."),
)

_DOCTOR: Final[tuple[Decorator, ...]] = (
    click.option("--check", "checks", multiple=True, metavar="EXE", help="A check of yours; repeatable."),
    click.option("--check-timeout", default="30s", metavar="TIME", help="How long each of them may take.  [30s]"),
    click.option("--peer", "peers", multiple=True, metavar="HOST:PORT", help="Connect to it too; repeatable."),
    click.option("--quick", is_flag=True, help="Only what takes no context on a GPU: about a second."),
    click.option("--node", default="", metavar="NAME", help="What verdicts call this machine.  [its host name]"),
    click.option("--json", is_flag=False, flag_value="-", default="", metavar="[FILE]", help="For programs."),
    click.option(
        "--train",
        is_flag=True,
        help="Train, strike and compare, for 10 minutes at most. --check then names one of its checks, and --quick "
        "takes fewer and two ranks.",
    ),
    click.option(
        "--nproc-per-node", "ranks", type=click.IntRange(min=2), metavar="N", help="With --train: ranks of a node."
    ),
    click.option("--state-gb", type=click.FloatRange(min=0), default=10.0, metavar="GB", help="State of a node.  [10]"),
    click.option("--nodes", type=click.IntRange(min=1), default=1, metavar="N", help="Run this on N nodes at once."),
    click.option(
        "--node-rank",
        type=int,
        envvar=["PET_NODE_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX"],
        metavar="N",
        help="Which of the nodes this is.",
    ),
    click.option("--rdzv-endpoint", "endpoint", default="", metavar="HOST:PORT", help="Where node 0 is found."),
    click.option("--bind", default="", metavar="IP", help="With --nodes: listen here."),
)


class RunCommand(click.Command):
    """A command with the options of `regrow run`, of which `--resume` may stand without a word."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The script and its arguments are left as they are: they may have a `--resume` of their own."""
        spelled = ["--resume=auto" if each == "--resume" else each for each in args]
        if ctx.allow_interspersed_args:
            return super().parse_args(ctx, spelled)
        found, _, _ = self.make_parser(ctx).parse_args(list(spelled))
        behind = found["args"]
        own = len(args) - (len(behind) if isinstance(behind, tuple | list) else 0)
        return super().parse_args(ctx, [*spelled[:own], *args[own:]])


def of_run(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add regrow's own options of `regrow run`."""
    return _with(_RUN, command)


def of_agent(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `regrow agent`."""
    return _with(_AGENT, command)


def of_try(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `regrow try`."""
    return _with(_TRY, command)


def of_doctor(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `regrow doctor`."""
    return _with(_DOCTOR, command)


def _with(added: tuple[Decorator, ...], command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(added):
        command = option(command)
    return command
