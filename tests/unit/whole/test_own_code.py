"""Frames, files and types of regrow are told from a script's by one table, for all packages."""

import ast
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from tests.sources import PYTHONPATH, ROOT, SOURCE, SOURCES

from regrow.core.process import own_code
from regrow.core.process.own_code import is_own_file, is_own_name
from regrow.train.script.source import is_script

OURS = [source for source in SOURCES if source.name != "lz_penalty"]


@pytest.mark.parametrize("source", OURS, ids=lambda source: source.name)
def test_code_of_each_package_is_known_by_name_and_by_file(source: Path) -> None:
    assert is_own_name(source.name) and is_own_name(f"{source.name}.room.module")
    files = [path for path in source.rglob("*.py") if path.name != "__init__.py"]
    assert files and all(is_own_file(str(path)) and not is_script(str(path)) for path in files)


def test_code_of_others_is_not() -> None:
    assert not any(is_own_name(name) for name in ("regrowth", "regrow_recipes_of_mine", "mine.regrow", "lz_penalty"))
    others = [
        ROOT / "examples" / "02-ddp.py",
        ROOT / "packages" / "regrow" / "build_examples.py",
        SOURCE.with_name("regrowth") / "train.py",
        Path("/home/somebody/regrow/train.py"),
        Path("/home/somebody/regrow_recipes/train.py"),
    ]
    assert not any(is_own_file(str(path)) for path in others)
    assert all(is_script(str(path)) for path in others)


def test_a_package_that_is_reached_by_a_link_is_known_by_both_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real" / "regrow_recipes").mkdir(parents=True)
    (tmp_path / "real" / "regrow_recipes" / "__init__.py").touch()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    code = (
        "from regrow.core.process.own_code import own_folders; import sys\n"
        "print([each for each in own_folders() if 'regrow_recipes' in each])\n"
        "print(sorted(name for name in sys.modules if name.startswith('regrow_')))"
    )
    path = f"{tmp_path / 'link'}:{PYTHONPATH}"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True)
    shown = [f"{tmp_path}/{name}/regrow_recipes/" for name in ("link", "real")]
    assert done.stdout == f"{shown}\n[]\n", "and nothing was imported for it"


def test_a_folder_that_only_bears_the_name_or_a_finder_that_fails_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def find(name: str) -> ModuleSpec | None:
        if name == "regrow_lab":
            raise ValueError("regrow_lab.__spec__ is None")
        return ModuleSpec(name, None, is_package=True)

    monkeypatch.setattr("importlib.util.find_spec", find)
    assert own_code.own_folders.__wrapped__() == (f"{SOURCE}/",)


def test_a_script_beside_a_file_that_bears_a_packages_name_is_no_code_of_regrow(tmp_path: Path) -> None:
    (tmp_path / "regrow_lab.py").touch()
    code = "from regrow.core.process.own_code import is_own_file; print(is_own_file(r'%s'))"
    path = f"{tmp_path}:{SOURCE.parent}"
    done = subprocess.run(
        [sys.executable, "-c", code % (tmp_path / "train.py")], env={"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.stdout == "False\n", done.stderr


def literals(tree: ast.Module) -> bool:
    """True if something is compared with the engine's name, or with a set that has it."""
    places = [node for node in ast.walk(tree) if isinstance(node, ast.Compare | ast.Set)]
    return any(isinstance(each, ast.Constant) and each.value == "regrow" for node in places for each in ast.walk(node))


def test_no_other_file_of_the_engine_has_a_table_of_its_own() -> None:
    found = {
        path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py") if literals(ast.parse(path.read_text()))
    }
    assert found == {"core/process/own_code.py", "core/process/extras.py"}
    assert [path for path in SOURCE.rglob("*.py") if "regrow.__file__" in path.read_text()] == []


@pytest.mark.parametrize("room", ["adapters", "compat"])
def test_a_former_name_says_what_to_import_and_to_install(room: str) -> None:
    with pytest.raises(
        ImportError, match=rf"regrow_recipes\.{room} now: it comes with pip install .*regrow-recipes"
    ) as told:
        __import__(f"regrow.{room}.transformers")
    assert told.value.name == f"regrow.{room}"
