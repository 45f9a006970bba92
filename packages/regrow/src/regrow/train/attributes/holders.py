"""Finds objects around protected modules: wrappers, their bucket managers, objects to which hooks are bound.

Objects of torch and of other libraries are left out, and so are objects that threads use, as these change by
themselves. An object counts if its class is the script's, or comes from the package of a protected module.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import NamedTuple

import torch
from torch import nn

from regrow.core.process.own_code import OWN_PACKAGES
from regrow.train.attributes.kept_values import cells
from regrow.train.script.source import is_scripts

MOST_ITEMS = 2_000
"""Larger containers are not looked into."""
_MOST_HOLDERS, _ENDS = 5_000, (int, float, complex, str, bytes, type(None), torch.Tensor)
_MODULES_OWN = frozenset(vars(nn.Module()))
_OPTIMIZERS_OWN = frozenset({"state", "param_groups", "defaults"})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ON_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
OF_THREADS = (threading.Thread, type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event)


class AttributeHolder(NamedTuple):
    """An object with attributes. `own`: names of the attributes that torch itself manages."""

    name: str
    thing: object
    own: frozenset[str]

    @property
    def values(self) -> dict[str, object]:
        """The object's attributes by name; writes to this dictionary change the object."""
        return vars(self.thing)


def holders(things: Mapping[str, object], parameters: Mapping[str, torch.Tensor]) -> list[AttributeHolder]:
    """All objects with attributes that a body may change, each once.

    Args:
        things: protected modules and other objects, by name.
        parameters: all protected parameters, by name.
    """
    packages = {_package(type(module)) for thing in things.values() for module in _modules(thing)}
    return list(_walk(things, parameters, packages - _LEFT_ALONE))


_LEFT_ALONE = OWN_PACKAGES | {"torch", "builtins"}


def _walk(
    things: Mapping[str, object], parameters: Mapping[str, torch.Tensor], packages: set[str]
) -> Iterator[AttributeHolder]:
    seen: set[int] = set()
    near: list[tuple[str, object]] = [*things.items(), *parameters.items()]
    while near:
        around: list[tuple[str, object]] = []
        for name, thing in near:
            if id(thing) in seen or len(seen) >= _MOST_HOLDERS:
                continue
            seen.add(id(thing))
            holder = _holder(name, thing, packages)
            if holder is not None:
                yield holder
            around += _held(name, thing, holder)
        near = around


def _holder(name: str, thing: object, packages: set[str]) -> AttributeHolder | None:
    if isinstance(thing, type | ModuleType | FunctionType | MethodType) or not hasattr(thing, "__dict__"):
        return None
    kind = type(thing)
    if isinstance(thing, torch.Tensor):  # the attributes of other kinds, such as DTensor, are the tensor's own data
        plain = kind in (torch.Tensor, nn.Parameter) and vars(thing)
        return AttributeHolder(name, thing, frozenset()) if plain else None
    if isinstance(thing, nn.Module):
        return None if _package(kind) in _LEFT_ALONE else AttributeHolder(name, thing, _MODULES_OWN)
    if not (is_scripts(kind) or _package(kind) in packages) or _package(kind) in _LEFT_ALONE:
        return None
    if any(isinstance(each, OF_THREADS) for each in vars(thing).values()):
        return None
    if isinstance(thing, torch.optim.Optimizer):
        return AttributeHolder(name, thing, _OPTIMIZERS_OWN | {key for key in vars(thing) if "hook" in key})
    return AttributeHolder(name, thing, frozenset())


def _held(name: str, thing: object, holder: AttributeHolder | None) -> Iterable[tuple[str, object]]:
    """Objects to which `thing` refers, and which may have attributes themselves."""
    if isinstance(thing, dict):
        return [(f"{name}[{key!r:.40}]", each) for key, each in _few(thing)]
    if isinstance(thing, list | tuple | set):
        return [(f"{name}[{at}]", each) for at, (_, each) in enumerate(_few(dict(enumerate(thing))))]
    if isinstance(thing, MethodType):
        return [(name, thing.__self__)]
    if isinstance(thing, partial):
        return [(name, thing.func), *((name, each) for each in thing.args), *thing.keywords.items()]
    if isinstance(thing, FunctionType):
        return [(name, cell.cell_contents) for _, cell in cells(thing)]
    found: list[tuple[str, object]] = []
    if isinstance(thing, nn.Module):
        found += ((f"{name}.{key}", each) for key, each in thing.named_children())
        found += ((name, getattr(thing, key, None)) for key in _HOOKS)
    if isinstance(thing, torch.Tensor):
        found += ((name, getattr(thing, key, None)) for key in _ON_TENSORS)
    if holder is not None:
        values = list(holder.values.items())
        leading = ((key, each) for key, each in values if key not in holder.own and not isinstance(each, _ENDS))
        found += ((f"{name}.{key}", each) for key, each in leading)
    return found


def _few(items: dict[object, object]) -> list[tuple[object, object]]:
    return list(items.items()) if len(items) <= MOST_ITEMS else []


def _modules(thing: object) -> Iterable[nn.Module]:
    return thing.modules() if isinstance(thing, nn.Module) else ()


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]
