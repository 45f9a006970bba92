"""Skips to the next iteration of a script's loop, as if the script had `continue` after the step's body.

If a loop may be left by code after its step's body, that code must not run if the step was not committed: the loop
would be left a step too early, and the script cannot be brought back into it.
"""

import ast
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar

from regrow.core.errors import UsageError
from regrow.core.process.rewriting import Turn, skip_to_next
from regrow.train.script.asked_loop import Asking, asking, asking_frame, loop_at
from regrow.train.script.source import last_line

_LEAVE = (ast.Break, ast.Return, ast.Raise)
_FUNCTIONS_THAT_LEAVE = frozenset({"exit", "_exit", "quit"})
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


class TakenStep(Protocol):
    """The step that the script's loop holds."""

    committed: bool

    def become(self, following: Any) -> None:
        """Become the step that follows."""


S = TypeVar("S", bound=TakenStep)


class LoopIterations(Generic[S]):
    """The iterations of the script's loop, each of which begins by requesting a step.

    Args:
        taken: called with the step with which a loop was sent to its next iteration.
        sends: whether a loop may be sent to its next iteration.
    """

    def __init__(self, taken: Callable[[S], None], *, sends: bool) -> None:
        self._taken, self._sends = taken, sends
        self._walks: list[weakref.ref[Iterator[Any]]] = []
        self._asked: Asking | None = None

    def add_iterator(self, iterator: Iterator[Any]) -> None:
        """Note an iterator that the script uses: the steps first, then one that passes them on."""
        self._walks.append(weakref.ref(iterator))

    def walks(self) -> list[object]:
        """Iterators that the script uses, the steps first; None in place of those that are gone."""
        return [each() for each in self._walks]

    def requests_step(self, frame: FrameType) -> None:
        """Note that this frame, or a caller of it, requests the next step."""
        self._asked = asking(frame)

    def forget(self) -> None:
        """Forget the last requester: it is no loop of steps, so it has no next iteration."""
        self._asked = None

    def known(self, frame: FrameType) -> bool:
        """True if the loop that requests steps, in this frame or a caller's, can be sent to its next iteration."""
        self.requests_step(frame)
        asker = asking_frame(frame)
        return self._asked is not None and asker is not None and loop_at(asker, self._asked.instruction) is not None

    def not_left(self, step: S | None, innermost: FrameType, *, always: bool = False) -> None:
        """Skip to the loop's next iteration if the script might leave the loop after a step that was not committed.

        Args:
            always: skip even if the loop cannot be left there.
        """
        if not self._sends or self._asked is None or step is None or step.committed:
            return
        turn = turn_of(self._asked, innermost, always=always)
        if turn is not None:
            skip_to_next(turn, partial(self._take, step))

    def refuse_left(self, innermost: FrameType) -> None:
        """Raise `UsageError` if the loop might be left after this body, and must not be sent to its next iteration."""
        if not self._sends and self._asked and (turn := turn_of(self._asked, innermost, guarded=True)) is not None:
            raise UsageError(
                f"the loop whose body begins in line {turn.first} of {turn.frame.f_code.co_filename} may be left "
                "after a step that runs again, and --no-script-rewrite keeps it from being sent to its next turn",
                hint="leave it by `if step.committed and ...: break`",
            )

    def _take(self, step: S) -> bool:
        """Give the script's step object the next step; False if there is no further iteration."""
        asked, steps = self._asked, self._walks[0]() if self._walks else None
        following = next(steps, None) if steps is not None else None
        self._asked = asked
        if following is None:
            return False
        step.become(following)
        self._taken(step)
        return True


def turn_of(asked: Asking, innermost: FrameType | None, *, always: bool = False, guarded: bool = False) -> Turn | None:
    """The present iteration of the requesting `for` loop, if the loop may be left after the running statement.

    None if it cannot be left there by its text, or the text cannot be read.

    Args:
        asked: place of the request.
        innermost: a frame within that statement.
        always: return it even if the loop cannot be left there.
        guarded: ignore exits that are taken only after a committed step.
    """
    frame = innermost
    while frame is not None and frame.f_code is not asked.code:
        frame = frame.f_back
    loop = loop_at(frame, asked.instruction) if frame is not None else None
    if frame is None or loop is None:
        return None
    under_way = [each for each in loop.body if each.lineno <= frame.f_lineno <= last_line(each)]
    if len(under_way) != 1:
        return None
    behind = loop.body[loop.body.index(under_way[0]) + 1 :]
    if not (behind and always) and not any(_leaves(each, guarded) for each in behind):
        return None
    return Turn(frame, loop.body[0].lineno, last_line(under_way[0]), last_line(loop.body[-1]))


def _leaves(statement: ast.AST, guarded: bool = False) -> bool:
    """True if the loop may be left in this statement; `guarded`: ignore code that runs only if `step.committed`."""
    ahead = [statement]
    while ahead:  # no recursion: an expression may be nested deeper than Python's calls
        node = ahead.pop()
        if isinstance(node, _DEFINITIONS):
            continue
        called = node.func if isinstance(node, ast.Call) else None
        name = getattr(called, "attr", getattr(called, "id", ""))
        if isinstance(node, _LEAVE) or name in _FUNCTIONS_THAT_LEAVE:
            return True
        match node:
            case ast.If(ast.Attribute(attr="committed") | ast.BoolOp(ast.And(), [ast.Attribute(attr="committed"), *_])):
                ahead += node.orelse if guarded else ast.iter_child_nodes(node)
            case _:
                ahead += ast.iter_child_nodes(node)
    return False
