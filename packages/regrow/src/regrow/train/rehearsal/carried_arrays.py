"""Arrays that bodies hand to the next body outside of what is protected, in scripts that have environments.

An observation in a variable, a replay buffer that nobody protects: a step that runs again would begin with what its
first try has left, and a newcomer with what its script has built.
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
    """Variables of the script's calls that hold arrays, as they are before a body.

    Args:
        frames: of the script, innermost first: the loop's.
        protected: ids of what is protected, and of what that holds.
    """

    def __init__(self, frames: Iterable[FrameType], protected: Collection[int]) -> None:
        self._frames, self._protected = list(frames), protected
        self._before = self._look()

    def refuse_changed(self) -> None:
        """Raises `UsageError` where a body has changed one that the next body may read."""
        found = loop_read(self._frames)
        reads = None if found is None else found[1]
        for name, now in self._look().items():
            before = self._before.get(name)
            if before is None or not now.arrays or before.arrays == now.arrays:
                continue
            if reads is not None and (
                name in reads.harmless or (before.value is not now.value and name not in reads.first)
            ):
                continue  # which the body makes or fills anew before it reads it, or only adds to
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
