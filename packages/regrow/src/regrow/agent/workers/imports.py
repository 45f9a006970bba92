"""Imports of a script: recorded in a worker, and imported early in a standby that waits before the script."""

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
    """Installed modules imported since `before`, in order, but not the script's own or Python's."""
    found = []
    for name, module in list(sys.modules.items()):
        if name in before or name.partition(".")[0] in _OWN:
            continue
        origin = getattr(getattr(module, "__spec__", None), "origin", None)
        if isinstance(origin, str) and not _INSTALLED.isdisjoint(PurePath(origin).parts):
            found.append(name)
    return found


def changed(before: Mapping[str, str]) -> list[str]:
    """Environment variables that were changed, removed or added since `before`."""
    now = inherited_environment()
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def import_ahead(names: Iterable[str], environment: Iterable[str]) -> tuple[str, str]:
    """Import these modules; returns a package that is unfit for that and the reason, or two empty strings.

    A module that reads a rank, or a variable that the script sets first, during its import would differ from the
    script's; a module that cannot be imported here is unfit too.
    """
    asked: list[str] = []
    watch_environment(VARIABLES | frozenset(environment), asked.append)
    try:
        for name in names:
            if name in sys.modules:
                continue
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001  after any exception the script may still import it itself
                return name.partition(".")[0], f"it cannot be imported ahead: {type(error).__name__}: {error}"
            if asked:
                return name.partition(".")[0], f"it asks for {asked[0]} when it is imported"
    finally:
        unwatch_environment()
    return "", ""


def thread_names() -> list[str]:
    """Names of this process's threads besides the main one, including those of libraries."""
    if threads() == 1:
        return []
    found = []
    for task in os.listdir("/proc/self/task"):
        if int(task) != os.getpid():
            try:
                with open(f"/proc/self/task/{task}/comm") as comm:
                    found.append(comm.read().strip())
            except OSError:
                continue  # The thread has just ended.
    return found
