"""Data caches of the agents that this launcher starts: their folders and sizes, and a warning if there is none."""

import os
from pathlib import Path

import msgspec

from regrow.agent.data_folder import DataFolder, sweep
from regrow.core.config import AgentConfig, size
from regrow.core.errors import UsageError
from regrow.launch.console import Console

MOST = 4 << 30
"""Default limit of a cache, in bytes."""
LEAST = 1 << 20
"""Smallest useful cache, in bytes."""
_OFF = "off"


class CachePlan(msgspec.Struct, frozen=True):
    """Data cache as the flags describe it. `root`: parent of the cache folders; None: no cache.

    `nbytes`: limit of each cache; None: `default_budget`.
    """

    root: Path | None = None
    nbytes: int | None = None


def cache_plan(folder: str, nbytes: str, *, home: Path | None) -> CachePlan:
    """Derive the plan of the data cache from `--data-cache` and `--data-cache-bytes`. `home`: default parent folder.

    Raises:
        UsageError: names the flag and what to write instead.
    """
    try:
        budget = size(nbytes) if nbytes else None
    except UsageError as error:
        raise UsageError(f"--data-cache-bytes: {error.cause}", hint=error.hint) from None
    if budget is not None and budget < LEAST:
        raise UsageError(f"--data-cache-bytes {nbytes} is too little", hint="give 1MiB or more, or --data-cache off")
    if folder == _OFF:
        return CachePlan()
    return CachePlan(Path(folder).expanduser().absolute() if folder else home, budget)


def default_budget(free: int, agents: int) -> int:
    """Bytes for each of `agents` agents on one file system with `free` free bytes."""
    return min(MOST, free // (4 * agents))


class CacheHome:
    """Gives each agent a cache folder of its own. If none can be made, it warns once and the job runs without a cache.

    Args:
        plan: from the flags.
        agents: number of agents that share the file system.
        console: prints warnings.
    """

    def __init__(self, plan: CachePlan, agents: int, console: Console) -> None:
        self._plan = plan
        self._agents = agents
        self._console = console
        self._root: Path | None = None
        self._budget = 0

    def open(self) -> None:
        """Check the parent folder, and remove the cache folders that killed jobs left in it."""
        plan = self._plan
        if plan.root is None:
            return
        swept = sweep(plan.root)
        if swept:
            self._console.note(f"removed {len(swept)} data cache folder(s) of killed jobs from {plan.root}")
        try:
            about = os.statvfs(plan.root)
        except OSError as error:
            self._without(f"{plan.root}: {error.strerror or error}")
            return
        free = about.f_bavail * about.f_frsize
        self._budget = default_budget(free, self._agents) if plan.nbytes is None else plan.nbytes
        if min(self._budget, free) < LEAST:
            self._without(f"{plan.root} is full")
            return
        self._root = plan.root

    def assemble(self, config: AgentConfig) -> tuple[AgentConfig, DataFolder | None]:
        """Add a new cache folder to an agent's settings. The caller removes the folder once the agent has ended."""
        if self._root is None:
            return config, None
        try:
            made = DataFolder.make(self._root, f"{config.job_dir} {config.node}")
        except OSError as error:
            self._without(f"no folder can be made in {self._root}: {error.strerror or error}")
            return config, None
        return msgspec.structs.replace(config, data_dir=str(made.path), data_budget=self._budget), made

    def clear(self, folder: DataFolder | None) -> None:
        """Remove the cache folder of an agent that has ended together with its workers."""
        if folder is None:
            return
        try:
            folder.remove()
        except OSError as error:
            self._console.say(f"the data cache {folder.path} cannot be removed: {error.strerror or error}")

    def _without(self, why: str) -> None:
        self._root = None
        self._console.say(f"the job runs without a data cache: {why} (--data-cache DIR chooses another place)")
