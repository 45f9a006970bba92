"""A second training of a script, seen before its first begins: by loops, maps, searches, and statements that follow.

A job has one training: a rank that is replaced could not come to the second. Only what is certain from the text and the
values at hand counts; the begin of a second training is an error in any case.
"""

import ast
import dis
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType, FunctionType
from typing import TypeGuard

from regrow.train.rehearsal.callers import loop_around
from regrow.train.script_source import is_script, last_line, parsed, text_of, tree_of

LOOPS = frozenset({"steps", "epochs"})
_REPEATS = frozenset({"map", "filter", "starmap", "reduce", "accumulate", "filterfalse", "takewhile", "dropwhile"})
_SEARCHES = frozenset(
    {"optuna", "hyperopt", "ray", "sklearn", "skorch", "joblib", "ax", "nevergrad", "skopt", "bayes_opt"}
)
_ENDS = (ast.Return, ast.Raise, ast.Break, ast.Continue)
_MAYBE = (ast.If, ast.For, ast.While, ast.AsyncFor)
_LATER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_PERHAPS = (ast.IfExp, ast.BoolOp, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_DEEP = 4


def second_loop(frames: list[FrameType], session: object) -> str:
    """Place and form of a second training, in words for people; empty: none is seen.

    Args:
        frames: of the script, innermost first; the first of them begins a training.
        session: whose.
    """
    if (around := loop_around(frames)) is not None:
        return f"is called within another loop ({_place(around)})"
    names = {name for frame in frames for name, value in _variables(frame).items() if value is session}
    for at, frame in enumerate(frames):
        tree = parsed(frame)
        if tree is None:
            continue
        if (line := _repeating_while(tree, frame)) != 0:
            return f"is called within another loop ({frame.f_code.co_filename}:{line})"
        if at and (by := _called_by(frame, frames[at - 1])):
            return f"is called by {by} ({_place(frame)})"
        if (line := _follows(tree, frame, names)) != 0:
            return f"is followed by another training ({frame.f_code.co_filename}:{line})"
    return ""


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _variables(frame: FrameType) -> dict[str, object]:
    return {**frame.f_globals, **frame.f_locals}


# --- a call that may be made several times -------------------------------------------------------------------------


def _repeating_while(tree: ast.Module, frame: FrameType) -> int:
    """Line of a `while` around the present line of this call that counts its turns, or never ends; 0: none.

    Others may be there to try again what has failed.
    """
    for loop in ast.walk(_scope(tree, frame.f_code)):
        if not isinstance(loop, ast.While) or not loop.body[0].lineno <= frame.f_lineno <= last_line(loop.body[-1]):
            continue
        parts = [part for statement in loop.body for part in ast.walk(statement)]
        if any(isinstance(part, ast.Break | ast.Return) for part in parts):
            continue
        counted = {part.target.id for part in parts if isinstance(part, ast.AugAssign) and _is_name(part.target)}
        compared = {part.id for part in ast.walk(loop.test) if isinstance(part, ast.Name)}
        if isinstance(loop.test, ast.Constant) or (isinstance(loop.test, ast.Compare) and counted & compared):
            return loop.lineno
    return 0


def _is_name(node: ast.expr) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name)


def _called_by(caller: FrameType, called: FrameType) -> str:
    """A function that calls what it is given again and again, between two calls of the script; empty: none."""
    between = called.f_back
    while between is not None and between is not caller:
        package = str(between.f_globals.get("__name__", "")).partition(".")[0]
        if package in _SEARCHES:
            return package
        between = between.f_back
    if called.f_back is not caller:
        return ""
    return next((name for name in _call_at(caller) if name in _REPEATS), "")


def _call_at(frame: FrameType) -> Iterator[str]:
    """Names of the functions in the expression that this call is evaluating."""
    instructions = list(dis.get_instructions(frame.f_code))
    here = next((each for each in instructions if each.offset == frame.f_lasti), None)
    tree = parsed(frame)
    if here is None or here.positions is None or tree is None:
        return
    spot = here.positions
    for node in ast.walk(tree):
        place = getattr(node, "lineno", -1), getattr(node, "col_offset", -1), getattr(node, "end_col_offset", -1)
        if isinstance(node, ast.expr) and place == (spot.lineno, spot.col_offset, spot.end_col_offset):
            for each in ast.walk(node):
                if isinstance(each, ast.Call):
                    yield getattr(each.func, "attr", getattr(each.func, "id", ""))


# --- what follows ---------------------------------------------------------------------------------------------------


def _follows(tree: ast.Module, frame: FrameType, names: set[str]) -> int:
    """Line of a call behind the present statement that begins a training for certain; 0: none."""
    later, _ = _ahead(_scope(tree, frame.f_code).body, frame.f_lineno) or ([], False)
    for call in _certain_calls(later):
        if _begins(call, _variables(frame), names, _DEEP):
            return call.lineno
    return 0


def _scope(tree: ast.Module, code: CodeType) -> ast.Module | ast.FunctionDef:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name != code.co_name:
            continue
        if min([node.lineno, *(each.lineno for each in node.decorator_list)]) == code.co_firstlineno:
            return node
    return tree if code.co_name == "<module>" else ast.Module([], [])


def _ahead(block: list[ast.stmt], line: int) -> tuple[list[ast.stmt], bool] | None:
    """Statements of a block behind this line, and whether its end is not come to; None: the line is not in it."""
    for at, statement in enumerate(block):
        if not statement.lineno <= line <= last_line(statement):
            continue
        inner = next((found for part in _blocks(statement) if (found := _ahead(part, line)) is not None), None)
        later, ends = inner if inner is not None else ([], isinstance(statement, _ENDS))
        for each in block[at + 1 :]:
            if ends:
                break
            later.append(each)
            ends = isinstance(each, _ENDS) or _exits(each)
        return later, ends
    return None


def _exits(statement: ast.stmt) -> bool:
    called = statement.value.func if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) else None
    return getattr(called, "attr", getattr(called, "id", "")) in ("exit", "_exit", "quit")


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(statement, name, None)
        if isinstance(block, list) and block and not isinstance(statement, _LATER):
            yield block
    for handler in getattr(statement, "handlers", ()):
        yield handler.body


def _certain_calls(statements: Iterable[ast.stmt]) -> Iterator[ast.Call]:
    """Calls that are made if these statements are come to."""
    near: list[ast.AST] = list(statements)
    while near:
        node = near.pop(0)
        if isinstance(node, (*_LATER, *_PERHAPS)):
            continue
        if isinstance(node, _MAYBE):
            near.append(node.test if isinstance(node, ast.If | ast.While) else node.iter)
            continue
        if isinstance(node, ast.Try):
            near += node.body
            continue
        if isinstance(node, ast.Call):
            yield node
        near += ast.iter_child_nodes(node)


def _begins(call: ast.Call, there: dict[str, object], names: set[str], deep: int) -> bool:
    """True if a call begins a training of this session: the session's own, or a function's that does so."""
    match call.func:
        case ast.Attribute(value=ast.Name(id=of), attr=attribute):
            return of in names and attribute in LOOPS
        case ast.Name(id=name) if deep and isinstance(function := there.get(name), FunctionType):
            return is_script(function.__code__.co_filename) and _trains(function, names, deep - 1)
    return False


def _trains(function: FunctionType, names: set[str], deep: int) -> bool:
    tree = tree_of(text_of(function.__code__.co_filename, function.__globals__))
    if tree is None:
        return False
    body = _scope(tree, function.__code__).body
    until = next((at for at, each in enumerate(body) if isinstance(each, _ENDS)), len(body))
    calls = _certain_calls(body[: until + 1])
    return any(_begins(call, function.__globals__, names, deep) for call in calls)
