"""State of modules besides tensors: training or evaluating, `requires_grad` of parameters, and plain attributes.

An attribute counts only once a step was seen to change it: others may be a rank's own, such as its number.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from regrow.train.state.naming import unwrapped

Place = tuple[str, str]
"""A module's path, and the name of its attribute."""
_PLAIN = (int, float, bool, str, type(None))
_OURS = frozenset({"training"})


class Modes:
    """The modes of protected modules.

    Args:
        modules: protected modules as the script gave them, by name.
        parameters: all protected parameters, by name.
    """

    def __init__(self, modules: Mapping[str, nn.Module], parameters: Mapping[str, torch.Tensor]) -> None:
        self._modules: dict[str, nn.Module] = {}
        for name, outer in modules.items():
            for path, module in outer.named_modules():
                self._modules[f"{name}.{path}" if path else name] = module
        self._parameters = parameters
        self.living: list[Place] = []
        """The attributes that steps change."""
        self.calls_between = False
        """True if the script was seen to call functions between steps that all ranks run again after a fault."""

    def take(self) -> "Remembered":
        """The modes as they are now."""
        return Remembered(
            [module.training for module in self._modules.values()],
            [parameter.requires_grad for parameter in self._parameters.values()],
            [getattr(self._modules[path], key, None) for path, key in self.living],
            list(self.living),
        )

    def put_back(self, then: "Remembered") -> None:
        """Set the modes to those of `then`."""
        for module, training in zip(self._modules.values(), then.training, strict=True):
            module.training = training
        for parameter, wanted in zip(self._parameters.values(), then.gradients, strict=True):
            if parameter.requires_grad != wanted:
                parameter.requires_grad_(wanted)
        for (path, key), value in zip(then.places, then.values, strict=True):
            setattr(self._modules[path], key, value)

    def attributes(self) -> dict[Place, object]:
        """All plain attributes of modules. Costs a walk over all modules."""
        return {
            (path, key): value
            for path, module in self._modules.items()
            if unwrapped(module) is module  # the attributes of wrappers are torch's own business
            for key, value in module.__dict__.items()
            if key not in _OURS and (_counts(module, value) if key.startswith("_") else _plain(value))
        }

    def learn(self, before: Mapping[Place, object]) -> list[Place]:
        """Let attributes that have changed since `before` count from now on. Returns those that are new."""
        now = self.attributes()
        new = [place for place, value in before.items() if place in now and not _same(now[place], value)]
        new = [place for place in new if place not in self.living]
        self.living = sorted([*self.living, *new])
        return new

    def undo(self, before: Mapping[Place, object]) -> None:
        """Set the attributes that steps change to their values in `before`."""
        for path, key in self.living:
            if (path, key) in before:
                setattr(self._modules[path], key, before[path, key])

    # --- as they are sent and received -------------------------------------------------------------------------

    def state(self) -> dict[str, object]:
        """The modes as plain values; only exceptions from the default are listed."""
        return {
            "evaluating": [path for path, module in self._modules.items() if not module.training],
            "frozen": [name for name, parameter in self._parameters.items() if not parameter.requires_grad],
            "between": self.calls_between,
            "values": [[path, key, getattr(self._modules[path], key, None)] for path, key in self.living],
        }

    def receive(self, state: Mapping[str, object]) -> None:
        """Take over another worker's `state`; modules that do not exist here are ignored."""
        evaluating, frozen = _texts(state.get("evaluating")), _texts(state.get("frozen"))
        for path, module in self._modules.items():
            module.training = path not in evaluating
        for name, parameter in self._parameters.items():
            if parameter.requires_grad == (name in frozen):
                parameter.requires_grad_(name not in frozen)
        self.calls_between = self.calls_between or bool(state.get("between"))
        values = state.get("values")
        for path, key, value in values if isinstance(values, list) else ():
            if path in self._modules:
                setattr(self._modules[path], key, value)


class Remembered:
    """The modes of one moment."""

    def __init__(
        self, training: Sequence[bool], gradients: Sequence[bool], values: Sequence[object], places: Sequence[Place]
    ) -> None:
        self.training, self.gradients, self.values, self.places = training, gradients, values, places


def _counts(module: nn.Module, value: object) -> bool:
    """True if a private attribute may be a counter. Flags, which are set once, stay as the rehearsal left them."""
    return type(value) in (int, float) and not type(module).__module__.startswith("torch.")


def _plain(value: object) -> bool:
    if type(value) is tuple:
        return all(_plain(item) for item in value)
    return type(value) in _PLAIN


def _same(one: object, other: object) -> bool:
    # By type and text: 1 and True are two values, nan is one.
    return type(one) is type(other) and repr(one) == repr(other)


def _texts(values: object) -> set[str]:
    return {str(value) for value in values} if isinstance(values, Iterable) else set()
