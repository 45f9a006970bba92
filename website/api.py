"""Reference of the names that users import; mkdocstrings reads their docstrings from the sources."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_FURTHER = ("regrow.data", "regrow.core.errors")
"""Modules below the packages whose public names are for users too."""


class Public(NamedTuple):
    """A public name, and the module that defines it."""

    name: str
    home: str

    @property
    def place(self) -> str:
        """Its full name where it is defined."""
        return f"{self.home}.{self.name}"


def exported(source: Path, module: str) -> list[Public]:
    """The public names of a module, each with the module that it comes from."""
    tree = ast.parse(_file_of(source, module).read_text(encoding="utf-8"))
    names = _names(tree)
    homes = {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level == 0
        for alias in node.names
    }
    found = []
    for name in names:
        home, original = homes.get(name, (module, name))
        if not name.startswith("__"):
            found.append(Public(original, _definition(source, home, original)))
    return found


def _names(tree: ast.Module) -> list[str]:
    """The names in `__all__` of a module, else the classes in its `PUBLIC`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List | ast.Tuple):
            target = ast.unparse(node.targets[0])
            if target == "__all__":
                return [str(each.value) for each in node.value.elts if isinstance(each, ast.Constant)]
            if target == "PUBLIC":
                return [ast.unparse(each) for each in node.value.elts]
    return []


def _file_of(source: Path, module: str) -> Path:
    base = source.parent.joinpath(*module.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def _definition(source: Path, module: str, name: str) -> str:
    """The module that defines a name: where a package only hands it on, the module behind it."""
    path = _file_of(source, module)
    if not path.is_file():
        return module
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and any(each.name == name for each in node.names):
            return _definition(source, node.module or module, name)
    return module


def modules(sources: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """Modules with public names."""
    for source in sources:
        yield source, source.name
        for module in _FURTHER:
            if module.startswith(source.name + ".") and _file_of(source, module).is_file():
                yield source, module


def pages(sources: Sequence[Path]) -> Mapping[str, str]:
    """Pages by their names below `reference/api`, one for each module."""
    found: dict[str, str] = {}
    seen: dict[str, str] = {}
    for source, module in modules(sources):
        names = exported(source, module)
        if not names:
            continue
        whole = "    options:\n      members: false\n      show_root_heading: false\n      show_root_toc_entry: false\n"
        parts = [f"# {module}\n", f"::: {module}\n{whole}"]
        for each in names:
            before = seen.setdefault(each.place, module)
            told = f"## {each.name}\n\nThe same as [{before}.{each.name}]({before}.md#{each.place}).\n"
            parts.append(f"::: {each.place}\n" if before == module else told)
        found[f"{module}.md"] = "\n".join(parts)
    return found
