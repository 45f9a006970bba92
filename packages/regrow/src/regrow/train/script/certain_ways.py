"""Finds statements, calls and iterations that a script certainly reaches, by its text and the present values.

In doubt the answer is "not certain", since callers refuse a script for what is certain.
"""

import ast
import operator
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from regrow.train.script.source import last_line

LATER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_LEAVES = (ast.Return, ast.Raise)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_MAYBE = (ast.If, *_LOOPS)
_PERHAPS = (ast.IfExp, ast.BoolOp, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
EXITS = frozenset(
    {"exit", "_exit", "quit", "abort", "kill", "killpg", "raise_signal", "interrupt_main", "SystemExit"}
    | {f"exec{form}" for form in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")}
)
RAISE = "raise"
_COMPARISONS: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.NotEq: operator.ne,
}


def always_reached(block: Iterable[ast.stmt]) -> tuple[list[ast.stmt], bool]:
    """The first statements of a block, which are reached if the block is; and True if its end may not be reached."""
    found: list[ast.stmt] = []
    for each in block:
        ends = may_end(each)
        if not ends or (not hasattr(each, "body") and not isinstance(each, ast.Match)):
            found.append(each)
        if ends:
            return found, True
    return found, False


def is_always_reached(block: Iterable[ast.stmt], line: int) -> bool:
    """True if a call in this line is made each time that the block is reached."""
    return any(each.lineno <= line <= last_line(each) for each in certain_calls(always_reached(block)[0]))


def may_end(statement: ast.stmt, behind: int = 0) -> bool:
    """True if a statement may keep the code after it from running: by a return, an error, a jump, or the process's end.

    Args:
        behind: if the statement is no loop, only its parts from this line on count.
    """
    least = 0 if isinstance(statement, _LOOPS) or not hasattr(statement, "body") else behind
    if isinstance(statement, ast.While) and isinstance(statement.test, ast.Constant):
        return True
    return any(_ends(part) and line_of(part) >= least for part in _parts(statement, in_loop=False))


def may_leave(body: Iterable[ast.stmt], line: int) -> bool:
    """True if a function that is at this line may, by its own text, still raise or end the process."""
    for each in body:
        for part in _parts(each, in_loop=True):
            if line_of(part) >= line and (isinstance(part, ast.Raise) or _exits(part)):
                return True
    return False


def _parts(start: ast.AST, *, in_loop: bool) -> Iterator[ast.AST]:
    """A node and all in it, without functions and classes defined there, and without jumps within inner loops."""
    near = [(start, in_loop)]
    while near:
        node, inside = near.pop()
        if isinstance(node, LATER) or (inside and isinstance(node, ast.Break | ast.Continue)):
            continue
        yield node
        inside = inside or isinstance(node, _LOOPS)
        near += ((each, inside) for each in ast.iter_child_nodes(node))


def line_of(node: ast.AST) -> int:
    """First line of a node; 0 for one that has none."""
    return int(getattr(node, "lineno", 0))


def _ends(node: ast.AST) -> bool:
    return isinstance(node, (*_LEAVES, ast.Break, ast.Continue)) or _exits(node)


def _exits(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in EXITS


def called_in(parts: Iterable[ast.AST]) -> set[str]:
    """Names of functions and methods that these parts call, and of errors that they raise; `RAISE` if they raise."""
    found: set[str] = set()
    for each in (each for part in parts for each in ast.walk(part)):
        if isinstance(each, ast.Raise):
            found.add(RAISE)
        named = each.func if isinstance(each, ast.Call) else each.exc if isinstance(each, ast.Raise) else None
        found.add(str(getattr(named, "attr", getattr(named, "id", ""))))
    return found


def is_tried(block: ast.AST, line: int) -> bool:
    """True if an error in this line may be caught within the block."""
    for each in ast.walk(block):
        catches = isinstance(each, ast.With) or getattr(each, "handlers", None)  # any context manager may catch
        if not catches or not isinstance(each, ast.With | ast.Try | ast.TryStar):
            continue
        if each.body[0].lineno <= line <= last_line(each.body[-1]):
            return True
    return False


def calling(names: Iterable[str], trees: Iterable[ast.Module], *, without: Collection[str]) -> set[str]:
    """`names`, and the names of functions in these texts that call one of them, directly or indirectly.

    Functions whose names are in `without` are ignored.
    """
    parts = (each for tree in trees for each in ast.walk(tree))
    callers: dict[str, set[str]] = {}
    for each in parts:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            for name in called_in([each]):
                callers.setdefault(name, set()).add(each.name)
    found = set(names)
    near = list(found)
    while near:
        more = callers.get(near.pop(), set()) - found - set(without)
        found |= more
        near += more
    return found


def certain_calls(statements: Iterable[ast.stmt]) -> Iterator[ast.Call]:
    """Calls that are made if these statements are reached."""
    near: deque[ast.AST] = deque(statements)
    while near:
        node = near.popleft()
        if isinstance(node, (*LATER, *_PERHAPS)):
            continue
        if isinstance(node, _MAYBE):
            near.append(node.test if isinstance(node, ast.If | ast.While) else node.iter)
            continue
        if isinstance(node, ast.Match):
            near.append(node.subject)
            continue
        if isinstance(node, ast.Try | ast.TryStar):
            near += node.body
            continue
        if isinstance(node, ast.Call):
            yield node
        near += ast.iter_child_nodes(node)


def turns_again(loop: ast.While, line: int, there: Mapping[str, object]) -> bool:
    """True if the loop around this line certainly has another iteration, as it never ends or its counter allows it.

    Args:
        there: variables that only this loop's own text changes.
    """
    parts = [part for each in loop.body for part in ast.walk(each)]
    if any(_ends(part) for part in parts):
        return False
    match loop.test:
        case ast.Constant(value):
            return bool(value)
        case ast.Compare(ast.Name(counter), [comparison], [limit]) if type(comparison) in _COMPARISONS:
            written = [part for part in parts if _writes(part, counter)]
            counts = [each for each in loop.body if isinstance(each, ast.AugAssign) and _writes(each.target, counter)]
            if len(written) != 1 or len(counts) != 1 or not isinstance(counts[0].op, ast.Add):
                return False
            if isinstance(limit, ast.Name) and any(_writes(part, limit.id) for part in parts):
                return False
            value, by, most = _number(loop.test.left, there), _number(counts[0].value, there), _number(limit, there)
            if value is None or by is None or most is None:
                return False
            return _COMPARISONS[type(comparison)](value + (by if counts[0].lineno >= line else 0), most)
    return False


def _writes(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store | ast.Del)


def _number(node: ast.expr, there: Mapping[str, object]) -> int | None:
    value = node.value if isinstance(node, ast.Constant) else there.get(node.id) if isinstance(node, ast.Name) else None
    return value if isinstance(value, int) else None
