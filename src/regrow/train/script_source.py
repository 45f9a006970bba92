"""The text of the script that is being run, as far as it can be read."""

import ast
import linecache
from types import FrameType


def parsed(frame: FrameType) -> ast.Module | None:
    """The source file of a call; None where there is none, or it is not Python."""
    try:
        return ast.parse("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))
    except (SyntaxError, ValueError):
        return None


def last_line(node: ast.stmt | ast.expr) -> int:
    """The line with which a statement or an expression ends."""
    return node.end_lineno or node.lineno
