"""Recognizes loops of one iteration by their source and the values of its names: `for epoch in range(1)`."""

import argparse
import ast
import builtins
from collections.abc import Iterator
from types import FrameType
from typing import Any

from regrow.train.script.source import last_line, parsed

_FIXED = (range, tuple, str, frozenset)


class _Unknown(Exception):
    """The value of an expression cannot be known without running it."""


def turn_once(frame: FrameType, loops: int) -> bool:
    """True if each `for` loop around this frame's present line iterates over exactly one value.

    Names are evaluated now, so a name that the loop's body assigns proves nothing.

    Args:
        frame: a frame of the script.
        loops: expected number of loops; if the source shows another number, the answer is False.
    """
    tree = parsed(frame)
    around = list(_around(tree, frame)) if tree is not None else []
    return len(around) == loops and all(_has_one(loop, frame) for loop in around)


def _around(tree: ast.Module, frame: FrameType) -> Iterator[ast.For]:
    """The loops of this frame's own code whose bodies contain its present line."""
    line, first = frame.f_lineno, frame.f_code.co_firstlineno
    for node in ast.walk(tree):
        if isinstance(node, ast.For) and node.lineno >= first and _spans(node.body, line):
            yield node


def _spans(body: list[ast.stmt], line: int) -> bool:
    return body[0].lineno <= line <= last_line(body[-1])


def _has_one(loop: ast.For, frame: FrameType) -> bool:
    changed = {
        each.id if isinstance(each, ast.Name) else each.attr
        for part in [loop.target, *loop.body]
        for each in ast.walk(part)
        if isinstance(each, ast.Name | ast.Attribute) and not isinstance(each.ctx, ast.Load)
    }
    try:
        value = _value(loop.iter, frame, changed)
    except _Unknown:
        return False
    return type(value) in _FIXED and len(value) == 1


def _value(node: ast.expr, frame: FrameType, changed: set[str]) -> Any:
    """Value of an expression that runs none of the script's code. Raises `_Unknown`."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name) if name not in changed:
            for space in (frame.f_locals, frame.f_globals, vars(builtins)):
                if name in space:
                    return space[name]
        case ast.Attribute(value=of, attr=name) if name not in changed:
            owner = _value(of, frame, changed)
            if type(owner) is argparse.Namespace and hasattr(owner, name):
                return getattr(owner, name)
        case ast.List(elts=parts) | ast.Tuple(elts=parts) if not any(isinstance(each, ast.Starred) for each in parts):
            return tuple(parts)
        case ast.Call(func=ast.Name() as function, args=args, keywords=[]):
            given = [_value(each, frame, changed) for each in args]
            if _value(function, frame, changed) is range and given and all(type(each) is int for each in given):
                return range(*given)
    raise _Unknown
