"""Objects of a script that hold what is protected: a trainer, an average of weights that counts its updates.

What they count decides what becomes of what they hold, so that their plain attributes go with the steps, as the plain
variables of the script do.
"""

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import FrameType, ModuleType

import torch
from torch import nn

from regrow.core.process.own_code import OWN_PACKAGES

_DEEP, _WIDE, _MOST = 4, 256, 5_000
_LEFT_ALONE = OWN_PACKAGES | {
    *("torch", "builtins", "numpy", "accelerate", "transformers", "lightning", "pytorch_lightning", "trl"),
}
"""Packages whose objects are nothing of the script's, or have an adapter that knows them."""
_MODULES_OWN = frozenset(vars(nn.Module()))


class Attributes:
    """The plain attributes of one object, as variables under a name that is the same on all ranks.

    `carries`: its arrays too, as nobody else does it.
    """

    def __init__(self, name: str, thing: object, *, carries: bool = False) -> None:
        self.name, self.carries = f"object {name}", carries
        self._thing = weakref.ref(thing)

    @property
    def alive(self) -> bool:
        """True while the script still has the object."""
        return self._thing() is not None

    def read(self) -> dict[str, object]:
        """All of them."""
        thing = self._thing()
        if thing is None:
            return {}
        return {key: value for key, value in vars(thing).items() if key not in _MODULES_OWN}

    def write(self, values: Mapping[str, object]) -> None:
        """Set some, past what the object makes of that."""
        thing = self._thing()
        if thing is not None:
            vars(thing).update(values)


def keepers(frames: Iterable[FrameType], protected: Collection[object]) -> list[Attributes]:
    """The objects that hold what is protected, or are it and no modules, each once.

    Args:
        frames: the script's, innermost first.
        protected: as the script gave it, with what wraps it and what is in the wrappers.
    """
    found: list[Attributes] = []
    ids = {id(each) for each in protected}
    inside = {id(part) for each in protected if isinstance(each, nn.Module) for part in each.modules()}
    for name, thing in _reachable(frames):
        if id(thing) in inside or not _counts(thing):
            continue
        if id(thing) in ids or any(id(each) in ids for each in _within(vars(thing).values())):
            try:
                found.append(Attributes(name, thing, carries=id(thing) not in ids))
            except TypeError:  # its kind allows no weak references
                continue
    return found


def _counts(thing: object) -> bool:
    if isinstance(thing, type | ModuleType | dict | list | tuple | set) or not hasattr(thing, "__dict__"):
        return False
    packages = {kind.__module__.partition(".")[0] for kind in type(thing).__mro__}
    own = type(thing).__module__.partition(".")[0] not in _LEFT_ALONE
    return own and packages.isdisjoint(_LEFT_ALONE - {"torch", "builtins"})


def _within(values: Iterable[object]) -> Iterator[object]:
    for each in values:
        yield each
        if isinstance(each, dict) and len(each) <= _WIDE:
            yield from each.values()
        elif isinstance(each, list | tuple) and len(each) <= _WIDE:
            yield from each


def _reachable(frames: Iterable[FrameType]) -> Iterator[tuple[str, object]]:
    seen: set[int] = set()
    near: list[tuple[str, object]] = []
    for frame in frames:
        near += [*frame.f_locals.items(), *frame.f_globals.items()]
    for _ in range(_DEEP):
        around: list[tuple[str, object]] = []
        for name, thing in near:
            if id(thing) in seen or len(seen) > _MOST or isinstance(thing, int | float | str | bytes | torch.Tensor):
                continue
            seen.add(id(thing))
            yield name, thing
            around += _held(name, thing)
        near = around


def _held(name: str, thing: object) -> Iterable[tuple[str, object]]:
    if isinstance(thing, dict) and len(thing) <= _WIDE:
        return [(f"{name}[{key!r:.40}]", each) for key, each in list(thing.items())]
    if isinstance(thing, list | tuple) and len(thing) <= _WIDE:
        return [(f"{name}[{at}]", each) for at, each in enumerate(thing)]
    if _counts(thing) and not isinstance(thing, nn.Module):
        return [(f"{name}.{key}", each) for key, each in list(vars(thing).items())]
    return ()
