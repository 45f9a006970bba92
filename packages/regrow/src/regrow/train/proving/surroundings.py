"""Finds unprotected state of a script, by the place where it is: counters, caches, clocks, generators, settings.

If a newcomer computes something other than a rank, a difference in this state is the likely cause. The search covers
the places where a script can keep it: variables of its running functions and modules, all they hold, the environment.
"""

import dis
import functools
import io
import itertools
import os
import random
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from regrow.core.process.own_code import is_own_name, own_folders
from regrow.train.attributes.kept_values import position
from regrow.train.graphs.kinds import slot_values
from regrow.train.proving import hidden
from regrow.train.proving.digesting import digest_array, digest_bytes, digest_tensor, digest_text
from regrow.train.proving.trace import SeenAround
from regrow.train.script.source import is_scripts, modules_of_script

_DEEP = 6
_MOST = 20_000
_WIDE = 256
_SHORT = 60
_SECONDS = 0.5
"""Longest time of a search."""
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
_OF_OURS = frozenset({"REGROW_WORKER_ENV", "RANK", "LOCAL_RANK", "_"})
"""Environment variables that differ between workers, or that regrow sets when a worker gets its rank."""
_STARTED = time.time(), time.monotonic()
Visit = tuple[str, object, int]


def surroundings(frames: Iterable[FrameType], left_out: Iterable[object]) -> dict[str, SeenAround]:
    """The script's unprotected state as it is now.

    Args:
        frames: frames of the script, innermost first.
        left_out: protected objects, which are the same on all ranks with the same state.
    """
    found: dict[str, SeenAround] = {
        f"os.environ[{key!r}]": SeenAround(digest_text(value), "environment", repr(value)[:_SHORT])
        for key, value in os.environ.items()
        if key not in _OF_OURS
    }
    found |= dict(hidden.settings())
    seen = {id(each) for each in left_out}
    until = time.thread_time() + _SECONDS
    ahead: deque[Visit] = deque()
    for frame in frames:
        ahead.extend((name, value, 0) for name, value in list(frame.f_locals.items()))
    for module in modules_of_script():
        prefix = "" if module.__name__ == "__main__" else f"{module.__name__}."
        ahead.extend((f"{prefix}{key}", value, 0) for key, value in list(vars(module).items()))
    while ahead and len(found) < _MOST and time.thread_time() < until:
        path, value, deep = ahead.popleft()
        if path.startswith("__") or path in found:
            continue
        entry = _entry(value)
        if entry is not None:
            found[path] = entry
        if isinstance(value, ModuleType):
            if id(value) not in seen and not is_scripts(value):
                seen.add(id(value))
                found |= dict(hidden.put_in_place(path, value))
            continue
        if deep < _DEEP and not isinstance(value, _ATOMS) and id(value) not in seen:
            seen.add(id(value))
            ahead.extend((name, each, deep + 1) for name, each in _held(path, value))
    return found


_CACHED = type(functools.lru_cache(lambda: None))
_ATOMS = (int, float, complex, str, bytes, bool, type(None))


def _entry(value: object) -> SeenAround | None:
    """Digest of a value itself; None if the value only holds others."""
    try:
        return _look(value)
    except Exception:  # noqa: BLE001  a script's objects may raise anything when they are looked at
        return None


def _look(value: object) -> SeenAround | None:
    if isinstance(value, _CACHED):
        entries = value.cache_info().currsize
        return SeenAround(digest_text(str(entries)), "memo", f"{entries} entries")
    match value:
        case bool() | None:
            return SeenAround(digest_text(repr(value)), "setting", repr(value))
        case float() | int() if _is_clock(value):
            return SeenAround(digest_text(repr(value)), "clock", repr(value))
        case int():
            return SeenAround(digest_text(repr(value)[:1000]), "count", repr(value)[:_SHORT])
        case float() | complex() | np.number():
            return SeenAround(digest_text(repr(value)), "number", repr(value)[:_SHORT])
        case str() | bytes():
            return SeenAround(digest_text(repr(value)), "text", repr(value)[:_SHORT])
        case torch.Tensor():
            return SeenAround(digest_tensor(value), "tensor", str(value.item())[:_SHORT] if value.numel() == 1 else "")
        case np.ndarray():
            return SeenAround(digest_array(value), "tensor", "")
        case torch.Generator() | np.random.Generator() | np.random.RandomState() | random.Random():
            return SeenAround(digest_bytes(position(value)), "generator")
        case itertools.count():
            return SeenAround(digest_text(repr(value)), "count", repr(value)[:_SHORT])
        case dict() | list() | set() | deque() | tuple():
            kind = "cache" if isinstance(value, dict) else "list"
            tail = [repr(each) for each in itertools.islice(reversed(list(value)), 8) if isinstance(each, _ATOMS)]
            return SeenAround(digest_text(f"{len(value)}|{tail}"), kind, f"{len(value)} entries")
    return hidden.look(value)


def _is_clock(value: float) -> bool:
    """True if this may be a clock's reading since this process began, in seconds, milliseconds or nanoseconds."""
    now = time.time(), time.monotonic()
    number = float(value) if abs(value) < 1e300 else 0.0
    within = [(since - 3600, until) for since, until in zip(_STARTED, now, strict=True)]
    return number > 1000 and any(
        since <= each <= until for since, until in within for each in (number, number / 1e3, number / 1e9)
    )


def _held(path: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for at, (key, each) in enumerate(itertools.islice(list(value.items()), _WIDE)):
            # The `repr` of most other keys, such as weak references, contains addresses.
            plain = isinstance(key, str | int | float | tuple)
            yield f"{path}[{key!r:.40}]" if plain else f"{path}[{type(key).__name__} {at}]", each
        return
    if isinstance(value, list | tuple | deque):
        for at, each in enumerate(itertools.islice(list(value), _WIDE)):
            yield f"{path}[{at}]", each
        return
    if isinstance(value, MethodType):
        yield f"{path}.__self__", value.__self__
        return
    if isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            try:
                yield f"{path}().{name}", cell.cell_contents
            except ValueError:
                continue
        for at, each in enumerate(value.__defaults__ or ()):
            yield f"{path}().default{at}", each
        yield from ((f"{path}.{name}", each) for name, each in vars(value).items())
        return
    if isinstance(value, functools.partial):
        yield from [(f"{path}.func", value.func), (f"{path}.args", value.args), (f"{path}.keywords", value.keywords)]
        return
    if isinstance(value, GeneratorType):
        if value.gi_frame is not None:
            yield from ((f"{path}.{name}", each) for name, each in list(value.gi_frame.f_locals.items()))
        return
    if isinstance(value, ModuleType | BuiltinFunctionType | CodeType | FrameType | io.IOBase):
        return
    if isinstance(value, type):
        if is_scripts(value):
            yield from ((f"{path}.{name}", each) for name, each in list(vars(value).items()) if name[:2] != "__")
        return
    if is_own_name(type(value).__module__):
        return
    wrapped = getattr(value, "__wrapped__", None)
    if isinstance(wrapped, FunctionType):
        yield f"{path}.__wrapped__", wrapped
    yield from _attributes(path, value)


def _attributes(path: str, value: object) -> Iterator[tuple[str, object]]:
    yield from ((f"{path}.{name}", each) for name, each in slot_values(value).items())
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict):
        return
    for name, each in list(attributes.items()):
        if not isinstance(value, nn.Module) or name not in _OF_MODULES:
            yield f"{path}.{name}", each
    if isinstance(value, nn.Module):
        for kind in ("_modules", "_buffers", "_parameters"):
            yield from ((f"{path}.{name}", each) for name, each in list(attributes.get(kind, {}).items()))
    if is_scripts(type(value)):
        yield from (
            (f"{path}.{name}", each)
            for name, each in list(vars(type(value)).items())
            if name[:2] != "__" and name not in attributes
        )


def names_read(code: CodeType, *, after: int = -1) -> set[str]:
    """Variables that this code reads before it binds them, and, with a dot in front, attributes.

    Args:
        code: code of a function or a module.
        after: only instructions after this offset count.
    """
    read: set[str] = set()
    bound = set() if after >= 0 else set(code.co_varnames)  # a call's own variables come and go with it
    for each in dis.get_instructions(code):
        name = each.argval
        if each.offset <= after or not isinstance(name, str):
            continue
        if each.opname in _OF_ATTRIBUTES:
            read.add(f".{name}")
        elif each.opname.startswith("STORE_"):
            bound.add(name)
        elif each.opname.startswith("LOAD_") and name not in bound:
            read.add(name)
    return read


_OF_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR"})


class BodyListener:
    """Records which code a body runs, and its calls whose results differ at each call or in each process.

    Meanwhile it uses Python's profile function of this thread.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.called: dict[str, str] = {}
        self._codes: set[CodeType] = set()
        self._before: Any = None

    def start(self, frames: Iterable[FrameType]) -> None:
        """Listen from now on. `frames`: the running frames of the script."""
        for frame in frames:
            self._takes(frame.f_code, after=frame.f_lasti)
        self._before = sys.getprofile()
        sys.setprofile(self._trace)

    def stop(self) -> None:
        """Stop listening."""
        sys.setprofile(self._before)

    def reads(self) -> tuple[list[str], list[str]]:
        """Names that the body has used, and the calls whose results differ."""
        return sorted(self.names), list(self.called.values())

    def _takes(self, code: CodeType, *, after: int = -1) -> None:
        self._codes.add(code)
        if not code.co_filename.startswith(_NOT_LOOKED_AT):
            self.names |= names_read(code, after=after)

    def _trace(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event == "call" and code not in self._codes:
            self._takes(code)
        elif event == "c_call" and arg in _FICKLE and not code.co_filename.startswith(_NOT_LOOKED_AT):
            name = _FICKLE[arg]
            self.called.setdefault(name, f"{name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})")


_NOT_LOOKED_AT = (os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), ""), *own_folders())
_FICKLE: dict[object, str] = {
    time.time: "time.time()",
    time.time_ns: "time.time_ns()",
    time.monotonic: "time.monotonic()",
    time.monotonic_ns: "time.monotonic_ns()",
    time.perf_counter: "time.perf_counter()",
    time.perf_counter_ns: "time.perf_counter_ns()",
    time.process_time: "time.process_time()",
    os.getpid: "os.getpid()",
    os.getppid: "os.getppid()",
    os.urandom: "os.urandom()",
    open: "open()",
    io.open_code: "open()",
    id: "id()",
    hash: "hash()",
}
