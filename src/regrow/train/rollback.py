"""What a step may have changed before its update, and how to put it back. Cheap enough for every step.

Saved: buffers, the settings of parameter groups, the Python state of everything else, and whether gradients existed.
Not saved: parameters and optimizer state, which only the update changes; for these it is only known whether they have
changed.
"""

import itertools
import operator
from collections.abc import Iterable, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from regrow.core.errors import StateError
from regrow.hydration.shards import local
from regrow.train.naming import BufferSlot, Roster, Stateful

_ALWAYS_COPIED_BYTES = 16 << 10
"""Buffers up to this are copied at every step: some kernels write without counting versions. Larger ones are copied
when their version has changed, running statistics always."""
_HELD_BYTES = 1 << 20
"""Tensors inside other objects' state up to this are copied at every step; of larger ones (an average of the weights)
it is only noticed that they changed, as for parameters."""
Mark = tuple[torch.Tensor, int]


def held(value: object, large: list[Mark]) -> object:
    """A copy of nested state that later changes do not reach. Large tensors stay themselves and are marked."""
    kind = type(value)
    if kind is dict:
        return {key: held(item, large) for key, item in value.items()}  # type: ignore[attr-defined]
    if kind is list:
        return [held(item, large) for item in value]  # type: ignore[attr-defined]
    if kind is tuple:
        return tuple(held(item, large) for item in value)  # type: ignore[attr-defined]
    if isinstance(value, torch.Tensor):
        if value.nbytes > _HELD_BYTES:
            large.append((value, value._version))
            return value
        return value.detach().clone()
    if isinstance(value, dict | set | bytearray):
        # OrderedDict, Counter and the like: rare, small, and their own copy keeps the type.
        copy = value.copy()
        if isinstance(copy, dict):
            for key, item in copy.items():
                copy[key] = held(item, large)
        return copy
    return value


class _Buffers:
    """The buffers as they were; the copies are reused from step to step."""

    def __init__(self, slots: Sequence[BufferSlot]) -> None:
        self._slots = slots
        self.forget()

    def forget(self) -> None:
        """The buffers were written to by other means: trust no version."""
        self._tensors: list[torch.Tensor | None] = []
        self._packs: list[tuple[list[torch.Tensor], torch.Tensor]] = []
        self._single: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._versions: list[int] = []

    def save(self) -> None:
        tensors = [slot.home.get(slot.key) for slot in self._slots]
        same = len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors))
        if not same:
            self._sort(tensors)
        for views, flat in self._packs:
            torch.cat(views, out=flat)
        for at, (tensor, copy) in enumerate(self._single):
            if tensor._version != self._versions[at]:
                copy.copy_(tensor.detach())
                self._versions[at] = tensor._version

    def _sort(self, tensors: list[torch.Tensor | None]) -> None:
        """Small buffers of a device share one copy, made by one operation; the others have one each."""
        self.forget()
        self._tensors = tensors
        packs: dict[torch.device, list[torch.Tensor]] = {}
        for slot, tensor in zip(self._slots, tensors, strict=True):
            if tensor is None:
                continue
            here = local(tensor)
            small = here.nbytes <= _ALWAYS_COPIED_BYTES or slot.running
            if small and here.is_contiguous():
                packs.setdefault(here.device, []).append(here.detach().reshape(-1).view(torch.uint8))
            else:
                self._single.append((tensor, torch.empty_like(tensor)))
                self._versions.append(-1)
        for device, views in packs.items():
            flat = torch.empty(sum(view.numel() for view in views), dtype=torch.uint8, device=device)
            self._packs.append((views, flat))

    def restore(self) -> None:
        for slot, tensor in zip(self._slots, self._tensors, strict=True):
            slot.home[slot.key] = tensor
        for views, flat in self._packs:
            at = 0
            for view in views:
                view.copy_(flat[at : at + view.numel()])
                at += view.numel()
        for at, (tensor, copy) in enumerate(self._single):
            if tensor._version != self._versions[at]:
                tensor.detach().copy_(copy)
                self._versions[at] = tensor._version


class Undo:
    """Remembers one moment, the start of a step, and goes back to it."""

    def __init__(self, protected: Roster) -> None:
        self._roster = protected
        self._parameters = list(protected.parameters.values())
        self._buffers = _Buffers(protected.buffers)
        self._updates = 0
        self._begun = False
        self._hooks: list[RemovableHandle] | None = None

    def _watch(self) -> None:
        # Not in the constructor: a hook of the session that forbids an update must come before the one that counts it.
        self._hooks = [
            optimizer.register_step_pre_hook(self._update_begins) for optimizer in self._roster.optimizers.values()
        ]

    def _update_begins(self, *_: object) -> None:
        # Fused optimizers write to parameters without counting versions; this catches them.
        self._updates += 1

    def close(self) -> None:
        """Take the hooks off the optimizers."""
        for hook in self._hooks or ():
            hook.remove()

    def forget(self) -> None:
        """State was written by other means (hydration); the next `begin` starts anew."""
        self._buffers.forget()
        self._begun = False

    def begin(self) -> None:
        """Remember now."""
        if self._hooks is None:
            self._watch()
        self._large: list[Mark] = []
        with torch.no_grad():
            self._buffers.save()
            self._settings = [held(settings(group), self._large) for group in self._groups()]
            self._states = [held(thing.state_dict(), self._large) for thing in self._roster.objects.values()]
        self._had_gradient = [parameter.grad is not None for parameter in self._parameters]
        self._versions = [parameter._version for parameter in self._parameters]
        self._updates_before = self._updates
        self._begun = True

    def parameters_changed(self) -> bool:
        """Whether an update has touched anything since `begin`. Raises `StateError` without one."""
        self._check()
        return (
            self._updates != self._updates_before
            or any(tensor._version != version for tensor, version in self._large)
            or self._versions != [parameter._version for parameter in self._parameters]
        )

    def rollback(self) -> None:
        """Go back to `begin`. A gradient that existed then is zero now. Raises `StateError` without a `begin`."""
        self._check()
        with torch.no_grad():
            self._buffers.restore()
            for group, saved in zip(self._groups(), self._settings, strict=True):
                put_settings(group, held(saved, []))
            for (name, thing), saved in zip(self._roster.objects.items(), self._states, strict=True):
                load(name, thing, held(saved, []))
            for parameter, had in zip(self._parameters, self._had_gradient, strict=True):
                put_gradient(parameter, had)

    def _check(self) -> None:
        if not self._begun:
            raise StateError("nothing was remembered of this step", hint="call begin() first")

    def _groups(self) -> Iterable[dict[str, object]]:
        return itertools.chain.from_iterable(optimizer.param_groups for optimizer in self._roster.optimizers.values())


def settings(group: dict[str, object]) -> dict[str, object]:
    """All of a parameter group but its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def put_settings(group: dict[str, object], saved: object) -> None:
    """Make a parameter group's settings equal to `saved`; tensors among them keep their identity."""
    if not isinstance(saved, dict):
        raise StateError(f"the settings of a parameter group are a {type(saved).__name__}")
    for key in [key for key in group if key != "params" and key not in saved]:
        del group[key]
    for key, value in saved.items():
        present = group.get(key)
        if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor) and present.shape == value.shape:
            present.detach().copy_(value)
        else:
            group[key] = value


def load(name: str, thing: Stateful, state: object) -> None:
    """`load_state_dict` of the script's object. Raises `StateError` when that fails."""
    try:
        thing.load_state_dict(state)
    except Exception as error:
        raise StateError(f"{name}: load_state_dict() of {type(thing).__name__} failed: {error!r}") from error


def put_gradient(parameter: torch.Tensor, present: bool) -> None:
    """A gradient of zeros, or none."""
    if not present:
        parameter.grad = None
    elif parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    else:
        parameter.grad.detach().zero_()
