"""Sort and name the objects that a script protects.

Tensors carry the names under which `torch.distributed.checkpoint` users know them: `model.<fqn>` for parameters and
buffers, `optim.<parameter fqn>.<key>` for optimizer state.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from regrow.comm.torch_private.internals import can_be_watched, compiled_module
from regrow.comm.torch_private.module_buffers import buffers_of
from regrow.core.errors import StateError, UsageError
from regrow.train.graphs.kinds import can_be_followed, says_its_state
from regrow.train.graphs.object_graph import ObjectGraph
from regrow.train.graphs.walk import own_state, put_own_state
from regrow.train.state.late_work import LateWork

RESERVED = "regrow"
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
RUNNING_STATISTICS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
"""Layers whose buffers change in a forward while they train."""


@runtime_checkable
class Stateful(Protocol):
    """Anything whose state can be read and loaded: a scheduler, a gradient scaler, an average."""

    def state_dict(self) -> object:
        """The state as nested containers of plain values and tensors."""
        ...

    def load_state_dict(self, state_dict: object) -> object:
        """Load a state."""
        ...


class BufferSlot(NamedTuple):
    """Place where a module keeps a buffer; the tensor in it may be replaced by another one."""

    name: str
    home: dict[str, torch.Tensor | None]
    key: str
    running: bool
    """True if kernels write the buffer without counting versions (batch norm's running statistics)."""


class ProtectedObjects(NamedTuple):
    """Everything that is protected, by name."""

    parameters: dict[str, torch.Tensor]
    """Full name to parameter, each parameter once."""
    buffers: list[BufferSlot]
    optimizers: dict[str, torch.optim.Optimizer]
    optimized: dict[str, dict[str, torch.Tensor]]
    """For each optimizer, its parameters by their short names."""
    objects: dict[str, Stateful]
    modules: dict[str, nn.Module]
    """Modules as the script gave them, with the wrappers around them."""
    generators: dict[str, torch.Generator | np.random.Generator]
    late: LateWork

    def groups(self, optimizer: str) -> list[list[str]]:
        """Short names of the parameters in each group of an optimizer. Raises `StateError` if a group has grown."""
        names = {id(parameter): short for short, parameter in self.optimized[optimizer].items()}
        try:
            return [[names[id(each)] for each in group["params"]] for group in self.optimizers[optimizer].param_groups]
        except KeyError as error:
            raise StateError(
                f"{optimizer} was given parameters after protect()", hint="call add_param_group() before protect()"
            ) from error

    def state_of(self, optimizer: str) -> dict[str, object]:
        """State of an optimizer by its parameters' short names. Raises `StateError` if it keeps state for others."""
        short = {id(parameter): short for short, parameter in self.optimized[optimizer].items()}
        state: dict[str, object] = {}
        for parameter, values in self.optimizers[optimizer].state.items():
            if id(parameter) not in short:
                raise StateError(f"{optimizer} keeps state for what is no parameter of its groups: {parameter!r:.80}")
            state[short[id(parameter)]] = values
        return state


class Protected(NamedTuple):
    """Arguments of one call of `protect`.

    Attributes:
        objects: named `model`, `optim`, `scheduler`, or by their class, with a number from the second on.
        named: objects under names that the script chose.
        part: prefix of all names, which distinguishes parts of the state that have the same name on different ranks.
    """

    objects: Sequence[object]
    named: Mapping[str, object]
    part: str = ""


class _ExtraState:
    """Adapts a module's own `get_extra_state` to `Stateful`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def state_dict(self) -> object:
        return self._module.get_extra_state()

    def load_state_dict(self, state_dict: object) -> None:
        self._module.set_extra_state(state_dict)


class _PlainValues:
    """Adapts the attributes of a `types.SimpleNamespace` to `Stateful`."""

    def __init__(self, values: SimpleNamespace) -> None:
        self._values = values

    def state_dict(self) -> object:
        return dict(vars(self._values))

    def load_state_dict(self, state_dict: object) -> None:
        vars(self._values).clear()
        vars(self._values).update(cast(dict[str, object], state_dict))


class _SaysItsState:
    """Adapts an object with `get_state` and `set_state` to `Stateful`."""

    def __init__(self, thing: object) -> None:
        self._thing = thing

    def state_dict(self) -> object:
        return own_state(self._thing)

    def load_state_dict(self, state_dict: object) -> None:
        put_own_state(self._thing, state_dict)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside DDP and `torch.compile`, whose names checkpoints use."""
    while True:
        inner = module.module if isinstance(module, DistributedDataParallel) else compiled_module(module)
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def roster(*calls: Protected) -> ProtectedObjects:
    """Sort and name the objects that the script protects, in one call or in several.

    Raises:
        UsageError: an object has no state that could be protected, or a name is not available.
        StateError: two tensors would have the same name.
    """
    modules: dict[str, nn.Module] = {}
    generators: dict[str, torch.Generator | np.random.Generator] = {}
    wrapped: dict[str, nn.Module] = {}
    optimizers: dict[str, torch.optim.Optimizer] = {}
    stateful: dict[str, Stateful] = {}
    namespaces: dict[str, dict[str, object]] = {}
    followed: dict[str, dict[str, object]] = {}
    taken: set[str] = set()
    for name, part, given in _each(calls):
        thing = unwrapped(given) if isinstance(given, nn.Module) else given
        _refuse(thing)
        chosen = _name(name, thing, taken)
        taken.add(chosen)
        chosen = f"{part}.{chosen}" if part else chosen
        if isinstance(thing, nn.Module) and isinstance(given, nn.Module):
            modules[chosen], wrapped[chosen] = thing, given
        elif isinstance(thing, torch.Generator | np.random.Generator):
            generators[chosen] = thing
        elif isinstance(thing, torch.optim.Optimizer):
            optimizers[chosen] = thing
        elif isinstance(thing, Stateful):
            stateful[chosen] = thing
        elif type(thing) is SimpleNamespace:
            stateful[chosen] = _PlainValues(thing)
            namespaces.setdefault(part, {})[chosen] = thing
        elif says_its_state(thing) and not isinstance(thing, np.random.RandomState):
            stateful[chosen] = _SaysItsState(thing)
        elif can_be_followed(thing):
            followed.setdefault(part, {})[chosen.removeprefix(f"{part}.")] = thing
        else:
            raise UsageError(
                f"protect() was given a {type(thing).__name__}, which has no state_dict() and load_state_dict()",
                hint="protect modules, optimizers, schedulers, random generators, types.SimpleNamespace and "
                "objects with these two methods, or of classes made in Python, such as environments",
            )
    stateful = _with_graphs(stateful, followed, namespaces)
    return _gather(modules, optimizers, stateful)._replace(modules=wrapped, generators=generators)


def _with_graphs(
    stateful: dict[str, Stateful],
    followed: Mapping[str, dict[str, object]],
    namespaces: Mapping[str, dict[str, object]],
) -> dict[str, Stateful]:
    """Combine the objects of a part that have no state of their own into one graph, since they may share objects.

    A `SimpleNamespace` of that part is followed with them, since it may share objects with them.
    """
    for part, roots in followed.items():
        beside = namespaces.get(part, {})
        stateful = {name: each for name, each in stateful.items() if name not in beside}
        roots = roots | {name.removeprefix(f"{part}."): each for name, each in beside.items()}
        name = "+".join(sorted(roots))
        stateful[f"{part}.{name}" if part else name] = ObjectGraph({at: roots[at] for at in sorted(roots)})
    return stateful


def _each(calls: Iterable[Protected]) -> Iterator[tuple[str | None, str, object]]:
    """Each protected object once: its chosen name or None, its part, and the object itself."""
    seen: set[int] = set()
    for call in calls:
        for name, given in [*((None, thing) for thing in call.objects), *call.named.items()]:
            inner = unwrapped(given) if isinstance(given, nn.Module) else given
            if id(inner) not in seen:
                seen.add(id(inner))
                yield name, call.part, given


def _refuse(thing: object) -> None:
    if isinstance(thing, torch.optim.Optimizer) and not can_be_watched(thing):
        inner = [name for name, each in vars(thing).items() if isinstance(each, torch.optim.Optimizer)]
        raise UsageError(
            f"a {type(thing).__name__} wraps an optimizer and takes no hooks, so its updates cannot be noticed",
            hint=f"protect what it wraps{f', its .{inner[0]}' if inner else ''}, and step as before",
        )
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(thing).__mro__):
        raise UsageError(
            "a ZeroRedundancyOptimizer (ZeRO-1) keeps a part of the optimizer's state on each rank, of which no other "
            "rank has a copy",
            hint="use the plain optimizer, or shard by FSDP2 (fully_shard)",
        )


def _name(name: str | None, thing: object, taken: set[str]) -> str:
    if name is not None:
        if name in taken or name == RESERVED or not name.isidentifier():
            raise UsageError(f"protect() cannot call a {type(thing).__name__} {name!r}: taken, reserved, or no name")
        return name
    stem = type(thing).__name__.lower()
    if isinstance(thing, nn.Module):
        stem = "model"
    elif isinstance(thing, torch.optim.Optimizer):
        stem = "optim"
    elif isinstance(thing, torch.optim.lr_scheduler.LRScheduler):
        stem = "scheduler"
    elif isinstance(thing, np.random.Generator):
        stem = "random"
    return next(free for free in _numbered(stem) if free not in taken)


def _numbered(stem: str) -> Iterable[str]:
    yield stem
    number = 1
    while True:
        yield f"{stem}{number}"
        number += 1


def _gather(
    modules: dict[str, nn.Module], optimizers: dict[str, torch.optim.Optimizer], stateful: dict[str, Stateful]
) -> ProtectedObjects:
    parameters: dict[str, torch.Tensor] = {}
    buffers: list[BufferSlot] = []
    objects = dict(stateful)
    for name, module in modules.items():
        known = {id(parameter) for parameter in parameters.values()}
        for fqn, parameter in module.named_parameters():
            if id(parameter) not in known:
                parameters[f"{name}.{_clean(fqn)}"] = parameter
        buffers += _buffers(name, module, {(id(slot.home), slot.key) for slot in buffers})
        for path, inner in module.named_modules():
            if type(inner).get_extra_state is not nn.Module.get_extra_state:
                objects[f"{name}.{_clean(path)}{'.' if path else ''}_extra_state"] = _ExtraState(inner)
    optimized = {name: _optimized(name, optimizer, parameters) for name, optimizer in optimizers.items()}
    names = [*parameters, *(slot.name for slot in buffers)]
    if len(names) != len(set(names)):
        twice = next(name for name in names if names.count(name) > 1)
        raise StateError(f"two tensors are called {twice}", hint="name the modules: protect(first=..., second=...)")
    return ProtectedObjects(parameters, buffers, optimizers, optimized, objects, {}, {}, LateWork())


def _clean(fqn: str) -> str:
    # The parameter names of compiled and checkpointed submodules contain their wrapper.
    for wrapper in _WRAPPERS:
        fqn = fqn.replace(wrapper, "")
    return fqn


def _buffers(name: str, module: nn.Module, seen: set[tuple[int, str]]) -> Iterable[BufferSlot]:
    tensors: set[int] = set()
    for path, owner in module.named_modules():
        home = buffers_of(owner)
        for key, tensor in home.items():
            if tensor is None or id(tensor) in tensors or (id(home), key) in seen:
                continue
            tensors.add(id(tensor))
            fqn = _clean(f"{path}.{key}" if path else key)
            yield BufferSlot(f"{name}.{fqn}", home, key, isinstance(owner, RUNNING_STATISTICS))


def _optimized(
    name: str, optimizer: torch.optim.Optimizer, parameters: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """An optimizer's parameters by short name; those of no protected module are added to `parameters`."""
    stem = f"{name.rpartition('.')[0]}.model.".removeprefix(".")
    # An optimizer may have a part of its own while its model is the same on all ranks, and belongs to no part.
    stems = [stem, "model."]
    names = {
        id(each): full.removeprefix(next((stem for stem in stems if full.startswith(stem)), ""))
        for full, each in parameters.items()
    }
    short: dict[str, torch.Tensor] = {}
    for number, group in enumerate(optimizer.param_groups):
        for at, parameter in enumerate(cast(list[torch.Tensor], group["params"])):
            fqn = names.get(id(parameter))
            if fqn is None:
                fqn = f"group{number}.{at}"
                parameters[f"{name}.{fqn}.parameter"] = parameter
            short[fqn] = parameter
    return short
