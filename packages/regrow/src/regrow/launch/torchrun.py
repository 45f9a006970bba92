"""The flags of torchrun as options of `regrow run`: those with an effect here, those without, and their spellings.

Flags of `hyperpodrun`, HyperPod's launcher, are accepted too: in-process recovery always happens here, and the address
of its agent is not needed. Its scripts before and after the training would have to run, so they are refused.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final

import click

from regrow.core.errors import UsageError

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

_NAMES: Final[list[str]] = []


def environment_name(flag: str) -> str:
    """The environment variable from which torchrun reads a flag: `PET_NNODES` for `--nnodes`."""
    return "PET_" + flag.lstrip("-").upper().replace("-", "_")


def _option(*names: str, **settings: Any) -> Decorator:
    long = next(name for name in names if name.startswith("--"))
    _NAMES.append(long.lstrip("-"))
    return click.option(*names, envvar=environment_name(long), **settings)


_USED: Final = (
    _option("--nproc-per-node", default="1", metavar="N", help="Workers per node: a number, cpu, gpu or auto."),
    _option("--nnodes", default="1", metavar="N|MIN:MAX", help="Nodes of the job."),
    _option("--node-rank", type=int, help="Number of this node, from 0."),
    _option("--standalone", is_flag=True, help="One node; any --rdzv flag is ignored."),
    _option("--rdzv-endpoint", default="", metavar="HOST:PORT", help="Address of node 0."),
    _option("--rdzv-id", default="", metavar="NAME", help="The job's name, as --job."),
    _option("--master-addr", default="", metavar="HOST", help="Host of node 0, as in --rdzv-endpoint."),
    _option("--master-port", type=int, default=0, metavar="PORT", help="MASTER_PORT of the workers (one node)."),
    _option("--local-addr", default="", metavar="HOST", help="Address at which other nodes reach this one."),
    _option("--max-restarts", type=int, metavar="N", help="Most restarts of all workers; no limit by default."),
    _option("--shutdown-timeout", "grace", default="10s", metavar="TIME", help="Time for workers to end."),
    _option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in python -m."),
    _option("--no-python", is_flag=True, help="SCRIPT is a program, not Python."),
    _option("--log-dir", default="", metavar="DIR", help="Per-rank output files; in the job's folder by default."),
    _option("-r", "--redirects", default="", metavar="N", help="3: output to the files only."),
    _option("-t", "--tee", default="", metavar="N", help="Output to files and terminal (always so)."),
    _option("--numa-binding", default="", metavar="MODE", help="Bind workers near their GPU: node, socket..."),
)
_VALUED_WITHOUT_MEANING: Final = (
    "--rdzv-backend",
    "--rdzv-conf",
    "--monitor-interval",
    "--start-method",
    "--role",
    "--local-ranks-filter",
    "--event-log-handler",
    "--logs-specs",
    "--signals-to-handle",
    "--duplicate-stdout-filters",
    "--duplicate-stderr-filters",
)
_FLAGS_WITHOUT_MEANING: Final = ("--run-path", "--virtual-local-rank")
_NAMES.extend(name.lstrip("-") for name in (*_VALUED_WITHOUT_MEANING, *_FLAGS_WITHOUT_MEANING))
_HYPERPOD_WITHOUT_MEANING: Final = ("--server-host", "--server-port")
_HYPERPOD_SCRIPTS: Final = ("--pre-train-script", "--pre-train-args", "--post-train-script", "--post-train-args")
_NAMES.extend(name.lstrip("-") for name in (*_HYPERPOD_WITHOUT_MEANING, *_HYPERPOD_SCRIPTS, "--inprocess-restart"))

_SHORTEST_PREFIX: Final = 4


def spelled_out(name: str) -> str:
    """The full name of an option. Like torchrun, accepts `_` for `-`, and any unambiguous prefix of a flag."""
    dashed = name.replace("_", "-")
    if len(dashed) < _SHORTEST_PREFIX or dashed in _NAMES:
        return dashed
    meant = [known for known in _NAMES if known.startswith(dashed)]
    return meant[0] if len(meant) == 1 else dashed


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add all of torchrun's options; `ignored` lists those that were given and have no effect here."""
    for name in reversed(_FLAGS_WITHOUT_MEANING):
        command = _option(name, is_flag=True, hidden=True, expose_value=False, callback=_note_ignored)(command)
    for name in reversed(_VALUED_WITHOUT_MEANING):
        command = _option(name, hidden=True, expose_value=False, callback=_note_ignored)(command)
    for name in _HYPERPOD_WITHOUT_MEANING:
        command = click.option(name, hidden=True, expose_value=False, callback=_note_ignored)(command)
    command = click.option(
        "--inprocess-restart", is_flag=True, hidden=True, expose_value=False, callback=_note_ignored
    )(command)
    for name in _HYPERPOD_SCRIPTS:
        command = click.option(name, hidden=True, expose_value=False, callback=_refuse_script)(command)
    for option in reversed(_USED):
        command = option(command)
    return command


def _refuse_script(context: click.Context, parameter: click.Parameter, value: object) -> None:
    if value is not None:
        raise UsageError(
            f"{max(parameter.opts, key=len)} names a script that regrow run does not run",
            hint="run it before or after: ./pre.sh && regrow run ... && ./post.sh",
        )


def ignored(context: click.Context, environment: Iterable[str]) -> list[str]:
    """Flags on this command line, and variables of `hyperpodrun`, that have no effect.

    Args:
        context: context of the command.
        environment: names of the environment variables.
    """
    foreign = [name for name in environment if name.startswith("HPCT_") or name == "TORCH_SKIP_TCPSTORE"]
    return [*context.meta.get(_IGNORED, []), *sorted(foreign)]


_IGNORED: Final = "regrow.launch.torchrun.ignored"


def _note_ignored(context: click.Context, parameter: click.Parameter, value: object) -> None:
    if value not in (None, False, ()):
        context.meta.setdefault(_IGNORED, []).append(max(parameter.opts, key=len))
