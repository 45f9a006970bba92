"""Whether a script may call collectives between its steps, as far as its text says: before the first such call.

What stands behind a guard (`if step.number % 1000 == 0: evaluate()`) is not seen in the rehearsal. Where its text leads
to the name of a collective, all ranks make ready for one from the first step on; that costs a newcomer one body more.
"""

import ast
import sys
from collections.abc import Iterable, Iterator
from types import FrameType, ModuleType

from regrow.train.asked_loop import asking_frame, loop_at
from regrow.train.rehearsal.callers import is_script
from regrow.train.script_source import text_of, tree_of

COLLECTIVES = frozenset(
    {
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_reduce",
        "all_reduce_coalesced",
        "barrier",
        "broadcast",
        "broadcast_object_list",
        "monitored_barrier",
    }
)
_MOST_TEXT = 4_000_000
"""Characters of the script's files that are read, some 1 s: of a larger program the rest is not known."""

Uses = dict[str, set[str]]
"""What a name leads to: a function's by the names in it, a variable's by those that it was made of."""


def may_call_collectives(innermost: FrameType | None) -> bool:
    """Whether the loop that asks for a step there, or what it calls, names a collective behind its step's body.

    Names are followed wherever the script's own files give them a meaning, so the answer may be yes too often. It is no
    where the loop's text cannot be read, and of collectives that a library calls by itself.
    """
    frame = asking_frame(innermost)
    loop = loop_at(frame, frame.f_lasti) if frame is not None else None
    if loop is None:
        return False
    target = loop.target.id if isinstance(loop.target, ast.Name) else ""
    named = {name for statement in loop.body for name in _names(statement, without=target)}
    return leads_to_collectives(named, uses_of(_files()))


def leads_to_collectives(named: Iterable[str], uses: Uses) -> bool:
    """Whether one of these names is a collective's, or leads to one."""
    seen: set[str] = set()
    ahead = list(named)
    while ahead:
        name = ahead.pop()
        if name in COLLECTIVES:
            return True
        if name not in seen:
            seen.add(name)
            ahead += uses.get(name, ())
    return False


def uses_of(files: Iterable[str]) -> Uses:
    """What the names in these files lead to; a file that cannot be parsed has none."""
    uses: Uses = {}
    left = _MOST_TEXT
    for file in files:
        text = text_of(file)
        left -= len(text)
        if left < 0:
            break
        tree = tree_of(text)
        for node in ast.walk(tree) if tree is not None else ():
            for name, used in _uses(node):
                uses.setdefault(name, set()).update(used)
    return uses


def _uses(node: ast.AST) -> Iterator[tuple[str, Iterable[str]]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name, [name for statement in node.body for name in _names(statement)]
    elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            for name in _names(target):
                yield name, list(_names(node.value))
    elif isinstance(node, ast.ImportFrom | ast.Import):
        for each in node.names:
            if each.asname:
                yield each.asname, [each.name]


def _names(node: ast.AST, *, without: str = "") -> Iterator[str]:
    """The names in it, attributes' too, but for the bodies of `with <without> ...:`."""
    ahead = [node]
    while ahead:  # no recursion: an expression may be nested deeper than Python's calls
        node = ahead.pop()
        if isinstance(node, ast.With) and any(
            isinstance(item.context_expr, ast.Name) and item.context_expr.id == without for item in node.items
        ):
            continue
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        ahead += ast.iter_child_nodes(node)


def _files() -> Iterator[str]:
    """The script's own files, the main one first."""
    modules = [sys.modules.get("__main__"), *sys.modules.values()]
    files = [getattr(each, "__file__", None) for each in modules if isinstance(each, ModuleType)]
    return (file for file in dict.fromkeys(files) if file is not None and file.endswith(".py") and is_script(file))
