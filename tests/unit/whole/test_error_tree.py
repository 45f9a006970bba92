"""One error tree: exceptions that are caught outside their own file stand in `core/errors.py`."""

import ast
import builtins
import functools
from pathlib import Path

import pytest
from tests.sources import SOURCE, SOURCES

from regrow.core import errors
from regrow.core.errors import RegrowError

HOME = SOURCE / "core" / "errors.py"

ELSEWHERE = {
    "WorkerReleased": "an exit, not an error; it carries a message, and messages stand above the errors",
}
"""Exceptions of the engine that are caught outside their own file and stand elsewhere, each with the reason."""

NO_ERRORS = {"NotPlain", "TooLarge", "Rehearsed"}
"""Exceptions in the tree's file that end a search or a rehearsal."""

PUBLIC = [
    "RegrowError",
    "UsageError",
    "ProtocolError",
    "DeadlineExceeded",
    "CollectiveMisuse",
    "NotFinite",
    "StateError",
    "SetUpDiffers",
    "HydrationError",
    "CheckpointError",
    "DataError",
]
"""Errors that users may catch. A name comes here together with its documentation, and goes with a major version."""


@functools.cache
def parts(path: Path, _: int) -> list[ast.AST]:
    """All nodes of a file, which was written then."""
    return list(ast.walk(ast.parse(path.read_text())))


def nodes(path: Path) -> list[ast.AST]:
    return parts(path, path.stat().st_mtime_ns)


def exceptions(paths: list[Path]) -> dict[str, Path]:
    """Classes that are exceptions, by their bases' names, and the file of each."""
    known = {
        name for name, each in vars(builtins).items() if isinstance(each, type) and issubclass(each, BaseException)
    }
    classes = {
        node.name: (path, {ast.unparse(base).rpartition(".")[2] for base in node.bases})
        for path in paths
        for node in nodes(path)
        if isinstance(node, ast.ClassDef)
    }
    found: dict[str, Path] = {}
    while more := {
        name: path for name, (path, bases) in classes.items() if name not in found and bases & (known | set(found))
    }:
        found |= more
    return found


def caught(path: Path) -> set[str]:
    """Names in `except`, in `contextlib.suppress` and in `isinstance` of a file."""
    found: set[str] = set()
    for node in nodes(path):
        match node:
            case ast.ExceptHandler(type=ast.expr() as kinds):
                looked = [kinds]
            case ast.Call(func=ast.Attribute(attr="suppress") | ast.Name(id="suppress" | "isinstance"), args=looked):
                pass
            case _:
                continue
        found |= {each.id for part in looked for each in ast.walk(part) if isinstance(each, ast.Name)}
    return found


def strays(paths: list[Path], home: Path) -> set[str]:
    """Exceptions that are caught outside their own file, and do not stand in the tree's."""
    found = exceptions(paths)
    return {name for path in paths for name in caught(path) & set(found) if found[name] not in (path, home)}


def test_exceptions_that_are_caught_elsewhere_stand_in_one_file() -> None:
    engine = sorted(SOURCE.rglob("*.py"))
    assert len(exceptions(engine)) > 30
    assert strays(engine, HOME) == set(ELSEWHERE)


def test_a_stray_would_be_seen(tmp_path: Path) -> None:
    home, one, other = tmp_path / "errors.py", tmp_path / "one.py", tmp_path / "other.py"
    home.write_text("class Base(Exception): ...\n")
    one.write_text("class A(Base): ...\nclass B(OSError): ...\nclass C(Base): ...\ntry: ...\nexcept C: ...\n")
    other.write_text("with suppress(m.A, A): ...\ntry: ...\nexcept (Base, ValueError): ...\nisinstance(1, B | C)\n")
    assert strays([home, one, other], home) == {"A", "B", "C"}
    other.write_text("try: ...\nexcept Base: ...\n")
    assert strays([home, one, other], home) == set()


def test_all_errors_have_one_base_and_a_sentence() -> None:
    found = {
        name: each
        for name, each in vars(errors).items()
        if isinstance(each, type) and each.__module__ == errors.__name__
    }
    assert len(found) > 25
    assert {name for name, each in found.items() if not issubclass(each, RegrowError)} == NO_ERRORS
    assert [name for name, each in found.items() if not (each.__doc__ or "").split("\n")[0].endswith(".")] == []


def test_the_public_errors_are_frozen() -> None:
    assert [each.__name__ for each in errors.PUBLIC] == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_public_errors_say_cause_and_cure(name: str) -> None:
    error = getattr(errors, name)("the disk is full", hint="free some space")
    assert (error.cause, error.hint, str(error)) == (
        "the disk is full",
        "free some space",
        "the disk is full (free some space)",
    )


def test_exceptions_of_other_packages_that_are_caught_across_files_are_errors_of_regrow() -> None:
    """A specification that is refused is the operator's own answer to a user, and never leaves it."""
    others = [
        path
        for source in SOURCES
        if source not in (SOURCE, SOURCE.parent / "lz_penalty")
        for path in source.rglob("*.py")
    ]
    tree = exceptions([*others, HOME])
    classes = {
        node.name: {ast.unparse(base) for base in node.bases}
        for path in others
        for node in nodes(path)
        if isinstance(node, ast.ClassDef) and node.name in tree
    }
    ours = set(exceptions([HOME])) - NO_ERRORS

    def is_ours(name: str) -> bool:
        return name in ours or any(is_ours(base) for base in classes.get(name, ()))

    public = {name for name in strays(others, HOME) if not name.startswith("_")}
    assert {name for name in public if not is_ours(name)} <= {"SpecRefused"}
