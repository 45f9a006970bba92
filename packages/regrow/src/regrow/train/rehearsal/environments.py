"""Recognizes environments of reinforcement learning, and finds all that their steps change, generators included.

An environment has `reset`, and a `step` with an argument (an action); early stoppers may look the same, and matter as
much. All that it holds is looked at, even in objects of a library, since a vector of environments holds the script's
own.
"""

import inspect
import time
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import numpy as np
import torch
import xxhash
from torch import nn

from regrow.core.process.own_code import OWN_PACKAGES
from regrow.train.attributes.kept_values import Generator, position
from regrow.train.values.arrays import flat_bytes

_LEFT_ALONE = OWN_PACKAGES | {"torch", "builtins", "logging", "threading", "multiprocessing", "concurrent"}
_DEEP, _MOST, _WIDE, _BYTES = 40, 4_000, 2_000, 1 << 20
_OF_TORCH = torch.default_generator.get_state().numel()
_BORN = time.time(), time.monotonic()


def is_environment(thing: object) -> bool:
    """True if this looks like an environment."""
    kind = type(thing)
    if kind.__module__.partition(".")[0] in _LEFT_ALONE or isinstance(thing, nn.Module | torch.optim.Optimizer | type):
        return False
    step = getattr(kind, "step", None)
    if not (callable(getattr(kind, "reset", None)) and isinstance(step, FunctionType)):
        return False
    given = list(inspect.signature(step).parameters.values())[1:]
    return any(each.kind is not each.VAR_KEYWORD and each.default is each.empty for each in given)


def is_generator_state(thing: object) -> bool:
    """True for a value of `torch.get_rng_state()` or `numpy.random.get_state()`, which is not a plain value."""
    if isinstance(thing, torch.Tensor):
        return thing.dtype is torch.uint8 and thing.shape == (_OF_TORCH,) and thing.device.type == "cpu"
    return type(thing) is tuple and len(thing) == 5 and isinstance(thing[0], str) and thing[0] == "MT19937"


def look(environment: object) -> dict[str, object]:
    """A token for each object that an environment holds, by path."""
    return dict(_tokens(environment))


def difference(before: dict[str, object], after: dict[str, object]) -> str:
    """Path of a part that has changed, except readings of a clock; empty if there is none."""
    for path in [*after, *before]:
        one, other = before.get(path, _ABSENT), after.get(path, _ABSENT)
        if one != other and not (_is_clock(one) or _is_clock(other)):
            return path.removeprefix(".")
    return ""


_ABSENT = object()


def _tokens(start: object) -> Iterator[tuple[str, object]]:
    seen: set[int] = set()
    near: list[tuple[str, object]] = [("", start)]
    for _ in range(_DEEP):
        around: list[tuple[str, object]] = []
        for path, thing in near:
            if isinstance(thing, int | float | str | bytes | type(None)):
                yield path, thing if thing == thing else repr(thing)
                continue
            if id(thing) in seen or len(seen) > _MOST:
                continue
            seen.add(id(thing))
            if isinstance(thing, Generator):
                yield path, position(thing)
            elif isinstance(thing, np.ndarray | np.generic | torch.Tensor):
                yield path, array_token(np.asarray(thing) if isinstance(thing, np.generic) else thing)
            else:
                around += parts_of(path, thing)
        near = around


def parts_of(path: str, thing: object) -> Iterable[tuple[str, object]]:
    """Objects that a container or a Python object holds, by path."""
    if isinstance(thing, dict):
        return [(f"{path}[{key!r:.40}]", each) for key, each in list(thing.items())[:_WIDE]]
    if isinstance(thing, list | tuple) or type(thing).__name__ == "deque":
        return [(f"{path}[{at}]", each) for at, each in enumerate(list(thing)[:_WIDE])]  # type: ignore[call-overload]
    if isinstance(thing, set | frozenset):
        return [(f"{path}[{each!r:.40}]", True) for each in list(thing)[:_WIDE]]
    code = isinstance(thing, type | ModuleType | FunctionType | MethodType | BuiltinFunctionType | nn.Module)
    if code or type(thing).__module__.partition(".")[0] in _LEFT_ALONE or not hasattr(thing, "__dict__"):
        return ()
    return [(f"{path}.{key}", each) for key, each in list(vars(thing).items())]


def array_token(array: np.ndarray | torch.Tensor, most: int = _BYTES) -> object:
    """A token that differs once an array has changed; of an array of more than `most` bytes it covers little."""
    shape = tuple(array.shape)
    if isinstance(array, torch.Tensor):
        if array.layout is not torch.strided or array.is_meta or array.nbytes > most:
            return shape, array._version
        array = flat_bytes(array).numpy()
    elif array.dtype.hasobject or array.nbytes > most:
        return shape
    return shape, xxhash.xxh3_64_intdigest(np.ascontiguousarray(array).tobytes())


def _is_clock(value: object) -> bool:
    if type(value) is not float:
        return False
    return any(born - 60 <= value <= now for born, now in zip(_BORN, (time.time(), time.monotonic()), strict=True))
