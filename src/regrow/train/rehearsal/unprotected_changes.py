"""What a loop's body changes though nobody protects it: averages, scalers, schedulers, random generators.

They are looked for where a script can have them: in the variables of its functions that are under way, and in the
objects and containers that these hold.
"""

import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from types import FrameType

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from regrow.core.errors import UsageError
from regrow.hydration.shards import local
from regrow.train.script_source import is_script
from regrow.train.state.fingerprints import flat_bytes
from regrow.train.state.protected import ProtectedState
from regrow.train.worker.updates import token

_DEEP = 3
_WIDE = 256
_AT_MOST = 5_000
"""So many things are looked at, in containers of so many items."""
_OF_MODULES = frozenset(vars(nn.Module()))
_SAMPLED = 16
"""Elements of a tensor that tell whether it was written: `.data` does not count versions."""
Looked = nn.Module | LRScheduler | torch.amp.GradScaler | torch.Generator | np.random.Generator


class Unprotected:
    """What of a script's is not protected, and how it looked.

    Args:
        state: what is protected.
        objects: the same, as the script gave it.
        frames: the script's.
    """

    def __init__(self, state: ProtectedState, objects: Iterable[object], frames: Iterable[FrameType]) -> None:
        objects, self._optimizers = list(objects), state.optimizers()
        self._tensors = {id(each) for each in state.parameters()}
        for each in objects:
            if isinstance(each, nn.Module):
                self._tensors.update(map(id, chain(each.parameters(), each.buffers())))
        known = {id(each) for each in _inside(objects)}
        self._things = {name: each for name, each in _reachable(frames) if id(each) not in known}
        self.look()

    def look(self) -> None:
        """Compare with now from here on."""
        self._looks = {name: self._look(thing) for name, thing in self._things.items()}

    def refuse_changed(self, *, drawn: bool = False) -> None:
        """Raises `UsageError` where something has changed.

        Args:
            drawn: look at random generators, and else at all but these.
        """
        for name, thing in self._things.items():
            generator = isinstance(thing, torch.Generator | np.random.Generator)
            if generator is drawn and self._look(thing) != self._looks[name]:
                does = "draws from" if generator else "changes"
                raise UsageError(
                    f"the loop's body {does} `{name}` ({type(thing).__name__}), which is not protected: after a fault "
                    "ranks would have different ones",
                    hint=_cure(name),
                )

    def refuse_waiting(self) -> None:
        """Raises `UsageError` for what is made to change, though it has not yet: it may at the first epoch's end."""
        for name, thing in self._things.items():
            sets_rate = isinstance(thing, LRScheduler) and any(thing.optimizer is mine for mine in self._optimizers)
            if sets_rate or isinstance(thing, AveragedModel):
                raise UsageError(
                    f"`{name}` ({type(thing).__name__}) follows what is protected, at some step if not at the first, "
                    "and is not protected: after a fault ranks would have different ones",
                    hint=_cure(name),
                )

    def _look(self, thing: Looked) -> object:
        if isinstance(thing, nn.Module):
            named = chain(thing.named_parameters(), thing.named_buffers())
            return {name: (each._version, _first(each)) for name, each in named if id(each) not in self._tensors}
        if isinstance(thing, torch.Generator):
            return thing.get_state().numpy().tobytes()
        if isinstance(thing, np.random.Generator):
            return repr(thing.bit_generator.state)
        return token(thing.state_dict())


def _cure(name: str) -> str:
    short = name.rpartition(".")[2].rpartition("[")[0] or name.rpartition(".")[2]
    return f"give it to protect(..., {short}={name})"


def _first(tensor: torch.Tensor) -> bytes:
    if nn.parameter.is_lazy(tensor) or tensor.layout is not torch.strided:
        return b""
    here = local(tensor).detach()
    if here.is_meta or not here.numel():
        return b""
    return flat_bytes(here.flatten()[:_SAMPLED]).numpy().tobytes()


def _inside(objects: Iterable[object]) -> Iterator[object]:
    """What is protected, and the schedulers in its schedulers and in what wraps one, which go with it."""
    for thing in objects:
        yield thing
        if isinstance(thing, LRScheduler):
            yield from _inside(getattr(thing, "_schedulers", ()))
        elif not isinstance(thing, nn.Module | torch.optim.Optimizer):
            yield from _inside(
                each for each in getattr(thing, "__dict__", {}).values() if isinstance(each, LRScheduler)
            )


def _reachable(frames: Iterable[FrameType]) -> Iterator[tuple[str, Looked]]:
    """What can be looked at, under the names by which the script has it; each once."""
    seen: set[int] = set()
    near: list[tuple[str, object]] = []
    for frame in frames:
        near += frame.f_locals.items()
        near += frame.f_globals.items()
    for _ in range(_DEEP):
        around: list[tuple[str, object]] = []
        for name, thing in near:
            if id(thing) in seen or len(seen) > _AT_MOST:
                continue
            seen.add(id(thing))
            if isinstance(thing, Looked) and thing is not torch.default_generator:
                yield name, thing
            around += _held(name, thing)
        near = around


def _held(name: str, thing: object) -> Iterable[tuple[str, object]]:
    if isinstance(thing, dict | list | tuple) and len(thing) > _WIDE:
        return ()
    if isinstance(thing, dict):
        return [(f"{name}[{key!r}]", each) for key, each in list(thing.items()) if isinstance(key, str | int)]
    if isinstance(thing, list | tuple):
        return [(f"{name}[{at}]", each) for at, each in enumerate(thing)]
    if _is_scripts(type(thing)) and hasattr(thing, "__dict__"):
        # The parts of a module are looked at with it.
        return [(f"{name}.{key}", each) for key, each in list(vars(thing).items()) if key not in _OF_MODULES]
    return ()


def _is_scripts(kind: type) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "__main__" or (file is not None and is_script(file))
