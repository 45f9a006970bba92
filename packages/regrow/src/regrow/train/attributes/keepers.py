"""Finds things around a script's loop that hold plain values: objects, classes, functions, modules, and the process.

These values may decide what a step computes, so they are restored with the steps, like the script's plain variables.
See decision 0118.
"""

import contextlib
import gc
import threading
from argparse import Namespace
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextvars import ContextVar
from enum import EnumMeta
from functools import partial
from types import BuiltinMethodType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType, SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from regrow.core.process.own_code import OWN_PACKAGES, is_own_name
from regrow.train.attributes.holders import OF_THREADS
from regrow.train.attributes.kept_values import Attributes, Generator, ProcessSettings, cells, nbytes_of
from regrow.train.graphs.kinds import OF_LIBRARIES, slot_values
from regrow.train.script.namespaces import threads_call
from regrow.train.script.source import is_script, is_scripts, modules_of_script

_DEEP, _WIDE, _MOST, _FOLLOWED = 4, 256, 5_000, 256
_LEFT_ALONE = OWN_PACKAGES | {
    *("torch", "builtins", "numpy", "accelerate", "transformers", "lightning", "pytorch_lightning", "trl")
}
_BYTES = 16 << 20
"""Most bytes of arrays in all followed things together, as every step looks at them."""
Variables = Mapping[str, object]
_PLAIN_KINDS = (SimpleNamespace, Namespace, threading.local)
_NO_HOLDERS = (int, float, str, bytes, torch.Tensor)
_VALUES = (int, float, str, dict, list, set)
_CONSTANTS = (int, float, str, bytes, type(None))
_NO_ARRAYS = (ModuleType, ContextVar, Dataset)
_NOT_FOLLOWED = (nn.Module, torch.optim.Optimizer, DataLoader, Sampler, IterableDataset, MethodType, partial)


class Keepers:
    """Finds things around a loop that hold plain values or protected objects, and protected objects but modules.

    Args:
        frames: frames of the script, innermost first.
        protected: protected objects as the script gave them, with their wrappers and the objects in these.
        loader: the script's loader, which is set to the position of each step by other means.
        known: ids of other objects that are restored by other means.
        around: False: find only protected objects and their holders.
    """

    def __init__(
        self,
        frames: Iterable[FrameType],
        protected: Collection[object],
        loader: object = None,
        known: Collection[int] = (),
        *,
        around: bool = True,
    ) -> None:
        modules = [each for each in protected if isinstance(each, nn.Module)]
        self._protected, self._around = {id(each) for each in protected}, around
        parts = {id(part) for each in modules for part in (*each.modules(), *each.parameters())}
        self._all_protected = self._protected | parts
        self._inside = parts | set(known) | {id(frame.f_globals) for frame in frames}
        self._of_loader = _all_in(loader)
        self.left_out = ""  # for people: the things beyond the bounds

    def left_over(self, thing: object) -> list[tuple[str, object]]:
        """Attributes of an object of the script's own, unless it is of the loader, of a thread or protected."""
        given = id(thing) in self._inside or id(thing) in self._of_loader
        return [] if given or not _is_own(thing) else _attributes("", thing)

    def find(self, variables: Iterable[Variables], roots: Collection[str] | None = None) -> list[Attributes]:
        """Things to which these variables and the script's modules lead; with `roots`, only variables so named."""
        found: list[Attributes] = [ProcessSettings()] if self._around and roots is None else []
        names, room = Counter[str](), _BYTES
        for name, thing in _reachable(variables, roots):
            if id(thing) in self._inside:
                continue
            with contextlib.suppress(Exception):  # odd objects run code, and may raise, when they are inspected
                if isinstance(thing, ModuleType) and id(vars(thing)) in self._inside:
                    continue
                given = id(thing) in self._protected
                holds = _counts(thing) and (given or any(id(each) in self._protected for each in _within(thing)))
                mine = self._around and id(thing) not in self._of_loader and _is_followed(thing)
                if mine and not holds and len(found) >= _FOLLOWED:
                    if not isinstance(thing, ModuleType | type):
                        self.left_out = f"all beyond {_FOLLOWED} things"
                elif holds or mine:
                    path = f"{name}: {type(thing).__qualname__}" if name[-1:] == "]" else name  # lists differ by rank
                    names[path] += 1
                    path = f"{path}#{names[path]}" if names[path] > 1 else path
                    carries = not (holds or isinstance(thing, _NO_ARRAYS) or _reaches(thing, self._all_protected))
                    carries = carries and (room := room - sum(map(nbytes_of, _within(thing)))) >= 0
                    each = Attributes(path, thing, holds=holds and not given, carries=carries)
                    values = each.read().values()
                    if not isinstance(thing, ModuleType | type) or any(isinstance(value, _VALUES) for value in values):
                        found.append(each)
        return found


def _is_followed(thing: object) -> bool:
    """True for the script's own things, except those that hold a thread or a pool, and those that read data."""
    if isinstance(thing, ModuleType):
        return True
    if isinstance(thing, type):
        return not isinstance(thing, EnumMeta)
    if isinstance(thing, FunctionType):
        named = [each for each in (thing.__kwdefaults__ or {}).values() if not isinstance(each, _CONSTANTS)]
        keeps = thing.__closure__, thing.__defaults__, named, vars(thing)
        return is_script(thing.__code__.co_filename) and (any(keeps) or thing.__name__ in thing.__code__.co_names)
    if isinstance(thing, Generator | ContextVar):
        return not any(thing is each for each in OF_LIBRARIES)
    locks = any(issubclass(type(each), OF_THREADS) for _, each in _attributes("", thing)) if _is_own(thing) else None
    return locks is False or (locks is True and not threads_call())


def _is_own(thing: object) -> bool:
    kind = type(thing)
    if issubclass(kind, (*_NOT_FOLLOWED, *OF_THREADS)) or (kind not in _PLAIN_KINDS and not is_scripts(kind)):
        return False
    inside = [type(each) for each in dict(_attributes("", thing)).values()]
    of_pool = (each for each in inside if hasattr(each, "submit") and not is_scripts(each))
    return not (any(issubclass(each, (threading.Thread, Executor)) for each in inside) or any(of_pool))


def _counts(thing: object) -> bool:
    if isinstance(thing, type | ModuleType | dict | list | tuple | set) or not hasattr(thing, "__dict__"):
        return False
    packages = {kind.__module__.partition(".")[0] for kind in type(thing).__mro__}
    own = type(thing).__module__.partition(".")[0] not in _LEFT_ALONE
    return own and packages.isdisjoint(_LEFT_ALONE - {"torch", "builtins"})


def _within(thing: object) -> Iterator[object]:
    for _, each in _attributes("", thing):
        yield each
        yield from (inner for _, inner in _held("", each) if issubclass(type(each), dict | list | tuple))


def _reaches(thing: object, protected: Collection[int]) -> bool:
    """True if `thing` leads to one of these objects, given by their ids, or to more objects than can be searched."""
    near, seen = [thing], set[int]()
    while near and len(seen) < _MOST:
        near = [each for each in near if id(each) not in seen and type(each) not in _NO_HOLDERS]
        seen.update(map(id, near))
        if any(id(each) in protected for each in near):
            return True
        near = [inner for each in near for inner in _all_of(each) if not issubclass(type(inner), ModuleType)]
    return bool(near)


def _all_of(thing: object) -> Iterable[object]:
    if issubclass(type(thing), nn.Module):
        return [*cast(nn.Module, thing).modules(), *cast(nn.Module, thing).parameters()]
    if type(thing) in (list, tuple, set, frozenset, deque):
        return cast(Iterable[object], thing)
    if issubclass(type(thing), dict):
        return dict.values(cast(dict[object, object], thing))
    return [each for _, each in _held("", thing) if each is not type(thing)]


def _reachable(variables: Iterable[Variables], roots: Collection[str] | None) -> Iterator[tuple[str, object]]:
    """Things reached from variables of the script's calls, nearest first, then those of its modules, often many."""
    seen: set[int] = set()
    near = [each for values in variables for each in values.items() if roots is None or each[0] in roots]
    yield from _walk(near, seen)
    if roots is None:
        yield from _walk([(f"module {module.__name__}", module) for module in modules_of_script()], seen)


def _walk(near: list[tuple[str, object]], seen: set[int]) -> Iterator[tuple[str, object]]:
    for _ in range(_DEEP):
        around: list[tuple[str, object]] = []
        for name, thing in near:
            if id(thing) in seen or len(seen) > _MOST or issubclass(type(thing), _NO_HOLDERS):
                continue
            seen.add(id(thing))
            if not issubclass(type(thing), ModuleType | type) or is_scripts(cast(ModuleType, thing)):
                yield name, thing
                around += _held(name, thing)
        near = around


def _held(name: str, thing: object) -> Iterable[tuple[str, object]]:
    try:
        return _parts(name, thing)
    except Exception:  # noqa: BLE001  of odd things, which run code where they are looked at
        return ()


def _parts(name: str, thing: object) -> Iterable[tuple[str, object]]:
    if issubclass(type(thing), dict) and dict.__len__(cast(dict[object, object], thing)) <= _WIDE:
        items = list(dict.items(cast(dict[object, object], thing)))
        shown = [repr(key) if isinstance(key, str | int) else f"#{at}" for at, (key, _) in enumerate(items)]
        return [(f"{name}[{text:.40}]", each) for text, (_, each) in zip(shown, items, strict=True)]
    if issubclass(type(thing), list | tuple):
        base = list if issubclass(type(thing), list) else tuple
        values = cast(Any, base).__getitem__(thing, slice(_WIDE + 1))
        return [(f"{name}[{at}]", each) for at, each in enumerate(values)] if len(values) <= _WIDE else ()
    if isinstance(thing, FunctionType):
        inner = getattr(thing, "__wrapped__", None)
        mine = is_script(thing.__code__.co_filename)
        return [(f"{name}.{key}", each.cell_contents) for key, each in cells(thing)] + [(name, inner)] if mine else ()
    if isinstance(thing, MethodType | BuiltinMethodType):
        return [(name, thing.__self__)]
    if isinstance(thing, partial):
        return [(name, each) for each in (thing.func, *thing.args, *thing.keywords.values())]
    if isinstance(thing, ModuleType | type) or (
        (_counts(thing) or isinstance(thing, LRScheduler)) and not isinstance(thing, nn.Module)
    ):
        kind = [(f"class {type(thing).__qualname__}", type(thing))]
        return [*_attributes(name, thing), *kind]
    return ()


def _attributes(name: str, thing: object) -> list[tuple[str, object]]:
    try:
        plain = dict(getattr(thing, "__dict__", {}))
    except Exception:  # noqa: BLE001  as in `_held`
        plain = {}
    return [(f"{name}.{key}", each) for key, each in {**plain, **slot_values(thing)}.items()]


def _all_in(loader: object) -> set[int]:
    """Ids of the objects that decide the order of a loader's data, and of all objects that they hold."""
    near, seen = [loader] if hasattr(type(loader), "__iter__") else [], set[int]()
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        near = [loader.sampler, loader.batch_sampler, loader.generator]
        around = [*_read_by(loader.dataset), *(each for _, each in _attributes("", loader.dataset))]
        near += [each for each in around if isinstance(each, Generator)]
    while near and len(seen) < _MOST:
        near = [each for each in near if id(each) not in seen and not _is_shared(each)]
        seen.update(map(id, near))
        near = [
            *(inner for each in near for _, inner in (*_held("", each), *_attributes("", each))),
            *(inner for each in near for inner in _read_by(each)),
        ]
    return seen


def _read_by(thing: object) -> list[object]:
    """Things that the code of an iterator, function or object reads: a script's stream may draw from a global one."""
    kind, codes = type(thing), list[FunctionType]()
    if issubclass(kind, GeneratorType):
        frame = cast(Any, thing).gi_frame
        names = frame.f_code.co_names if frame is not None else ()
        around = [*frame.f_locals.values()] if frame is not None else []
        return around + [frame.f_globals[name] for name in names if name in frame.f_globals]
    if issubclass(kind, FunctionType):
        codes = [cast(FunctionType, thing)]
    elif is_scripts(kind):
        codes = [each for each in vars(kind).values() if isinstance(each, FunctionType)]
    elif hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools"):
        return gc.get_referents(thing)
    own = [each for each in codes if is_script(each.__code__.co_filename)]
    return [each.__globals__[name] for each in own for name in each.__code__.co_names if name in each.__globals__]


def _is_shared(thing: object) -> bool:
    """True for things that the loop may change as well: options, a model, a map-style data set made harder."""
    kind = type(thing)
    data = issubclass(kind, Dataset) and not issubclass(kind, IterableDataset)
    return data or issubclass(kind, (type, ModuleType, nn.Module, *_PLAIN_KINDS)) or is_own_name(kind.__module__)
