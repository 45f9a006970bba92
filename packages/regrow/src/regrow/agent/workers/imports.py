"""Imports of a script: learnt in a worker, and imported ahead of the script in a standby that waits before it."""

import importlib
import os
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import PurePath

from regrow.agent.workers.processes import threads
from regrow.core.config import inherited_environment
from regrow.core.early_reads import VARIABLES
from regrow.core.process.own_code import OWN_PACKAGES
from regrow.core.process.rewriting import unwatch_environment, watch_environment

_INSTALLED = frozenset({"site-packages", "dist-packages"})
_OWN = OWN_PACKAGES | {"torch"}


def installed(before: Collection[str]) -> list[str]:
    """The installed modules that were imported since, in order; not the script's own, nor those of Python."""
    found = []
    for name, module in list(sys.modules.items()):
        if name in before or name.partition(".")[0] in _OWN:
            continue
        origin = getattr(getattr(module, "__spec__", None), "origin", None)
        if isinstance(origin, str) and not _INSTALLED.isdisjoint(PurePath(origin).parts):
            found.append(name)
    return found


def changed(before: Mapping[str, str]) -> list[str]:
    """The environment variables that have another value since, or none, or have come."""
    now = inherited_environment()
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def import_ahead(names: Iterable[str], environment: Iterable[str]) -> tuple[str, str]:
    """Import these modules; the package that should not have been, and why; empty where all is well.

    A module that asks as it is imported for a rank, or for a variable that the script sets first, would be another one
    than the script's; so would one that cannot be imported here.
    """
    asked: list[str] = []
    watch_environment(VARIABLES | frozenset(environment), asked.append)
    try:
        for name in names:
            if name in sys.modules:
                continue
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001  whatever it raises, the script may import it itself
                return name.partition(".")[0], f"it cannot be imported ahead: {type(error).__name__}: {error}"
            if asked:
                return name.partition(".")[0], f"it asks for {asked[0]} when it is imported"
    finally:
        unwatch_environment()
    return "", ""


def thread_names() -> list[str]:
    """Names of this process's threads besides its main one, those of libraries too."""
    if threads() == 1:
        return []
    found = []
    for task in os.listdir("/proc/self/task"):
        if int(task) != os.getpid():
            try:
                with open(f"/proc/self/task/{task}/comm") as comm:
                    found.append(comm.read().strip())
            except OSError:
                continue  # it has just ended
    return found
