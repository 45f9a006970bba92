"""Finds unprotected arrays that bodies pass on to the next body, in scripts with environments.

Examples are an observation in a variable, and an unprotected replay buffer: a step that runs again would begin with the
values that its first attempt left, and a newcomer with those that its script has built.
"""

from collections.abc import Collection, Iterable, Iterator
from types import FrameType
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from regrow.core.errors import UsageError
from regrow.train.rehearsal.environments import array_token, parts_of
from regrow.train.script.read_first import loop_read

_DEEP, _MOST, _BYTES = 12, 20_000, 256 << 20
_NOT_DATA = (nn.Module, nn.Parameter, torch.optim.Optimizer, LRScheduler, DataLoader, Dataset, type)


class _Held(NamedTuple):
    """A variable: its value, and tokens of the arrays in it."""

    value: object
    arrays: dict[str, object]


class CarriedArrays:
    """Variables of the script's frames that hold arrays, as they are before a body.

    Args:
        frames: frames of the script, innermost first: the loop's.
        protected: ids of protected objects, and of all that these hold.
    """

    def __init__(self, frames: Iterable[FrameType], protected: Collection[int]) -> None:
        self._frames, self._protected = list(frames), protected
        self._before = self._look()

    def refuse_changed(self) -> None:
        """Raise `UsageError` if a body has changed an array that the next body may read."""
        found = loop_read(self._frames)
        reads = None if found is None else found[1]
        for name, now in self._look().items():
            before = self._before.get(name)
            if before is None or not now.arrays or before.arrays == now.arrays:
                continue
            if reads is not None and (
                name in reads.harmless or (before.value is not now.value and name not in reads.first)
            ):
                continue  # the body makes or fills it anew before it reads it, or only adds to it
            at = next((path for path, token in now.arrays.items() if before.arrays.get(path) != token), name)
            raise UsageError(
                f"the loop's body changes arrays in `{name}` ({type(now.value).__name__}: {at}), which is not "
                "protected: after a fault the next body would begin with others",
                hint=f"protect it with the environments, as `{name}`, or in memory = types.SimpleNamespace({name}=...) "
                "with session.protect(memory=memory, ...). An array that a body needs for itself alone is made in it",
            )

    def _look(self) -> dict[str, _Held]:
        found: dict[str, _Held] = {}
        for frame in self._frames:
            for name, value in [*frame.f_locals.items(), *frame.f_globals.items()]:
                if name not in found and not name.startswith("__"):
                    found[name] = _Held(value, dict(self._arrays(name, value)))
        return found

    def _arrays(self, name: str, value: object) -> Iterator[tuple[str, object]]:
        seen: set[int] = set()
        near = [(name, value)]
        for _ in range(_DEEP):
            around: list[tuple[str, object]] = []
            for path, thing in near:
                if id(thing) in seen or id(thing) in self._protected or isinstance(thing, _NOT_DATA):
                    continue
                if len(seen) > _MOST:
                    return
                seen.add(id(thing))
                if isinstance(thing, np.ndarray | torch.Tensor):
                    yield path, array_token(thing, _BYTES)
                else:
                    around += parts_of(path, thing)
            near = around
