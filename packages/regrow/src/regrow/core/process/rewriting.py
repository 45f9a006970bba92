"""Changes of what belongs to a script: a frame's next line and variables, the class of an object. See decision 0110.

No other file sets `__class__`, `f_lineno` or `f_trace`, installs a trace function, or binds variables of a frame; a
test holds that. Each change is asked for elsewhere, with its reason.
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
"""True if `frame.f_locals` of a function is a view of its variables (PEP 667), and not a copy of them."""


def bind(frame: FrameType, values: Mapping[str, object]) -> Mapping[str, object]:
    """Bind variables of a call; returns what `frame.f_locals` was for that."""
    there = frame.f_locals
    there.update(values)
    if not WRITES_THROUGH and frame.f_code.co_flags & inspect.CO_NEWLOCALS:
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
    return there


def change_class(thing: object, kind: type) -> None:
    """Give an object another class: the script, and libraries, may hold the object already."""
    thing.__class__ = kind


class Turn(NamedTuple):
    """Position of a loop in its present turn."""

    frame: FrameType
    first: int
    """Line with which its body begins."""
    through: int
    """Last line of the statement of its body that is under way."""
    last: int


def skip_to_next(turn: Turn, ask: Callable[[], bool]) -> None:
    """After the present statement, begin the loop's body anew, once `ask` has prepared the next turn.

    If that cannot be done, or `ask` returns False, the loop goes on as it is. Python lets only a trace function send a
    frame to another line; a tracer that is already installed goes on with the frame afterwards.
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
            # Python 3.11 and 3.12 bind the variables to what is in this copy of them, so it must be a fresh one.
            frame.f_locals  # noqa: B018
        return traced

    frame.f_trace = follow
    sys.settrace(lambda *_: None)


def _go(frame: FrameType, line: int) -> bool:
    with warnings.catch_warnings():
        # From Python 3.12 on variables that have no value yet get None, with a warning.
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            frame.f_lineno = line  # type: ignore[misc]
        except ValueError:
            return False
    return True


_watched: frozenset[str] = frozenset()
_on_read: Callable[[str], None] | None = None
_in_a_row: list[str] = []
"""The variables that somebody who copies all of them asks for next, the last first."""


class _WatchedEnvironment(os._Environ):  # type: ignore[type-arg]
    """`os.environ` while somebody wants to know which variables a script reads.

    Copies of all of it, for a subprocess or a log, are no reads of any one.
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
        # Whether it is there is the same for every rank.
        return isinstance(key, str) and self.encodekey(key) in self._data  # type: ignore[attr-defined]

    def keys(self) -> KeysView[str]:
        # dict() and ** ask for these, and then for each of them in this order.
        _in_a_row[:] = reversed(list(super().__iter__()))
        return dict.fromkeys(super().__iter__()).keys()

    def items(self) -> ItemsView[str, str]:
        return self.copy().items()

    def copy(self) -> dict[str, str]:
        return {key: super(_WatchedEnvironment, self).__getitem__(key) for key in super().__iter__()}

    def __or__(self, other: Mapping[str, str]) -> dict[str, str]:  # type: ignore[override]
        return self.copy() | dict(other)


def watch_environment(names: frozenset[str], on_read: Callable[[str], None]) -> None:
    """Call `on_read(name)` whenever one of these variables is asked for, before the answer."""
    global _watched, _on_read
    _watched, _on_read = names, on_read
    if type(os.environ) is os._Environ:
        # Its class, not the object: scripts and libraries may hold that already.
        change_class(os.environ, _WatchedEnvironment)


def unwatch_environment() -> None:
    """As it was before `watch_environment`."""
    if type(os.environ) is _WatchedEnvironment:
        change_class(os.environ, os._Environ)
