"""Changes to objects of a script: a frame's next line and variables, the class of an object. See decision 0110.

No other file sets `__class__`, `f_lineno` or `f_trace`, installs a trace function, or binds variables of a frame; a
test enforces that. Each change is requested by another module, with its reason.
"""

import ctypes
import inspect
import os
import sys
import warnings
from collections.abc import Callable, ItemsView, KeysView, Mapping
from types import FrameType
from typing import Any, NamedTuple

WRITES_THROUGH = sys.version_info >= (3, 13)
"""True if `frame.f_locals` of a function is a view of its variables (PEP 667) instead of a copy."""


def bind(frame: FrameType, values: Mapping[str, object]) -> Mapping[str, object]:
    """Bind variables of a running call; returns the `frame.f_locals` that was used for it."""
    there = frame.f_locals
    there.update(values)
    if not WRITES_THROUGH and frame.f_code.co_flags & inspect.CO_NEWLOCALS:
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
    return there


def change_class(thing: object, kind: type) -> None:
    """Change the class of an existing object, which the script and libraries may already hold."""
    thing.__class__ = kind


class Turn(NamedTuple):
    """Position of a loop in its present iteration: the lines that the trace function compares."""

    frame: FrameType
    first: int
    """First line of the loop's body."""
    through: int
    """Last line of the statement of the body that is running."""
    last: int


def skip_to_next(turn: Turn, ask: Callable[[], bool]) -> None:
    """After the present statement, begin the loop's body anew, once `ask` has prepared the next iteration.

    If that is impossible, or `ask` returns False, the loop goes on as it is. Python lets only a trace function move a
    frame to another line; a tracer that is already installed goes on tracing the frame afterwards.
    """
    frame, traced, tracing = turn.frame, turn.frame.f_trace, sys.gettrace()

    def follow(_: FrameType, event: str, __: object) -> Callable[..., Any] | None:
        line = frame.f_lineno
        if event != "return" and (event != "line" or turn.first <= line <= turn.through):
            return follow
        try:
            if event == "line" and turn.through < line <= turn.last and _go(frame, turn.first) and not ask():
                _go(frame, line)
        finally:
            frame.f_trace = traced
            sys.settrace(tracing)
            # Python 3.11 and 3.12 write this copy of the variables back to the frame, so it must be a fresh one.
            frame.f_locals  # noqa: B018
        return traced

    frame.f_trace = follow
    sys.settrace(lambda *_: None)


def _go(frame: FrameType, line: int) -> bool:
    with warnings.catch_warnings():
        # From Python 3.12 on, variables without a value get None, with a warning.
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            frame.f_lineno = line  # type: ignore[misc]
        except ValueError:
            return False
    return True


_watched: frozenset[str] = frozenset()
_on_read: Callable[[str], None] | None = None
_in_a_row: list[str] = []
"""Names of the variables that a copy of the whole environment reads next, in reverse order."""


class _WatchedEnvironment(os._Environ):  # type: ignore[type-arg]
    """`os.environ` while reads of single variables are watched.

    A copy of the whole environment, for a subprocess or a log, does not count as a read of a variable.
    """

    def __getitem__(self, key: str) -> str:
        if _in_a_row and _in_a_row[-1] == key:
            _in_a_row.pop()
        else:
            _in_a_row.clear()
            if key in _watched and _on_read is not None:
                _on_read(key)
        value: str = super().__getitem__(key)
        return value

    def __contains__(self, key: object) -> bool:
        # A variable exists on all ranks or on none, so this does not read its value.
        return isinstance(key, str) and self.encodekey(key) in self._data  # type: ignore[attr-defined]

    def keys(self) -> KeysView[str]:
        # dict() and ** call this, and then read each variable in this order.
        _in_a_row[:] = reversed(list(super().__iter__()))
        return dict.fromkeys(super().__iter__()).keys()

    def items(self) -> ItemsView[str, str]:
        return self.copy().items()

    def copy(self) -> dict[str, str]:
        return {key: super(_WatchedEnvironment, self).__getitem__(key) for key in super().__iter__()}

    def __or__(self, other: Mapping[str, str]) -> dict[str, str]:  # type: ignore[override]
        return self.copy() | dict(other)


def watch_environment(names: frozenset[str], on_read: Callable[[str], None]) -> None:
    """Call `on_read(name)` whenever one of these variables is read, before its value is returned."""
    global _watched, _on_read
    _watched, _on_read = names, on_read
    if type(os.environ) is os._Environ:
        # Change its class instead of replacing it: scripts and libraries may already hold the object.
        change_class(os.environ, _WatchedEnvironment)


def unwatch_environment() -> None:
    """Undo `watch_environment`."""
    if type(os.environ) is _WatchedEnvironment:
        change_class(os.environ, os._Environ)
