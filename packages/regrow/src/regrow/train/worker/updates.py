"""Follows updates in a body: the optimizers that stepped, the calls after them, and whether the update is complete.

A body should first compute, with all its collectives, and then update. The rehearsal, or a real step, shows if it does.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import nn

from regrow.devices.accelerators import on_accelerator

_COMPARED_BYTES = 4096
"""Larger tensors in objects' state are compared by version only."""


class Updates:
    """Follows one worker's bodies from their first update on."""

    def __init__(self) -> None:
        self._objects: list[object] = []
        self._stepped: Counter[int] = Counter()
        self._usual: Counter[int] = Counter()
        self._begun = self._learning = False
        self._mark: Mapping[str, object] = {}
        self._late: set[str] = set()
        self.torn_apart = ""
        """Reason why the body cannot be separated from its update: a collective after it, or a closure; else empty."""

    def watch(self, objects: Iterable[object]) -> None:
        """Watch these protected objects."""
        self._objects = list(objects)

    def begin(self, *, learning: bool = False) -> None:
        """Begin a body. `learning`: record what a body usually changes."""
        self._stepped, self._begun, self._learning, self._mark = Counter(), False, learning, {}

    def began(self, *, closure: bool) -> None:
        """Note that an optimizer is about to step. `closure`: the optimizer has a closure that computes gradients."""
        self._begun = True
        if closure:
            self.torn_apart = self.torn_apart or "optimizer.step(closure) computes gradients"

    def stepped(self, optimizer: object) -> None:
        """Note that an optimizer has stepped."""
        self._stepped[id(optimizer)] += 1
        if self._learning:
            self._mark = witness(self._objects)
        elif self._late:
            self._mark = witness(self._objects, self._late)

    def called(self, name: str, size: int) -> None:
        """Note a collective of `size` ranks; after an update began, the body cannot be separated from its update."""
        if self._begun and size > 1 and not self.torn_apart:
            self.torn_apart = f"{name} is called"

    def end_body(self) -> None:
        """End the body: calls that follow are not part of it."""
        self._begun = False

    def ended(self) -> None:
        """Record a body that ended without an error as the usual one."""
        self._begun = False
        if self._stepped:
            self._usual = self._stepped
        if self._learning and self._mark:
            self._late |= changed(self._mark, witness(self._objects))

    @property
    def complete(self) -> bool:
        """True if this body has changed everything that it usually changes in and after its update."""
        if not self._stepped or self._stepped != self._usual:
            return False
        return changed(self._mark, witness(self._objects, self._late)) == self._late


def witness(objects: Iterable[object], names: Iterable[str] | None = None) -> dict[str, object]:
    """Fingerprints, by name, of the protected state that `optimizer.step()` itself does not change.

    These are parameters that no optimizer holds, buffers, optimizers' settings such as the learning rate, and other
    objects' `state_dict()`. Compare two results with `changed`; what cannot be read counts as changed.

    Args:
        objects: the protected objects.
        names: take only these; None for all.
    """
    objects = list(objects)
    wanted = None if names is None else set(names)
    seen = _tensors(objects) if wanted is None else _named(objects, wanted)
    for at, thing in enumerate(objects):
        name = f"object {at}"
        if isinstance(thing, nn.Module):
            continue
        if wanted is not None and name not in wanted:
            continue
        try:
            if isinstance(thing, torch.optim.Optimizer):
                settings = [{k: v for k, v in group.items() if k != "params"} for group in thing.param_groups]
                seen[name] = token(settings)
            elif hasattr(thing, "state_dict"):
                seen[name] = token(thing.state_dict())
        except Exception:  # noqa: BLE001  the script's own code, not made for a call here: the object counts as changed
            seen[name] = object()
    return seen


def _tensors(objects: list[object]) -> dict[str, object]:
    """Tokens of all parameters and buffers that no optimizer holds."""
    owned = {
        id(parameter)
        for thing in objects
        if isinstance(thing, torch.optim.Optimizer)
        for group in thing.param_groups
        for parameter in group["params"]
    }
    return {
        f"{kind} {at} {path}": (id(tensor), tensor._version)
        for at, thing in enumerate(objects)
        if isinstance(thing, nn.Module)
        for kind, tensors in (("parameter", thing.named_parameters()), ("buffer", nn.Module.named_buffers(thing)))
        for path, tensor in tensors
        if id(tensor) not in owned
    }


def _named(objects: list[object], names: set[str]) -> dict[str, object]:
    """Tokens of some of these tensors, without a walk over all modules."""
    seen: dict[str, object] = {}
    for name in names:
        kind, at, *rest = name.split(" ", 2)
        thing = objects[int(at)]
        if rest and isinstance(thing, nn.Module):
            try:
                tensor = thing.get_parameter(rest[0]) if kind == "parameter" else thing.get_buffer(rest[0])
            except AttributeError:  # another object has taken its place since
                seen[name] = object()
            else:
                seen[name] = (id(tensor), tensor._version)
    return seen


def changed(before: Mapping[str, object], after: Mapping[str, object]) -> set[str]:
    """Names in both mappings whose tokens differ."""
    return {name for name, token in after.items() if name in before and before[name] != token}


def token(value: object) -> object:
    """A comparable object that differs when a value, or anything in it, has changed."""
    if isinstance(value, dict):
        return tuple((repr(key), token(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(token(item) for item in value)
    if isinstance(value, torch.Tensor):
        here = value.detach()
        if value.nbytes > _COMPARED_BYTES or on_accelerator(value):
            return value._version
        return here.reshape(-1).tolist() if type(here) is torch.Tensor else value._version
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.nbytes <= _COMPARED_BYTES else value.shape
    return repr(value)
