"""Checks that the script exists before anything is started, without importing it."""

import shutil
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from regrow.core.config import Script
from regrow.core.errors import UsageError


def check_script(script: Script, preload: Sequence[str] = ()) -> None:
    """Look up the script and the modules of `--preload` in the same way as the workers will.

    Raises:
        UsageError: one of them does not exist or cannot be run.
    """
    if script.binary:
        if shutil.which(script.target) is None:
            raise UsageError(f"there is no program {script.target}", hint="check its path, and that it is executable")
    elif script.module:
        _check_module("-m", script.target, runs=True)
    else:
        check_names([str(Path(script.target).resolve())])
        _check_file(Path(script.target))
    for name in preload:
        _check_module("--preload", name, runs=False)


def check_names(arguments: Iterable[object]) -> None:
    """Check that all arguments of a command line, and folder names, can be sent to other processes as UTF-8.

    Raises:
        UsageError: one of them is not valid UTF-8, such as a file name in an older encoding.
    """
    for word in arguments:
        if isinstance(word, list | tuple):
            check_names(word)
        elif isinstance(word, str):
            shown = word.encode("utf-8", "backslashreplace").decode()
            if shown != word:
                raise UsageError(
                    f"{shown} is not in UTF-8", hint="rename it, or for the script's data name a link to it that is"
                )


def _check_file(path: Path) -> None:
    if path.is_dir():
        if not (path / "__main__.py").is_file():
            raise UsageError(f"{path} is a folder without a __main__.py", hint="name the script in it")
        return
    if not path.exists():
        raise UsageError(f"there is no script {path}", hint=f"looked from {Path.cwd()}; for a module, use -m")
    try:
        with path.open("rb"):
            return
    except OSError as error:
        raise UsageError(f"the script {path} cannot be read: {error.strerror or error}") from error


def _check_module(flag: str, name: str, *, runs: bool) -> None:
    spec = _find(name)
    if spec is None:
        raise UsageError(f"{flag} {name}: there is no such module", hint=f"python is {sys.executable}, in {Path.cwd()}")
    if runs and spec.submodule_search_locations is not None and _find(f"{name}.__main__") is None:
        raise UsageError(f"{flag} {name}: that package has no __main__", hint="name a module in it")


def _find(name: str) -> ModuleSpec | None:
    """A module's spec, found without importing the packages above it, which `find_spec` would import."""
    if not all(part.isidentifier() for part in name.split(".")):
        return None
    path: Sequence[str] | None = [str(Path.cwd()), *sys.path]
    spec: ModuleSpec | None = None
    for depth in range(1, name.count(".") + 2):
        part = ".".join(name.split(".")[:depth])
        spec = PathFinder.find_spec(part, path)
        if spec is None and depth == 1:
            spec = find_spec(part)  # built in, or found by an import hook, as in editable installs
        if spec is None:
            return None
        path = spec.submodule_search_locations or []
    return spec
