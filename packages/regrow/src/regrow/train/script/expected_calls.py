"""Predict from a script's text if it calls collectives between its steps, before the first such call.

A guarded call (`if step.number % 1000 == 0: evaluate()`) is not seen in the rehearsal. If the text of the loop leads to
the name of a collective, all ranks prepare for one from the first step on; it costs a newcomer one more body.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from types import FrameType, ModuleType

from regrow.train.script.asked_loop import asking_frame, loop_at
from regrow.train.script.source import is_script, text_of, tree_of

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
_MOST_SEARCHED = 16_000_000
"""Most characters of the script's files that are searched for names; the rest of a larger program is ignored."""
_MOST_PARSED = 1_000_000
"""Most characters of files with such a name that are parsed, which takes some 1.5 s."""

_WORDS = re.compile(r"\w+").findall
_LEAVES = (ast.Constant, ast.expr_context, ast.boolop, ast.operator, ast.unaryop, ast.cmpop)
"""Nodes that contain no names: half of the nodes of a tree."""

Uses = dict[str, set[str]]
"""Names to which a name leads: for a function those in it, for a variable those in the assigned expression."""


def may_call_collectives(innermost: FrameType | None) -> bool:
    """True if the loop that requests a step, or a function that it calls, names a collective after the step's body.

    Names are followed through all of the script's own files, so the answer is True too often rather than too rarely.
    It is False if the loop's text cannot be read, and for collectives that a library calls by itself.
    """
    frame = asking_frame(innermost)
    loop = loop_at(frame, frame.f_lasti) if frame is not None else None
    if loop is None:
        return False
    target = loop.target.id if isinstance(loop.target, ast.Name) else ""
    named = {name for statement in loop.body for name in _names(statement, without=target)}
    return leads_to_collectives(named, map(text_of, _files()))


def leads_to_collectives(named: AbstractSet[str], texts: Iterable[str]) -> bool:
    """True if one of these names is a collective's, or the texts lead from it to one.

    The search goes from the collectives to their users, and to the users of those: most texts have none of these names
    and are not parsed. A text that cannot be parsed leads nowhere.
    """
    if not named:
        return False
    unread = [(text, frozenset(_WORDS(text))) for text in _within(_MOST_SEARCHED, texts)]
    uses: Uses = {}
    leading: set[str] = set()
    new: AbstractSet[str] = COLLECTIVES
    room = _MOST_PARSED
    while new:
        leading |= new
        if not named.isdisjoint(leading):
            return True
        mentioning = [text for text, words in unread if not words.isdisjoint(new)]
        unread = [(text, words) for text, words in unread if words.isdisjoint(new)]
        for text in mentioning:
            room -= len(text)
            if room >= 0:
                _read(text, uses)
        new = {name for name, used in uses.items() if name not in leading and not used.isdisjoint(leading)}
    return False


def _within(most: int, texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        most -= len(text)
        if most < 0:
            return
        yield text


def _read(text: str, uses: Uses) -> None:
    """Add a text's names to `uses`, each with the names to which it leads."""
    tree = tree_of(text)
    ahead: list[tuple[ast.AST, tuple[set[str], ...]]] = [] if tree is None else [(tree, ())]
    while ahead:  # no recursion: an expression may be nested deeper than Python's calls
        node, inside = ahead.pop()
        if isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            for used in inside:
                used.add(name)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = (*inside, uses.setdefault(node.name, set()))
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            made = node.targets if isinstance(node, ast.Assign) else [node.target]
            inside = (*inside, *(uses.setdefault(name, set()) for target in made for name in _names(target)))
        elif isinstance(node, ast.ImportFrom | ast.Import):
            for each in node.names:
                if each.asname:
                    uses.setdefault(each.asname, set()).add(each.name)
        ahead += [(child, inside) for child in _children(node)]


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """As `ast.iter_child_nodes`, without nodes that contain no names."""
    for field in node._fields:
        value = getattr(node, field, None)
        if isinstance(value, list):
            for each in value:
                if isinstance(each, ast.AST) and not isinstance(each, _LEAVES):
                    yield each
        elif isinstance(value, ast.AST) and not isinstance(value, _LEAVES):
            yield value


def _names(node: ast.AST, *, without: str = "") -> Iterator[str]:
    """Names in a node, attributes included, except in the bodies of `with <without> ...:`."""
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
        ahead += _children(node)


def _files() -> Iterator[str]:
    """The script's own files, the main one first."""
    modules = [sys.modules.get("__main__"), *sys.modules.values()]
    files = [vars(each).get("__file__") for each in modules if isinstance(each, ModuleType)]
    return (file for file in dict.fromkeys(files) if file is not None and file.endswith(".py") and is_script(file))
