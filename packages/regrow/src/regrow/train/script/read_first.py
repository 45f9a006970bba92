"""Finds names that a loop's body may read before it writes them, by its text: they carry values between iterations."""

import ast
import contextlib
import inspect
from collections.abc import Iterable
from types import FrameType
from typing import NamedTuple

from regrow.train.script.filled_anew import harmless, only_added_to
from regrow.train.script.namespaces import names_used
from regrow.train.script.source import last_line, parsed


class BodyReads(NamedTuple):
    """Names of a loop's body, by its text.

    `first`: may be read before they are written. `harmless`: no body reads contents that another body has left.
    `added_to`: the harmless containers to which bodies only add.
    `written`: some iteration may write them. `certain`: each writes them. `outside`: are read elsewhere in the file.
    """

    first: set[str]
    harmless: set[str]
    added_to: set[str]
    written: set[str]
    certain: set[str]
    outside: set[str]


def read_first(frame: FrameType) -> BodyReads | None:
    """Names in the loop at this frame's present line, or in the loop of epochs around that loop.

    None if there is no such loop, or its text cannot be read.
    """
    tree = parsed(frame)
    if tree is None:
        return None
    loops = [
        each
        for each in ast.walk(tree)
        if isinstance(each, ast.For) and frame.f_code.co_firstlineno <= each.lineno <= frame.f_lineno
    ]
    asking = [each for each in loops if frame.f_lineno <= last_line(each.iter)]
    if not asking:
        return None
    inner = max(asking, key=lambda each: each.lineno)
    of_epochs = [each for each in loops if each.lineno < inner.lineno <= last_line(each) and _has_epochs(each.iter)]
    body = min([inner, *of_epochs], key=lambda each: each.lineno).body
    of_steps = inner.body
    named = [each for part in body for each in ast.walk(part) if isinstance(each, ast.Name)]
    there = {**frame.f_globals, **frame.f_locals}
    called = [there[each.id] for each in named if each.id in there]
    written = {each.id for each in named if _stores(each)}
    elsewhere = names_used(called, [frame.f_globals])
    order, inside = ReadOrder(), set(map(id, named))
    certain = order.block(body, set())
    order.block(of_steps, set())  # names bound above an epoch's steps, which the steps carry on
    others = (each for each in ast.walk(tree) if isinstance(each, ast.Name) and id(each) not in inside)
    outside = {each.id for each in others if not _stores(each)}
    first = order.read | (elsewhere - written)
    in_steps = {each.id for part in of_steps for each in ast.walk(part) if isinstance(each, ast.Name)}
    added_to = (only_added_to(body, there) | only_added_to(of_steps, there)) - elsewhere
    unread = (harmless(body, there) - in_steps) | harmless(of_steps, there)
    return BodyReads(first, unread - elsewhere, added_to, written, certain, outside)


def loop_read(frames: Iterable[FrameType]) -> tuple[FrameType, BodyReads] | None:
    """The innermost frame that iterates over steps in a loop with a known text, and the names of that loop."""
    with contextlib.suppress(RecursionError):  # raised for a text that is nested too deeply
        for frame in frames:
            if not frame.f_code.co_flags & inspect.CO_GENERATOR and (reads := read_first(frame)) is not None:
                return frame, reads
    return None


def _has_epochs(node: ast.expr) -> bool:
    return any(isinstance(each, ast.Attribute) and each.attr == "epochs" for each in ast.walk(node))


class ReadOrder:
    """Collects names that statements may read before they write them. Inner loops count as having an iteration."""

    def __init__(self) -> None:
        self.read: set[str] = set()

    def block(self, body: list[ast.stmt], written: set[str]) -> set[str]:
        """Process statements; returns the names that are certainly written after them."""
        for each in body:
            written = self._statement(each, written)
        return written

    def _statement(self, node: ast.stmt, written: set[str]) -> set[str]:
        match node:
            case ast.Assign(targets=targets, value=value):
                return self._targets(targets, self._expression(value, written))
            case ast.AugAssign(target=target, value=value):
                written = self._expression(value, written)
                if isinstance(target, ast.Name) and target.id not in written:
                    self.read.add(target.id)
                return self._targets([target], written)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                return self._targets([target], self._expression(value, written))
            case ast.For(target=target, iter=goes, body=body, orelse=otherwise):
                written = self._targets([target], self._expression(goes, written))
                return self.block([*body, *otherwise], written)
            case ast.While(test=test, body=body, orelse=otherwise):
                return self.block([*body, *otherwise], self._expression(test, written))
            case ast.If(test=test, body=body, orelse=otherwise):
                written = self._expression(test, written)
                return self.block(body, set(written)) & self.block(otherwise, set(written))
            case ast.With(items=items, body=body):
                for each in items:
                    written = self._expression(each.context_expr, written)
                    written = self._targets([each.optional_vars] if each.optional_vars else [], written)
                return self.block(body, written)
            case ast.Try(body=body, handlers=handlers, orelse=otherwise, finalbody=final):
                after = self.block([*body, *otherwise], set(written))
                for handler in handlers:
                    self.block(handler.body, set(written))
                return self.block(final, after)
        return self._expression(node, written)

    def _targets(self, targets: list[ast.expr], written: set[str]) -> set[str]:
        for each in targets:
            self._loads(each, written)
        stored = {part.id for each in targets for part in ast.walk(each) if _stores(part)}  # type: ignore[attr-defined]
        return written | stored

    def _expression(self, node: ast.AST, written: set[str]) -> set[str]:
        """Process an expression; functions and comprehensions in it count as reading the names in them."""
        self._loads(node, written)
        stored = {each.target.id for each in ast.walk(node) if isinstance(each, ast.NamedExpr)}
        return written | stored

    def _loads(self, node: ast.AST, written: set[str]) -> None:
        inside = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and _stores(each)}
        inside |= {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
        for each in ast.walk(node):
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load) and each.id not in written | inside:
                self.read.add(each.id)


def _stores(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
