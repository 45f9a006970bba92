"""Reads and writes the plain values of one thing around a script's loop, whatever kind of thing it is."""

import contextlib
import inspect
import os
import random
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from types import CellType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from regrow.hydration.codec import decode, encode
from regrow.train.graphs.kinds import slot_values

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
LARGEST_ARRAY = 8 << 20
_MODULES_OWN, _VALUE = frozenset(vars(nn.Module())), "value"


class Attributes:
    """The plain attributes of one thing, as variables under a name that is the same on all ranks.

    Args:
        name: expression by which the script reaches the thing.
        thing: an object, a class, a function, a module, a generator, a context variable.
        holds: True if the thing holds protected objects.
        carries: True if its arrays count as plain values.
    """

    def __init__(self, name: str, thing: object, *, holds: bool = False, carries: bool = False) -> None:
        self.name, self.holds, self.carries = f"object {name}", holds, carries
        self.of_frames = isinstance(thing, FunctionType | ModuleType)
        self.root = re.split(r"\W", name, maxsplit=1)[0]
        """Name of the script's variable that leads to the thing."""
        self._variable = name if self.root == name else ""
        self._thing: Callable[[], object]
        try:
            self._thing = weakref.ref(thing)
        except TypeError:  # things of this kind cannot be referenced weakly
            self._thing = lambda: thing
        self._is_simple = not isinstance(thing, nn.Module | FunctionType | Generator | ContextVar) and not any(
            "__slots__" in vars(kind) for kind in type(thing).__mro__
        )

    @property
    def alive(self) -> bool:
        """True while the script still has the object."""
        return self._thing() is not None

    def is_present(self, variables: Mapping[str, object]) -> bool:
        """True while the thing exists, and its variable does not hold another thing of the same kind."""
        thing = self._thing()
        there = variables.get(self._variable, thing)
        return thing is not None and (there is thing or type(there) is not type(thing))

    def is_in(self, things: Mapping[int, object]) -> bool:
        """True if this thing is among `things`, by id."""
        return id(self._thing()) in things

    def read(self) -> dict[str, object]:
        """The thing's plain attributes by name; empty if the thing no longer exists."""
        thing = self._thing()
        if thing is None:
            return {}
        if self._is_simple:
            return dict(cast(Mapping[str, object], getattr(thing, "__dict__", {})))
        if isinstance(thing, Generator):
            return {_VALUE: position(thing)}
        if isinstance(thing, ContextVar):
            try:
                return {_VALUE: thing.get()}
            except LookupError:
                return {}
        there = dict(getattr(thing, "__dict__", {}))  # copied at once, since another thread may add to it
        values = {key: value for key, value in there.items() if key not in _MODULES_OWN}
        if isinstance(thing, FunctionType):
            values |= {key: cell.cell_contents for key, cell in cells(thing)}
            defaults = [*enumerate(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).items()]
            values |= {f"default {at}": each for at, each in defaults}
        return values | slot_values(thing)

    def write(self, values: Mapping[str, object]) -> None:
        """Set these attributes directly, without the object's own `__setattr__`."""
        thing = self._thing()
        if isinstance(thing, Generator):
            _go_to(thing, values[_VALUE])
        elif isinstance(thing, ContextVar):
            thing.set(values[_VALUE])
        elif isinstance(thing, type):
            for key, value in values.items():
                type.__setattr__(thing, key, value)
        elif thing is not None:
            inside = dict(cells(thing)) if isinstance(thing, FunctionType) else {}
            for key, value in values.items():
                member = inspect.getattr_static(type(thing), key, None)
                if key in inside:
                    inside[key].cell_contents = value
                elif isinstance(member, MemberDescriptorType):
                    member.__set__(thing, value)
                elif not key.startswith("default ") and hasattr(thing, "__dict__"):
                    vars(thing)[key] = value  # containers among the defaults were changed in place


def nbytes_of(value: object) -> int:
    """Bytes of an array; 0 for other values, and for arrays that are sparse or too large to compare in each step."""
    dense = type(value) is np.ndarray or (type(value) is torch.Tensor and value.layout is torch.strided)
    nbytes = cast(np.ndarray, value).nbytes if dense else 0
    return nbytes if nbytes <= LARGEST_ARRAY else 0


def cells(function: FunctionType) -> Iterator[tuple[str, CellType]]:
    """Variables of enclosing functions that a function uses, by name; only those that are bound."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            cell.cell_contents  # noqa: B018
        except ValueError:
            continue
        yield f"{name}()", cell


def state_of(generator: Generator) -> object:
    """State of a random generator, in its own format."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def position(generator: Generator) -> bytes:
    """State of a random generator as bytes."""
    state = state_of(generator)
    return encode(state.numpy() if isinstance(state, torch.Tensor) else state)


def _go_to(generator: Generator, position: object) -> None:
    state = cast(Any, decode(cast(bytes, position)))
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(cast(Any, torch.tensor(state) if isinstance(generator, torch.Generator) else state))


def _folder() -> str | None:
    try:
        return sys.intern(os.readlink("/proc/self/cwd"))
    except OSError:
        return None


_OF_WORKERS = ("RANK", "WORLD_SIZE", "MASTER_", "REGROW_", "TORCHELASTIC_", "CUDA_VISIBLE")


class ProcessSettings(Attributes):
    """Settings of the process that a script may change between its steps: those of torch, and the environment."""

    def __init__(self) -> None:
        super().__init__("the process", sys)
        self.of_frames = False
        self._raw: dict[bytes, bytes] | None = None
        self._environment: dict[str, object] = {}

    def read(self) -> dict[str, object]:
        """All settings by name; a setting that has not changed is the same object as before."""
        raw = cast(Any, os.environ)._data  # noqa: SLF001 - its public views decode every variable each time
        if raw != self._raw:
            self._raw = dict(raw)
            self._environment = {
                sys.intern(f"env {key}"): value
                for key, value in os.environ.items()
                if not any(map(key.__contains__, _OF_WORKERS))
            }
        return self._environment | {"sys.path": sys.path} | {name: read() for name, (read, _) in _SETTINGS.items()}

    def write(self, values: Mapping[str, object]) -> None:
        """Set these settings."""
        for name, value in values.items():
            if name.startswith("env "):
                os.environ[name[4:]] = cast(str, value)
            elif name in _SETTINGS:
                with contextlib.suppress(OSError):  # the folder may not exist on this node
                    _SETTINGS[name][1](value)


_SETTINGS: dict[str, tuple[Callable[[], object], Callable[[Any], object]]] = {
    "dtype": (
        lambda: sys.intern(str(torch.get_default_dtype())),
        lambda name: torch.set_default_dtype(getattr(torch, name[6:])),
    ),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "deterministic": (
        lambda: (
            2 * torch.are_deterministic_algorithms_enabled() + torch.is_deterministic_algorithms_warn_only_enabled()
        ),
        lambda on: torch.use_deterministic_algorithms(on >= 2, warn_only=bool(on % 2)),
    ),
    "folder": (lambda: _folder(), lambda path: os.chdir(path or ".")),
}
"""Reader and writer of each setting. The reader returns the same object until the setting changes."""
