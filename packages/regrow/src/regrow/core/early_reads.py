"""Notes which rank-dependent values a script reads before its rank is final, since a standby may get another rank.

A read is noted only if the script, or a framework that it uses, gets the value. Values that torch and regrow have read
are updated when the worker gets its rank.
"""

import sys
import weakref
from enum import StrEnum
from types import FrameType
from typing import Any

from regrow.core.process.own_code import OWN_PACKAGES
from regrow.core.process.rewriting import unwatch_environment, watch_environment


class PlaceInWorld(StrEnum):
    """A value that depends on a worker's rank or on the size of its world."""

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
"""The environment variables that hold such values."""
_ENTRY_POINTS = {
    "_collections_abc": None,
    "collections.abc": None,  # the name that `_collections_abc` gives itself
    "os": None,
    "regrow.core.config": None,
    "regrow.core.early_reads": None,
    "regrow.core.process.rewriting": None,
    "regrow.comm.process_group": {"rank", "getRank", "size", "getSize"},
    "regrow.train.session": {"rank", "local_rank", "world_size", "is_main"},
    "torch.distributed.device_mesh": {"get_rank", "get_local_rank"},
    "torch.distributed.distributed_c10d": {"get_rank", "get_node_local_rank", "get_world_size", "_get_group_size"},
}
"""Functions, by module, that pass a value on to their caller; None: all functions of the module."""
_OWN = OWN_PACKAGES | {"torch"}
_SAMPLERS = "torch.utils.data.distributed"


class EarlyReads:
    """The first read of each rank-dependent value, from `watch` to `stop`."""

    def __init__(self) -> None:
        self.watching = False
        self.found: dict[str, str] = {}
        """For each `PlaceInWorld` that was read: the place in the script that read it first."""
        self._samplers: list[weakref.ref[Any]] = []

    def watch(self, *, rewrites: bool = True) -> None:
        """Note reads from now on, also of torchrun's variables; with `rewrites=False` every value counts as read."""
        if not rewrites:
            self.found = dict.fromkeys(PlaceInWorld, "regrow may not look there, with --no-script-rewrite")
            return
        self.watching = True
        watch_environment(VARIABLES, lambda name: self.note(_VARIABLES[name], name))

    def stop(self) -> None:
        """Stop noting: the script has reached its loop, and later reads see the final values."""
        if self.watching:
            self.watching = False
            unwatch_environment()

    def note(self, what: PlaceInWorld, asked: str) -> None:
        """Note that the value `what` was read, under the name `asked`."""
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
        """Note that the script uses this device, which it has chosen by its local rank."""
        self.found.setdefault(PlaceInWorld.LOCAL_RANK, f"{device} is in use")

    def bind_rank(self, text: str) -> None:
        """Note that the script received data that was meant for its rank alone. `text`: a description of the data."""
        self.found.setdefault(PlaceInWorld.RANK, text)

    def take_rank(self, rank: int) -> None:
        """Set this rank in torch's samplers that were made with the former rank."""
        for reference in self._samplers:
            sampler = reference()
            if sampler is not None:
                sampler.rank = rank


def _reader(frame: FrameType | None) -> FrameType | None:
    """The frame of the script or framework that gets the value, from `frame` outwards; None if there is none."""
    while frame is not None:
        names = _ENTRY_POINTS.get(str(frame.f_globals.get("__name__", "")), frozenset[str]())
        if names is not None and frame.f_code.co_name not in names:
            return frame
        frame = frame.f_back
    return None


def _where(frame: FrameType) -> str:
    """File and line of a frame; for a framework's frame, also of the script's line that called it."""
    at = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    outer: FrameType | None = frame
    while outer is not None and outer.f_globals.get("__name__") != "__main__":
        outer = outer.f_back
    if outer is None or outer is frame:
        return at
    return f"{at}, called at {outer.f_code.co_filename}:{outer.f_lineno}"
