"""Reads and writes the variables of running functions and of modules."""

import inspect
import signal
import sys
import threading
from collections.abc import Iterable, Mapping
from types import FrameType, FunctionType, MethodType

from regrow.core.process.rewriting import WRITES_THROUGH, bind
from regrow.train.script.source import is_script, is_scripts

_FAST = inspect.CO_OPTIMIZED | inspect.CO_NEWLOCALS
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_OURS = 4
"""References to the copy in `f_locals`: the frame's, two here, the counter's. If more: `locals()` was called."""


def is_fast(frame: FrameType) -> bool:
    """True if the frame is a function's, whose variables `f_locals` returns as a copy before Python 3.13."""
    return frame.f_code.co_flags & _FAST == _FAST


class Namespace:
    """The variables of one function call, with those of enclosing functions that it uses; or those of a module.

    Args:
        name: the place, the same on all ranks.
        frame: the call's frame.
        module: True for the variables of its module instead.
    """

    def __init__(self, name: str, frame: FrameType, *, module: bool = False) -> None:
        self.name, self.frame, self.of_frames = name, frame, True
        self._values = frame.f_globals if module else None

    @property
    def owner(self) -> object:
        """Owner of the variables: two namespaces with the same owner are the same."""
        return self.frame if self._values is None else self._values

    def read(self) -> dict[str, object]:
        """The variables that are bound."""
        if self._values is not None:
            return dict(self._values)
        there = self.frame.f_locals
        values = dict(there)
        self._let_go(there)
        return values

    def write(self, values: Mapping[str, object]) -> None:
        """Bind variables."""
        if self._values is not None:
            self._values.update(values)
            return
        there = bind(self.frame, values)
        self._let_go(there)

    def _let_go(self, there: Mapping[str, object]) -> None:
        """Clear the copy that Python keeps with the frame, which would keep a step's tensors alive."""
        copied = not WRITES_THROUGH and is_fast(self.frame)
        if copied and isinstance(there, dict) and sys.getrefcount(there) <= _OURS:
            there.clear()


def namespaces(frames: Iterable[FrameType]) -> list[Namespace]:
    """Namespaces of frames and of their modules, each once, innermost first, without those of generators."""
    found: list[Namespace] = []
    seen: set[int] = set()
    names: dict[str, int] = {}

    def add(name: str, frame: FrameType, *, module: bool) -> None:
        again = names.get(name, 0)
        names[name] = again + 1
        found.append(Namespace(f"{name}#{again}" if again else name, frame, module=module))

    for frame in frames:
        code, variables = frame.f_code, frame.f_globals
        # A generator that passes steps on may count them before the step, or after.
        if is_fast(frame) and not code.co_flags & _GENERATORS:
            add(f"{code.co_qualname} ({variables.get('__name__')})", frame, module=False)
        if id(variables) not in seen:
            seen.add(id(variables))
            add(f"module {variables.get('__name__')}", frame, module=True)
    return found


def names_used(functions: Iterable[object], modules: Iterable[Mapping[str, object]]) -> set[str]:
    """Outer variables that functions of these modules use, directly or in functions that they call."""
    known = {id(module) for module in modules}
    used: set[str] = set()
    near = list(functions)
    while near:
        function = near.pop()
        function = function.__func__ if type(function) is MethodType else function
        if type(function) is not FunctionType or id(function.__globals__) not in known:
            continue
        names = {*function.__code__.co_names, *function.__code__.co_freevars} - used
        used |= names
        near += [function.__globals__[name] for name in names if name in function.__globals__]
    return used


def names_elsewhere(modules: Iterable[Mapping[str, object]]) -> set[str]:
    """Outer variables of functions that may run at any time: signal handlers and threads; not the threads' own."""
    modules, threads = list(modules), threading.enumerate()
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    targets = [getattr(thread, name, None) for thread in threads for name in ("_target", "function")]  # a timer's
    runs = [thread for thread in threads if type(thread).run is not threading.Thread.run]
    own = {name for thread in runs for name in vars(thread)}
    return names_used([*handlers, *targets], modules) | names_used([type(run).run for run in runs], modules) - own


def threads_call() -> bool:
    """True while threads live that may call methods of the script's objects: the script's own, and those of pools."""
    return any(map(_may_call, threading.enumerate()))


def _may_call(thread: threading.Thread) -> bool:
    target = getattr(thread, "_target", None) or getattr(thread, "function", None)  # a timer's
    target = getattr(target, "__func__", getattr(target, "func", target))
    pool = getattr(target, "__module__", "") == "concurrent.futures.thread" and not thread.name.startswith("regrow")
    return pool or is_scripts(type(thread)) or (type(target) is FunctionType and is_script(target.__code__.co_filename))
