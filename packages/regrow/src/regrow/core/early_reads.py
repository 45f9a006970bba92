"""Reads of a script's place before the place is final: a standby runs it under a rank that may not be its last.

Only reads whose value a script, or a framework that it uses, gets are noted: those of torch's own and of regrow's are
brought up to date when the worker is seated.
"""

import sys
import weakref
from enum import StrEnum
from types import FrameType
from typing import Any

from regrow.core.process.own_code import OWN_PACKAGES
from regrow.core.process.rewriting import unwatch_environment, watch_environment


class PlaceInWorld(StrEnum):
    """Fact about a worker's place."""

    RANK = "rank"
    LOCAL_RANK = "local_rank"
    WORLD = "world"


_VARIABLES = {
    "RANK": PlaceInWorld.RANK,
    "ROLE_RANK": PlaceInWorld.RANK,
    "GROUP_RANK": PlaceInWorld.RANK,
    "LOCAL_RANK": PlaceInWorld.LOCAL_RANK,
    "WORLD_SIZE": PlaceInWorld.WORLD,
    "ROLE_WORLD_SIZE": PlaceInWorld.WORLD,
}
VARIABLES = frozenset(_VARIABLES)
"""The environment variables that say them."""
_ENTRY_POINTS = {
    "_collections_abc": None,
    "collections.abc": None,  # what the former calls itself
    "os": None,
    "regrow.core.config": None,
    "regrow.core.early_reads": None,
    "regrow.core.process.rewriting": None,
    "regrow.comm.process_group": {"rank", "getRank", "size", "getSize"},
    "regrow.train.session": {"rank", "local_rank", "world_size", "is_main"},
    "torch.distributed.device_mesh": {"get_rank", "get_local_rank"},
    "torch.distributed.distributed_c10d": {"get_rank", "get_node_local_rank", "get_world_size", "_get_group_size"},
}
"""Functions that hand a value on to who calls them, by module; None: all of the module's."""
_OWN = OWN_PACKAGES | {"torch"}
_SAMPLERS = "torch.utils.data.distributed"


class EarlyReads:
    """The first read of each thing, from `watch` to `stop`."""

    def __init__(self) -> None:
        self.watching = False
        self.found: dict[str, str] = {}
        """By `PlaceInWorld`: where it was read first."""
        self._samplers: list[weakref.ref[Any]] = []

    def watch(self, *, rewrites: bool = True) -> None:
        """Note reads from now on, those of torchrun's variables too; without `rewrites` all counts as read."""
        if not rewrites:
            self.found = dict.fromkeys(PlaceInWorld, "nobody may look, with --no-script-rewrite")
            return
        self.watching = True
        watch_environment(VARIABLES, lambda name: self.note(_VARIABLES[name], name))

    def stop(self) -> None:
        """The script has come to its loop: what it asks from now on it asks again."""
        if self.watching:
            self.watching = False
            unwatch_environment()

    def note(self, what: PlaceInWorld, asked: str) -> None:
        """Somebody asks for `what`, by `asked`."""
        if not self.watching:
            return
        reader = _reader(sys._getframe(1))
        if reader is None or what in self.found:
            return
        module = str(reader.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in _OWN:
            self.found[what] = f"{asked} at {_where(reader)}"
        elif module == _SAMPLERS and what is PlaceInWorld.RANK and (sampler := reader.f_locals.get("self")) is not None:
            self._samplers.append(weakref.ref(sampler))

    def bind(self, device: str) -> None:
        """The script has taken a device into use, which it has chosen by its place on the node."""
        self.found.setdefault(PlaceInWorld.LOCAL_RANK, f"{device} is in use")

    def bind_rank(self, text: str) -> None:
        """The script was told something that was for its rank alone."""
        self.found.setdefault(PlaceInWorld.RANK, text)

    def take_rank(self, rank: int) -> None:
        """The worker has another rank than it was built under: torch's samplers that asked for it follow."""
        for reference in self._samplers:
            sampler = reference()
            if sampler is not None:
                sampler.rank = rank


def _reader(frame: FrameType | None) -> FrameType | None:
    """Frame that gets the value that is read at `frame`."""
    while frame is not None:
        names = _ENTRY_POINTS.get(str(frame.f_globals.get("__name__", "")), frozenset[str]())
        if names is not None and frame.f_code.co_name not in names:
            return frame
        frame = frame.f_back
    return None


def _where(frame: FrameType) -> str:
    """File and line; for a framework's also those of the script that called it."""
    at = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    outer: FrameType | None = frame
    while outer is not None and outer.f_globals.get("__name__") != "__main__":
        outer = outer.f_back
    if outer is None or outer is frame:
        return at
    return f"{at}, called at {outer.f_code.co_filename}:{outer.f_lineno}"
