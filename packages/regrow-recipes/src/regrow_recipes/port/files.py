"""Reads the files of a script: the script, in any encoding, and the modules of its folder that it imports. Pure."""

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from regrow.core.errors import UsageError

_DEEP = 2
"""Depth of imports: the script's imports, and the imports of those."""
_MOST = 50


@dataclass(frozen=True)
class SourceText:
    """A Python file without normalization.

    Attributes:
        text: with its original line ends, and with its byte order mark if it has one.
        encoding: from its byte order mark or its coding line; UTF-8 without one.
    """

    text: str
    encoding: str


def read_source(path: Path) -> SourceText:
    """Read a file as Python does. Raises `UsageError`."""
    try:
        content = path.read_bytes()
        encoding = tokenize.detect_encoding(io.BytesIO(content).readline)[0].removesuffix("-sig")
        return SourceText(content.decode(encoding), encoding)
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        raise UsageError(f"the script {path} cannot be read: {error}", hint="give a file of Python") from error


def modules_beside(script: Path, text: str) -> dict[str, str]:
    """Texts, by path, of the modules in the script's folder that it imports, and that these import."""
    found: dict[str, str] = {}
    ahead, folder = [(text, _DEEP)], script.parent
    while ahead and len(found) < _MOST:
        inside, deep = ahead.pop(0)
        for name in _imported(inside):
            path = folder / name
            if str(path) in found or not path.is_file() or path == script:
                continue
            try:
                found[str(path)] = read_source(path).text
            except UsageError:
                continue
            if deep > 1:
                ahead.append((found[str(path)], deep - 1))
    return found


def _imported(text: str) -> Iterator[str]:
    """Possible paths of imported modules, in the script's folder or in a package of it."""
    try:
        tree = ast.parse(text.removeprefix("\ufeff"))
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module] if node.module else []
            names += [f"{node.module}.{each.name}" if node.module else each.name for each in node.names]
        for name in names:
            path = name.replace(".", "/")
            yield from (f"{path}.py", f"{path}/__init__.py")
