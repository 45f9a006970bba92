"""Reads the source text of the running script, as far as that is possible."""

import ast
import functools
import linecache
import os
import sys
import sysconfig
from types import FrameType, ModuleType
from typing import Any

from regrow.core.process.own_code import own_folders

_LIBRARIES = tuple(
    os.path.join(folder, "")
    for folder in {sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_INSTALLED = tuple(f"{os.sep}{folder}{os.sep}" for folder in ("site-packages", "dist-packages"))
_texts: dict[str, str] = {}


@functools.lru_cache(maxsize=4096)
def is_script(file: str) -> bool:
    """True if code in this file is the script's own: not regrow's, an installed package's or the standard library's."""
    if any(folder in file for folder in _INSTALLED):
        return False  # also user-installed packages, and those of another environment on the path
    return not file.startswith((*_LIBRARIES, *own_folders(), "<frozen"))


def is_scripts(thing: type | ModuleType) -> bool:
    """True for a class or module that is the script's own."""
    name = "" if isinstance(thing, ModuleType) else thing.__module__
    module = thing if isinstance(thing, ModuleType) else sys.modules.get(name)
    file = vars(module).get("__file__") if isinstance(module, ModuleType) else None  # without its `__getattr__`
    return name == "__main__" or (isinstance(file, str) and is_script(file))


def modules_of_script() -> list[ModuleType]:
    """The modules that are the script's own."""
    return [each for each in list(sys.modules.values()) if type(each) is ModuleType and is_scripts(each)]


def text_of(file: str, module: dict[str, Any] | None = None) -> str:
    """A file's text as it was when it was first read, since later edits of the file do not run.

    Args:
        file: the file's name.
        module: variables of its module, whose loader may give the text if there is no file.
    """
    if file not in _texts:
        _texts[file] = "".join(linecache.getlines(file, module))
    return _texts[file]


def parsed(frame: FrameType) -> ast.Module | None:
    """The parsed source file of a frame; None if there is none, or it cannot be parsed."""
    return tree_of(text_of(frame.f_code.co_filename, frame.f_globals))


def tree_of(text: str) -> ast.Module | None:
    """Parse a text as Python; None if it is not Python, or nested too deeply."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def last_line(node: ast.stmt | ast.expr) -> int:
    """The last line of a statement or an expression."""
    return node.end_lineno or node.lineno
