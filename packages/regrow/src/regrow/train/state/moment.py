"""Copies protected state at one moment, and restores it; cheap enough for every step.

Always copied: buffers, the settings of parameter groups, the Python state of everything else, modes of modules, the
script's plain variables. A `Scope` selects more state, since parameters and optimizer state usually change in
the update only.
"""

import itertools
import logging
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from regrow.core.errors import StateError
from regrow.hydration.shards import local
from regrow.train.graphs.memory import Memory
from regrow.train.graphs.nested import Marks, fitted, held
from regrow.train.graphs.object_graph import ObjectGraph
from regrow.train.state.modes import Modes
from regrow.train.state.naming import BufferSlot, ProtectedObjects, Stateful
from regrow.train.values.variables import Variables

_PLAIN = (int, float, bool, str)
_noted_unlike = set[str]()
_log = logging.getLogger("regrow")
_ALWAYS_COPIED_BYTES = 16 << 10
"""Buffers up to this are copied at every step: some kernels write without counting versions. Larger ones are copied
when their version has changed, running statistics always."""


@dataclass(frozen=True)
class Scope:
    """State that a moment copies in addition to what it always copies.

    Attributes:
        parameters: names of parameters.
        objects: names of objects whose tensors and arrays are copied even if they are large.
        optimizers: whether the state of optimizers is copied.
        host: whether the copies are in the processor's memory.
    """

    parameters: frozenset[str] = frozenset()
    objects: frozenset[str] = frozenset()
    optimizers: bool = False
    host: bool = False

    @classmethod
    def everything(cls, roster: ProtectedObjects, *, host: bool = False) -> "Scope":
        """The scope of all protected state."""
        return cls(frozenset(roster.parameters), frozenset(roster.objects), optimizers=True, host=host)

    def __or__(self, other: "Scope") -> "Scope":
        return Scope(
            self.parameters | other.parameters,
            self.objects | other.objects,
            self.optimizers or other.optimizers,
            self.host and other.host,
        )

    def __contains__(self, name: str) -> bool:
        return name in self.parameters or name in self.objects

    @property
    def names(self) -> list[str]:
        """Names in this scope, for people."""
        return sorted(self.parameters | self.objects) + ["the optimizers' state"] * self.optimizers


ALWAYS = Scope()
"""Scope of every moment, with nothing added."""


class Moment:
    """One moment to which the state can go back any number of times. The next `take` uses its memory again.

    Args:
        protected: the objects that are copied.
        modes: the modes of their modules.
        variables: the script's variables, which belong to no scope.
    """

    def __init__(self, protected: ProtectedObjects, modes: Modes, variables: Variables) -> None:
        self._roster, self._modes, self._variables = protected, modes, variables
        self._buffers = _Buffers(protected.buffers)
        self._parameters: dict[str, _Copy] = {}
        self._states: dict[str, object] = {}
        self.scope = Scope()
        self.taken = False

    def forget(self) -> None:
        """Forget the moment, as the state was written by other means (hydration)."""
        self._buffers.forget()
        self.taken = False

    def take(self, scope: Scope = Scope()) -> None:
        """Remember the state as it is now."""
        self.scope = scope
        self._left = {name: Marks() for name in self._roster.objects}
        options = Marks()
        self._roster.late.come_behind()
        with torch.no_grad():
            self._buffers.save()
            self._settings = [held(settings(group), options) for group in self._groups()]
            former, self._states = self._states, {}
            for name, thing in self._roster.objects.items():
                if isinstance(thing, ObjectGraph):
                    self._states[name] = thing.remember(former.get(name))
                else:
                    left = None if name in scope.objects else self._left[name]
                    self._states[name] = held(thing.state_dict(), left)
            self._take_parameters()
            self._optimizer_state = (
                [_State(optimizer, host=scope.host) for optimizer in self._roster.optimizers.values()]
                if scope.optimizers
                else []
            )
        self._remembered, self._own = self._modes.take(), self._variables.take()
        self.taken = True

    def extend(self, scope: Scope) -> None:
        """Remember more state, which has not changed since `take`. Does nothing if nothing was remembered."""
        if not self.taken:
            return
        self._roster.late.come_behind()
        with torch.no_grad():
            for name in sorted(scope.objects - self.scope.objects):
                # Small values are copies already; large ones are still the object's own, unchanged until now.
                self._states[name] = held(self._states[name], None)
            for name in sorted(scope.parameters - self.scope.parameters):
                copy = _Copy(self._roster.parameters[name], host=scope.host)
                copy.take()
                self._parameters[name] = copy
        self.scope |= Scope(scope.parameters, scope.objects, host=self.scope.host)

    def _take_parameters(self) -> None:
        former, self._parameters = self._parameters, {}
        for name in sorted(self.scope.parameters):
            parameter = self._roster.parameters.get(name)
            if parameter is not None:
                copy = former.get(name)
                if copy is None or copy.of is not parameter or copy.host != self.scope.host:
                    copy = _Copy(parameter, host=self.scope.host)
                copy.take()
                self._parameters[name] = copy

    def put_back(self) -> None:
        """Go back to the moment. Raises `StateError` if there is none, or an object has no state or refuses it."""
        if unlike := self.go_back():
            raise StateError(f"{unlike[0]} cannot be put back: steps have put something there that cannot be copied")

    def go_back(self) -> list[str]:
        """As `put_back`, but return the names of objects that could not be remembered, and so not restored."""
        unlike: list[str] = []
        if not self.taken:
            raise StateError("nothing was remembered of this step", hint="call begin() first")
        self._roster.late.come_behind()
        with torch.no_grad():
            self._buffers.restore()
            for name, saved in self._states.items():
                thing = self._roster.objects[name]
                if isinstance(thing, ObjectGraph):
                    if not thing.go_back(saved if isinstance(saved, Memory) else None):
                        unlike.append(name)
                else:
                    put_object(name, thing, saved)
            for state in self._optimizer_state:  # after objects: a scheduler may set rates as it loads a state
                state.put_back()
            for group, saved in zip(self._groups(), self._settings, strict=True):
                put_settings(group, held(saved, None))
            for copy in self._parameters.values():
                copy.put_back()
        self._modes.put_back(self._remembered)
        self._variables.put_back(self._own)
        return unlike

    @property
    def left_changed(self) -> list[str]:
        """Objects in which a large tensor, which was not copied, has changed since."""
        return [name for name, marks in self._left.items() if marks.changed]

    def _groups(self) -> Iterable[dict[str, object]]:
        return itertools.chain.from_iterable(optimizer.param_groups for optimizer in self._roster.optimizers.values())


class _Copy:
    """A copy of a tensor's values, and the memory that held them."""

    def __init__(self, tensor: torch.Tensor, *, host: bool) -> None:
        self.of, self.host = tensor, host
        here = local(tensor).detach()
        self._copy = torch.empty_like(here, device="cpu" if host else here.device)

    def take(self) -> None:
        self._memory = local(self.of).detach()
        self._copy.copy_(self._memory)

    def put_back(self) -> None:
        here = local(self.of)
        if here.data_ptr() != self._memory.data_ptr() and here is self.of:
            # `parameter.data = other` has given it another tensor's memory, which must not be written to.
            self.of.data = self._memory
        self._memory.copy_(self._copy)


class _State:
    """All state of one optimizer; `put_back` also drops entries made since."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, host: bool) -> None:
        self._optimizer = optimizer
        self._kept: dict[torch.Tensor, dict[str, tuple[object, object]]] = {
            parameter: {key: (value, _put_away(value, host)) for key, value in values.items()}
            for parameter, values in optimizer.state.items()
        }

    def put_back(self) -> None:
        state = self._optimizer.state
        for parameter in [parameter for parameter in state if parameter not in self._kept]:
            del state[parameter]
        for parameter, kept in self._kept.items():
            present = state[parameter]
            present.clear()
            for key, (value, copy) in kept.items():
                if isinstance(value, torch.Tensor) and isinstance(copy, torch.Tensor):
                    local(value).detach().copy_(copy)
                    present[key] = value
                else:
                    present[key] = held(copy, None)


def _put_away(value: object, host: bool) -> object:
    if isinstance(value, torch.Tensor):
        here = local(value).detach()
        return here.to("cpu", copy=True) if host else here.clone()
    return held(value, None)


class _Buffers:
    """The buffers as they were; the copies are reused from step to step."""

    def __init__(self, slots: Sequence[BufferSlot]) -> None:
        self._slots = slots
        self.forget()

    def forget(self) -> None:
        """Trust no version, as the buffers were written by other means."""
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
        """Let small buffers of a device share one copy, made by one operation; the others have one each."""
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


def settings(group: dict[str, object]) -> dict[str, object]:
    """All entries of a parameter group but its parameters."""
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


def put_object(name: str, thing: Stateful, state: object, *, in_place: bool = True) -> None:
    """Call `load_state_dict` of the script's object, with the state in the object's own types. Raises `StateError`.

    Args:
        in_place: write into the tensors that the object has; else it takes over those of `state`.
    """
    try:
        thing.load_state_dict(fitted(thing.state_dict(), state, in_place=in_place))
        _correct(name, thing, state)
    except Exception as error:
        raise StateError(f"{name}: load_state_dict() of {type(thing).__name__} failed: {error!r}") from error


def _correct(name: str, thing: Stateful, state: object) -> None:
    """Set numbers and strings that an object did not load as given: some objects add loaded values to their own."""
    for key, value in _unlike(thing, state).items():
        if type(getattr(thing, "__dict__", {}).get(key)) in _PLAIN:
            setattr(thing, key, value)
    if (unlike := _unlike(thing, state)) and name not in _noted_unlike:
        _noted_unlike.add(name)
        _log.warning(
            "%s: a %s has another %s after load_state_dict() than the state_dict() that it was given: after a fault "
            "ranks may differ",
            name,
            type(thing).__name__,
            min(unlike),
        )


def _unlike(thing: Stateful, state: object) -> dict[str, object]:
    """Numbers and strings of a state, by name, for which the object now has other values."""
    present = thing.state_dict()
    if not isinstance(state, dict) or not isinstance(present, dict):
        return {}
    return {
        key: value
        for key, value in state.items()
        if isinstance(key, str)
        and type(value) in _PLAIN
        and type(there := present.get(key, value)) in _PLAIN
        and (there != value and not (there != there and value != value))
    }
