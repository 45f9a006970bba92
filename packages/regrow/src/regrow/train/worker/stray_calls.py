"""Refuses collectives outside a script's steps that newcomers do not call too, and prepares for hooks of the script."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from regrow.comm.groups import Groups
from regrow.comm.observers import POINT_TO_POINT, CallObserver, CountedGroup
from regrow.core.board import Board
from regrow.core.errors import UsageError
from regrow.core.ids import Seconds
from regrow.core.phase import Phase
from regrow.data.seeding import generators_kept
from regrow.train.worker.body import Body
from regrow.train.worker.control import Control

_LISTENERS = ("between", "past", "set_up", "tape")
"""Listeners that would take a hook's collectives for calls of a body, or of code between two steps."""
_BEAT_S: Seconds = 1.0


class StrayCalls(CallObserver):
    """Notes the collectives of one worker, and the number of calls of each group.

    Args:
        board: shows the worker's progress to its agent.
        groups: record the refused calls.
        control: reports whether others may be at another step.
        body: reports whether the worker is in a body.
    """

    in_hooks = True

    def __init__(self, board: Board, groups: Groups, control: Control, body: Body) -> None:
        self._board, self._groups, self._control, self._body = board, groups, control, body
        self._last = ""

    def starts(self, group: CountedGroup, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Count a collective as it starts. Raises `UsageError` if other ranks would take it for another one."""
        self._last = name
        if self._control.reformed and not self._body.begun and not self._groups.in_hook:
            # They are at the next step already: any collective that they call there would be matched with this one.
            raise UsageError(
                f"{name} was called outside a step, and a fault has just brought in ranks that do not call it",
                hint="mark the function that calls it @regrow.restartable",
            )
        self._board.call()
        if name not in POINT_TO_POINT:
            self._board.show_count(group.number, group.sign, group.calls + 1)

    def advice(self) -> str:
        """Advice for people about the last call, if it was outside a step; else empty."""
        name = self._groups.refused_call if self._groups.refused else self._last
        if self._body.begun or not name:
            return ""
        return f"{name} was called outside a step: mark the function that does @regrow.restartable"


class _Refusal(CallObserver):
    """Refuses the collectives of a hook that runs after the groups were given up."""

    def __init__(self, hook: str) -> None:
        self._hook = hook

    def called(self, name: str, size: int) -> None:
        raise UsageError(
            f"{name} was called in {self._hook}, when the groups were given up", hint="call collectives in `after`"
        )


class Beside:
    """Prepares a worker for hooks of its script, and runs them.

    Args:
        board: shows the worker's progress to its agent.
        groups: the worker's groups.
        note: reports something about the script to people.
    """

    def __init__(self, board: Board, groups: Groups, note: Callable[[str], None]) -> None:
        self._board, self._groups, self._note = board, groups, note

    @contextmanager
    def run(self, hook: str, within: Seconds, *, calls: bool) -> Iterator[None]:
        """Context in which the script's hook runs.

        Args:
            hook: name of the hook, for people.
            within: seconds for which the hook counts as progress; after that the worker may count as hanging.
            calls: whether the hook may call collectives.
        """
        groups, ended = self._groups, threading.Event()
        kept, observers = {name: getattr(groups, name) for name in _LISTENERS}, groups.observers
        beating = threading.Thread(target=self._beat, args=(ended, hook, within), name="regrow-hook", daemon=True)
        groups.in_hook = hook
        for name in _LISTENERS:
            setattr(groups, name, None)
        received = tuple(each for each in observers if each.in_hooks)
        groups.observers = received if calls else (_Refusal(hook), *received)
        try:
            beating.start()
            with generators_kept():
                yield
        finally:
            ended.set()
            beating.join()
            for name, listener in kept.items():
                setattr(groups, name, listener)
            groups.observers, groups.in_hook = observers, ""

    def _beat(self, ended: threading.Event, hook: str, within: Seconds) -> None:
        until = time.monotonic() + within
        phase = Phase.BUILDING if self._board.read().phase is Phase.BUILDING else Phase.RECOVERING
        while (left := until - time.monotonic()) > 0:
            self._board.enter(phase)
            if ended.wait(min(_BEAT_S, left)):
                return
        self._note(f"{hook} has run for {within:.0f} s, and may be taken for hanging from now on")
