"""Checks of flags that several commands share."""

import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from regrow.core.config import duration
from regrow.core.errors import UsageError
from regrow.core.ids import Seconds

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Valid names of jobs and of failure domains."""


def exclude(case: bool, text: str) -> None:
    """Raise `UsageError` with `text`, about flags that exclude each other, if `case` holds."""
    if case:
        raise UsageError(text, hint="leave one of them out")


def in_range(flag: str, value: int, least: int, most: int | None = None) -> int:
    """Return the value. Raises `UsageError` if it is below `least` or above `most`."""
    if value < least or (most is not None and value > most):
        span = f"{least} or more" if most is None else f"from {least} to {most}"
        raise UsageError(f"{flag} {value} is out of range", hint=f"give {span}")
    return value


def one_of(flag: str, word: str, known: Sequence[str]) -> str:
    """Return the word. Raises `UsageError` if it is not in `known`."""
    if word not in known:
        raise UsageError(f"{flag} {word!r} is not known", hint=f"it is one of {', '.join(known)}")
    return word


def some_time(flag: str, text: str, *, zero: bool = False, least: Seconds = 0.0) -> Seconds:
    """Seconds in a text such as `10min`. `zero`: 0 is allowed. Raises `UsageError`, which names the flag."""
    try:
        seconds = duration(text)
    except UsageError as error:
        raise UsageError(f"{flag}: {error.cause}", hint=error.hint) from None
    if seconds <= 0 and not zero:
        raise UsageError(f"{flag} {text!r} is no time at all", hint="give more than 0 seconds")
    if seconds < least:
        raise UsageError(f"{flag} {text!r} is too short", hint=f"give at least {least:g} s")
    return seconds


def check_label(label: str) -> str:
    """Return the name in `--domain`. Raises `UsageError` if it is invalid."""
    if NAME.fullmatch(label) is None:
        raise UsageError(f"--domain {label!r} is no name", hint="use letters, digits, '.', '_' and '-'")
    return label


def domains_of(domain: str, nodes: int) -> list[str]:
    """Failure domain of each node of this machine, from `--domain`."""
    if not domain:
        return []
    labels = domain.split(",")
    for label in labels:
        check_label(label)
    if len(labels) not in (1, nodes):
        raise UsageError(
            f"--domain has {len(labels)} names for {nodes} {'node' if nodes == 1 else 'nodes'} on this machine",
            hint="give one, or with --local-nodes one for each of them, with commas between",
        )
    return labels * nodes if len(labels) == 1 else labels


def nproc_of(text: str, *, cpus: int, gpus: int) -> int:
    """Number of processes of a node, from `--nproc-per-node`. Raises `UsageError`."""
    match text:
        case "cpu":
            return cpus
        case "auto":
            return gpus or cpus
        case "gpu" if gpus == 0:
            raise UsageError("--nproc-per-node gpu: this machine shows no GPU", hint="give a number, or cpu")
        case "gpu":
            return gpus
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise UsageError(
            f"--nproc-per-node {text!r} is no number of processes", hint="give 1 or more, cpu, gpu or auto"
        )
    return in_range("--nproc-per-node", int(text), 1, 4096)


def writable(flag: str, path: str) -> str:
    """Return the path of a file to be written later. Raises `UsageError` if it is not writable; keeps its contents.

    Devices and pipes are not opened: that may block, or wake a reader. A dangling symbolic link stays as it is.
    """
    file = Path(os.path.realpath(path))
    try:
        mode = file.stat().st_mode
    except OSError:
        mode = 0
    if mode and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        return path
    try:
        with file.open("ab"):
            pass
    except OSError as error:
        raise UsageError(
            f"{flag} {path} cannot be written: {error.strerror}",
            hint="name a file in a folder that is there and in which you may write",
        ) from error
    if not mode:
        with suppress(OSError):
            file.unlink()
    return path
