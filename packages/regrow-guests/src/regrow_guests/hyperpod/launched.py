"""Finds the script in a container's command, and converts the flags of `hyperpodrun` or `torchrun`. *Pure*."""

from dataclasses import dataclass, field
from typing import Final

_LAUNCHERS: Final = frozenset({"hyperpodrun", "torchrun"})
_MODULES: Final = frozenset({"torch.distributed.run", "torch.distributed.launch"})
_BARE: Final = frozenset({"--standalone", "--run-path", "--virtual-local-rank", "--inprocess-restart"})
_KEPT_BARE: Final = frozenset({"--module", "--no-python"})
_KEPT: Final = frozenset(
    {"--max-restarts", "--log-dir", "--redirects", "--tee", "--shutdown-timeout", "--numa-binding"}
)
_OURS: Final = frozenset(
    {
        *("--nnodes", "--node-rank", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"),
        *("--master-addr", "--master-port", "--local-addr", "--standalone", "--server-host"),
        "--server-port",
    }
)
_MEANINGLESS: Final = frozenset(
    {
        *("--monitor-interval", "--start-method", "--role", "--local-ranks-filter", "--event-log-handler"),
        *("--logs-specs", "--signals-to-handle", "--run-path", "--virtual-local-rank"),
        *("--inprocess-restart", "--inprocess-timeout", "--shutdown-signal"),
    }
)
_SCRIPTS: Final = frozenset({"--pre-train-script", "--pre-train-args", "--post-train-script", "--post-train-args"})
_SHORT: Final = {"-m": "--module", "-r": "--redirects", "-t": "--tee"}


@dataclass
class LaunchedScript:
    """Program that a launcher would start.

    Attributes:
        script: the script and its arguments.
        flags: flags of `regrow run`.
        ranks: value of the flag for the ranks of a pod; empty: not given.
        notes: sentences for people.
        unknown: flags that are not known here.
    """

    script: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    ranks: str = ""
    notes: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


NOTHING: Final = LaunchedScript()


def launched(arguments: list[str]) -> LaunchedScript | None:
    """The script and flags in a command; None: it shows no launcher, or it is a shell's text."""
    start = next((at for at, word in enumerate(arguments) if _launches(arguments, at)), None)
    if start is None:
        return None
    found, at, set_here, nothing = LaunchedScript(), start + 1, list[str](), list[str]()
    while at < len(arguments) and arguments[at].startswith("-"):
        name, _, value = arguments[at].partition("=")
        name = _SHORT.get(name, name).replace("_", "-")
        at += 1
        if not value and name not in _BARE | _KEPT_BARE and at < len(arguments):
            value, at = arguments[at], at + 1
        if name == "--nproc-per-node":
            found.ranks = value
        elif name in _KEPT_BARE:
            found.flags.append(name)
        elif name in _KEPT:
            found.flags.append(f"{name}={value}")
        elif name in _OURS:
            set_here.append(name)
        elif name in _MEANINGLESS:
            nothing.append(name)
        elif name in _SCRIPTS:
            found.notes.append(f"{name} {value}: no counterpart; run it in an initContainer, or in the script itself")
        else:
            found.unknown.append(name)
    found.script = arguments[at:]
    if set_here:
        found.notes.append(f"left out, for the operator sets where pods meet: {', '.join(set_here)}")
    if nothing:
        found.notes.append(f"left out, for they mean nothing here: {', '.join(nothing)}")
    return found if found.script else None


def _launches(arguments: list[str], at: int) -> bool:
    word = arguments[at]
    return word.rsplit("/", 1)[-1] in _LAUNCHERS or (word in _MODULES and at > 0 and arguments[at - 1] == "-m")
