"""Reference of what is written to disk and sent: classes of fields, read from their sources."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from website.tables import cell, code, table


class Field(NamedTuple):
    """A field of a class: its type and default as they are written, and its docstring."""

    name: str
    kind: str
    default: str
    text: str


class Described(NamedTuple):
    """A class with fields: its name, its bases, its docstring."""

    name: str
    bases: tuple[str, ...]
    text: str
    fields: list[Field]


def classes(path: Path) -> Iterator[Described]:
    """The public classes of a file, in order."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            bases = tuple(ast.unparse(base) for base in node.bases)
            yield Described(node.name, bases, ast.get_docstring(node) or "", list(_fields(node)))


def _fields(node: ast.ClassDef) -> Iterator[Field]:
    for each, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and not each.target.id.startswith("_"):
            match after:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    told = inspect.cleandoc(text)
                case _:
                    told = ""
            default = "" if each.value is None else ast.unparse(each.value)
            yield Field(each.target.id, ast.unparse(each.annotation), default, told)


def section(each: Described, level: int = 2) -> str:
    """A class with the table of its fields."""
    rows = [(code(field.name), code(field.kind), code(field.default), cell(field.text)) for field in each.fields]
    head = ("field", "type", "default", "meaning")
    used = [column for column in range(len(head)) if any(row[column] for row in rows)]
    shown = table([head[column] for column in used], [[row[column] for column in used] for row in rows])
    text = each.text.replace("<", "&lt;")
    return f"{'#' * level} {each.name}\n\n{text}\n\n{shown}"


def records(engine: Path) -> str:
    """The page of a job's records."""
    path = engine / "core" / "records.py"
    found = [each for each in classes(path) if each.name != "Record"]
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    index = table(("type", "meaning"), [(f"[{each.name}](#{each.name.lower()})", cell(_first(each))) for each in found])
    return "\n".join(["# Records\n", f"{text}\n", index, *(section(each) for each in found)])


def messages(engine: Path) -> str:
    """The page of the messages between the processes of a job, by module."""
    parts = [
        "# Messages\n",
        "Facts go up, from workers to agents to the coordinator; orders come down. Every message is a struct of "
        "msgspec, whose type is written in it. [Protocol](../protocol.md) says when each is sent.\n",
    ]
    for path in sorted((engine / "core" / "messages").glob("*.py")):
        found = list(classes(path))
        if path.name == "__init__.py" or not found:
            continue
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        parts.append(f"## {path.stem}\n\n{text}\n")
        parts += [section(each, 3) for each in found]
    return "\n".join(parts)


def _first(each: Described) -> str:
    return each.text.partition("\n\n")[0]
