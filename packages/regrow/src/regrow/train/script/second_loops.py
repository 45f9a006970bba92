"""Detects a script's second training before the first begins: by loops, maps, searches, later statements.

A job has one training, since a replaced rank could not reach the second. Only a second one that is certain by the text
and the present values is refused here; the begin of a second training is an error in any case.
"""

import ast
import dis
import functools
import inspect
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType, FunctionType

from regrow.core.errors import UsageError
from regrow.train.script.callers import loop_around
from regrow.train.script.certain_ways import (
    EXITS,
    LATER,
    RAISE,
    always_reached,
    called_in,
    calling,
    certain_calls,
    is_always_reached,
    is_tried,
    line_of,
    may_end,
    may_leave,
    turns_again,
)
from regrow.train.script.source import is_script, last_line, text_of, tree_of

LOOPS = frozenset({"steps", "epochs"})
_REPEATS = frozenset({"map", "starmap"})
_TAKES_ALL = frozenset({"list", "tuple", "sum", "set", "sorted", "min", "max"})
_SEARCHES = {"optuna": "n_trials", "hyperopt": "max_evals", "skopt": "n_calls"}
"""Packages that search hyperparameters, and their variable with the number of trainings."""
_MAY_END = ("timeout", "callbacks", "callback", "early_stop_fn", "loss_threshold")
"""Variables of these packages that may end a search before that number."""
_LAZY = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_DEEP = 4
_MOST_TEXT = 4_000_000
"""Most characters of a script and its modules, some 100,000 lines: in a longer one nothing counts as certain."""


def refuse_second_loop(frames: list[FrameType], session: object) -> None:
    """Raise `UsageError` if `second_loop` finds a second training."""
    if second := second_loop(frames, session):
        raise UsageError(
            f"session.steps {second}, where a second call would be a second loop: a rank that is replaced could not "
            "come to it",
            hint="a loop of epochs is `for epoch in session.epochs(loader, epochs):` and in it `for step in epoch:`; "
            "folds and sweeps are `for training in session.trainings(names):`",
        )


def second_loop(frames: list[FrameType], session: object) -> str:
    """Place and form of a second training, in words for people; empty if none is found, or it is not certain.

    Args:
        frames: frames of the script, innermost first; the first of them begins a training.
        session: the session of the training.
    """
    if (around := loop_around(frames)) is not None:
        return f"is called within another loop ({_place(around)})"
    try:
        return _certain_second(frames, session)
    except RecursionError:
        return ""  # blocks are nested too deeply
    finally:
        for known in (_parsed, _functions, _trains):
            known.cache_clear()


def _certain_second(frames: list[FrameType], session: object) -> str:
    names = frozenset(name for frame in frames for name, value in _variables(frame).items() if value is session)
    certain = True  # each call of the called function trains
    passed: list[ast.AST] = []
    for at, frame in enumerate(frames):
        tree = _tree(frame)
        if tree is None or frame.f_code.co_flags & _LAZY:
            return ""  # the rest of a generator may never run
        scope = _scope(tree, frame.f_code)
        if certain and (loop := _repeating_while(tree, scope, frame)) is not None:
            place = f"{frame.f_code.co_filename}:{loop.lineno}"
            return "" if _may_end([*passed, *loop.body], frames, at) else f"is called within another loop ({place})"
        if certain and at and (by := _called_by(frame, frames[at - 1])):
            ends = EXITS | {"stop"} if by in _SEARCHES else EXITS
            return "" if _may_end(passed, frames, at, ends) else f"is called by {by} ({_place(frame)})"
        rest = [part for part in ast.walk(scope) if line_of(part) >= frame.f_lineno]
        later, _ = _ahead(scope.body, frame.f_lineno) or ([], False)
        for call in certain_calls(later):
            if _begins(call, _variables(frame), names, _DEEP):
                between = [part for part in rest if line_of(part) <= call.lineno]
                followed = f"is followed by another training ({frame.f_code.co_filename}:{call.lineno})"
                return "" if _may_end([*passed, *between], frames, at) else followed
        if may_leave(scope.body, frame.f_lineno):
            return ""
        certain = certain and is_always_reached(scope.body, frame.f_lineno)
        passed += rest
    return ""


def _may_end(parts: Iterable[ast.AST], frames: list[FrameType], at: int, ends: frozenset[str] = EXITS) -> bool:
    """True if these parts, by the names that they call, lead to one of `ends`, also through the script's functions.

    If the frame with index `at`, or one around it, may catch an error, raising counts too. Functions that are running
    do not count, since the code that they still run is among the parts.
    """
    around = [(_tree(each), each) for each in frames[at:]]
    if any(tree is not None and is_tried(_scope(tree, each.f_code), each.f_lineno) for tree, each in around):
        ends |= {RAISE}
    homes = [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]
    files = {str(home.get("__file__")): home for home in homes}
    files = {file: home for file, home in files.items() if file.endswith(".py") and is_script(file)}
    files |= {frame.f_code.co_filename: frame.f_globals for frame in frames}
    texts = [text_of(file, home) for file, home in files.items()]
    if sum(map(len, texts)) > _MOST_TEXT:
        return True
    trees = filter(None, map(tree_of, texts))  # one at a time: a tree takes far more memory than its text
    found = calling(ends, trees, without=LOOPS)  # `steps` and `epochs` end nothing, even if a function is named so
    return bool(called_in(parts) & (found - {frame.f_code.co_name for frame in frames}))


@functools.cache
def _parsed(text: str) -> ast.Module | None:
    """The parsed text, made once for each look at a script, since parsing large texts takes longer than all else."""
    return tree_of(text)


def _tree(frame: FrameType) -> ast.Module | None:
    return _parsed(text_of(frame.f_code.co_filename, frame.f_globals))


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _variables(frame: FrameType) -> dict[str, object]:
    return {**frame.f_globals, **frame.f_locals}


# --- a call that may be made several times -------------------------------------------------------------------------


def _repeating_while(tree: ast.Module, scope: ast.Module | ast.FunctionDef, frame: FrameType) -> ast.While | None:
    """A `while` loop around this frame's present line that certainly reaches the line again.

    Other `while` loops may only retry after a failure.
    """
    shared = {name for each in ast.walk(tree) if isinstance(each, ast.Global | ast.Nonlocal) for name in each.names}
    for loop in ast.walk(scope):
        if not isinstance(loop, ast.While) or not loop.body[0].lineno <= frame.f_lineno <= last_line(loop.body[-1]):
            continue
        own = {name: value for name, value in _variables(frame).items() if name not in shared}
        if is_always_reached(loop.body, frame.f_lineno) and turns_again(loop, frame.f_lineno, own):
            return loop
    return None


def _called_by(caller: FrameType, called: FrameType) -> str:
    """Name of a function that repeatedly calls its argument, between two frames of the script; empty without one."""
    between = called.f_back
    while between is not None and between is not caller:
        package = str(between.f_globals.get("__name__", "")).partition(".")[0]
        times = between.f_locals.get(_SEARCHES.get(package, ""))
        if isinstance(times, int) and times > 1:
            return "" if any(between.f_locals.get(name) is not None for name in _MAY_END) else package
        between = between.f_back
    return _mapped_at(caller) if called.f_back is caller else ""


def _mapped_at(frame: FrameType) -> str:
    """Name of a `map` over several values that this frame's present expression consumes whole; empty without one."""
    there = _variables(frame)
    for call in _calls_at(frame):
        match call:
            case ast.Call(ast.Name(taker), [ast.Call(args=[_, over]) as inner], []) if taker in _TAKES_ALL:
                name = getattr(inner.func, "attr", getattr(inner.func, "id", ""))
                if name in _REPEATS and _are_several(over, there):
                    return str(name)
    return ""


def _are_several(node: ast.expr, there: dict[str, object]) -> bool:
    match node:
        case ast.List(elements) | ast.Tuple(elements):
            return len([each for each in elements if not isinstance(each, ast.Starred)]) > 1
        case ast.Call(ast.Name("range"), [ast.Constant(int(count))], []):
            return count > 1
        case ast.Call(ast.Name("range"), [ast.Name(name)], []):
            count_of = there.get(name)
            return isinstance(count_of, int) and count_of > 1
        case ast.Name(name):
            value = there.get(name)
            return isinstance(value, list | tuple | range | dict | set) and len(value) > 1
    return False


def _calls_at(frame: FrameType) -> Iterator[ast.Call]:
    """Calls in the expression that this frame is evaluating."""
    instructions = list(dis.get_instructions(frame.f_code))
    here = next((each for each in instructions if each.offset == frame.f_lasti), None)
    tree = _tree(frame)
    if here is None or here.positions is None or tree is None:
        return
    spot = here.positions
    for node in ast.walk(tree):
        place = getattr(node, "lineno", -1), getattr(node, "col_offset", -1), getattr(node, "end_col_offset", -1)
        if isinstance(node, ast.expr) and place == (spot.lineno, spot.col_offset, spot.end_col_offset):
            yield from (each for each in ast.walk(node) if isinstance(each, ast.Call))


# --- later statements -----------------------------------------------------------------------------------------------


@functools.cache
def _functions(tree: ast.Module) -> dict[tuple[str, int], ast.FunctionDef]:
    """Functions by their names and first lines."""
    found: dict[tuple[str, int], ast.FunctionDef] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            found.setdefault((node.name, first), node)
    return found


def _scope(tree: ast.Module, code: CodeType) -> ast.Module | ast.FunctionDef:
    if (made_there := _functions(tree).get((code.co_name, code.co_firstlineno))) is not None:
        return made_there
    if code.co_name == "<lambda>":
        made = [each for each in ast.walk(tree) if isinstance(each, ast.Lambda) and each.lineno == code.co_firstlineno]
        bodies: list[ast.stmt] = [ast.copy_location(ast.Expr(each.body), each.body) for each in made]
        return ast.Module(bodies if len(bodies) == 1 else [], [])
    return tree if code.co_name == "<module>" else ast.Module([], [])


def _ahead(block: list[ast.stmt], line: int) -> tuple[list[ast.stmt], bool] | None:
    """Statements of a block after this line that are certainly reached, and True if its end may not be reached.

    None if the line is not in the block.
    """
    for at, statement in enumerate(block):
        if not statement.lineno <= line <= last_line(statement):
            continue
        inner = next((found for part in _blocks(statement) if (found := _ahead(part, line)) is not None), None)
        later, ends = inner if inner is not None else ([], False)
        if (
            isinstance(statement, ast.Try | ast.TryStar)
            and statement.handlers
            and line <= last_line(statement.body[-1])
        ):
            later = []  # an error in the first training would skip these
        if ends or may_end(statement, behind=line):
            return later, True
        more, ends = always_reached(block[at + 1 :])
        return later + more, ends
    return None


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(statement, name, None)
        if isinstance(block, list) and block and not isinstance(statement, LATER):
            yield block
    for each in [*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())]:
        yield each.body


def _begins(call: ast.Call, there: dict[str, object], names: frozenset[str], deep: int) -> bool:
    """True if a call begins a training of this session: the session's method, or a function that calls it."""
    match call.func:
        case ast.Attribute(value=ast.Name(id=of), attr=attribute):
            return of in names and attribute in LOOPS
        case ast.Name(id=name) if deep and isinstance(function := there.get(name), FunctionType):
            return is_script(function.__code__.co_filename) and _trains(function, names, deep - 1)
    return False


@functools.cache
def _trains(function: FunctionType, names: frozenset[str], deep: int) -> bool:
    tree = _parsed(text_of(function.__code__.co_filename, function.__globals__))
    if tree is None or function.__code__.co_flags & _LAZY:
        return False
    statements, _ = always_reached(_scope(tree, function.__code__).body)
    return any(_begins(call, function.__globals__, names, deep) for call in certain_calls(statements))
