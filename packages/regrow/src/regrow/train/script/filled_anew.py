"""Finds variables above a loop whose old contents no body reads: lists it only adds to, arrays that it fills first."""

import ast
import types
from collections import deque
from collections.abc import Iterator, Mapping

import numpy as np
import torch

_ADDS = frozenset({"append", "appendleft", "extend"})
_EMPTIES = frozenset({"clear", "zero_", "fill_"})
_JUMPS = (ast.Break, ast.Continue, ast.Return, ast.Raise, ast.Yield, ast.YieldFrom)


def only_added_to(body: list[ast.stmt], there: Mapping[str, object]) -> set[str]:
    """Names of containers to which bodies only add."""
    names = {each.id for part in body for each in ast.walk(part) if isinstance(each, ast.Name)}
    return {each for each in names & set(there) if _only_adds(body, each, there[each])}


def harmless(body: list[ast.stmt], there: Mapping[str, object]) -> set[str]:
    """Names of containers and arrays to which bodies only add, or which they fill completely before they read them.

    Args:
        body: the loop's body.
        there: variables as they are now.
    """
    names = {each.id for part in body for each in ast.walk(part) if isinstance(each, ast.Name)}
    return {each for each in names & set(there) if _only_adds(body, each, there[each]) or _fills(body, each, there)}


def _uses(node: ast.AST, name: str) -> int:
    return sum(isinstance(each, ast.Name) and each.id == name for each in ast.walk(node))


def _only_adds(body: list[ast.stmt], name: str, value: object) -> bool:
    if type(value) not in (list, deque, dict):
        return False
    adds = 0
    for each in (each for part in body for each in ast.walk(part)):
        match each:
            case ast.Expr(ast.Call(ast.Attribute(ast.Name(of) | ast.Subscript(ast.Name(of), ast.Constant()), adding))):
                adds += of == name and adding in _ADDS
    return adds > 0 and adds == sum(_uses(part, name) for part in body)


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt | ast.expr]:
    """Statements in order, with those of a `with` after its context expressions."""
    for each in body:
        if isinstance(each, ast.With):
            for item in each.items:
                yield item.context_expr
            yield from _flat(each.body)
        else:
            yield each


def _fills(body: list[ast.stmt], name: str, there: Mapping[str, object]) -> bool:
    """True if a body fills the variable with this name before any other use."""
    first = next((each for each in _flat(body) if _uses(each, name)), None)
    match first:
        case ast.Expr(ast.Call(ast.Attribute(ast.Name(of), empties))) if _uses(first, name) == 1:
            return of == name and empties in _EMPTIES
        case ast.Assign([ast.Subscript(ast.Name(of), place)]) if _uses(first, name) == 1:
            return of == name and _is_all(place)
        case ast.For(ast.Name(turn), ast.Call(ast.Name("range"), bounds, []), inner, []):
            return _goes_through(bounds, name, there) and _fills_in_turns(inner, name, turn)
    return False


def _is_all(place: ast.expr) -> bool:
    match place:
        case ast.Slice(None, None, None) | ast.Constant(value=types.EllipsisType()):
            return True
    return False


def _goes_through(bounds: list[ast.expr], name: str, there: Mapping[str, object]) -> bool:
    """True if `range` with these bounds covers the whole first dimension of the variable."""
    if len(bounds) == 2 and isinstance(bounds[0], ast.Constant) and bounds[0].value == 0:
        bounds = bounds[1:]
    thing = there[name]
    if len(bounds) != 1 or not isinstance(thing, np.ndarray | torch.Tensor | list):
        return False
    match bounds[0]:
        case ast.Constant(value):
            most: object = value
        case ast.Name(of):
            most = there.get(of)
        case ast.Attribute(ast.Name(of), attribute):
            most = getattr(there.get(of), "__dict__", {}).get(attribute)
        case _:
            return False
    places = len(thing) if isinstance(thing, list) or thing.ndim else 0
    return type(most) is int and most == places


def _fills_in_turns(body: list[ast.stmt], name: str, turn: str) -> bool:
    """True if each iteration of a loop writes its own element first, and uses no other."""
    parts = [each for part in body for each in ast.walk(part)]
    if any(isinstance(each, _JUMPS) or _writes(each, turn) for each in parts):
        return False
    own = sum(_is_own(each, name, turn) for each in parts)
    first = next((each for each in _flat(body) if _uses(each, name)), None)
    if own != sum(_uses(part, name) for part in body) or not isinstance(first, ast.Assign) or _uses(first.value, name):
        return False
    targets = [each for target in first.targets for each in getattr(target, "elts", [target])]
    return any(_is_own(each, name, turn) for each in targets)


def _is_own(node: ast.AST, name: str, turn: str) -> bool:
    match node:
        case ast.Subscript(ast.Name(of), ast.Name(at)):
            return of == name and at == turn
    return False


def _writes(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load)
