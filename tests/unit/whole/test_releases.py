"""Releases: rules for their contents, the first commands of READMEs, and pinned versions with their digests."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from releases.check import check, first_command, names_in, wrong_in_source, wrong_in_wheel
from tests.sources import PACKAGES, ROOT

from regrow.cli.tree import main

INFO = "regrow_x-1.dist-info"
WHEEL = [
    *("regrow_x/__init__.py", "regrow_x/py.typed", "regrow_x/a/b.py"),
    *(f"{INFO}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "licenses/LICENSE")),
]
SOURCE = [
    f"regrow_x-1/{name}"
    for name in (
        *("LICENSE", "PKG-INFO", "README.md", "pyproject.toml", ".gitignore"),
        *("src/regrow_x/__init__.py", "src/regrow_x/py.typed"),
    )
]
each_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)


def pinned(file: Path) -> dict[str, str]:
    """Versions by names, as pip compares them."""
    found = re.findall(r"^([\w.-]+)==([^\s;\\]+)", file.read_text(), re.M)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


def test_whole_releases_have_no_faults() -> None:
    assert wrong_in_wheel("regrow_x", WHEEL, commands=False) == []
    assert wrong_in_source("regrow_x", SOURCE) == []


@pytest.mark.parametrize(
    ("more", "less", "fault"),
    [
        (None, "regrow_x/py.typed", "regrow_x/py.typed is missing"),
        (None, f"{INFO}/licenses/LICENSE", f"{INFO}/licenses/LICENSE is missing"),
        ("tests/test_a.py", None, "tests/test_a.py is outside regrow_x"),
        ("regrow_x/tests/a.py", None, "regrow_x/tests/a.py is no file of a package"),
        ("regrow_x/test_a.py", None, "regrow_x/test_a.py is no file of a package"),
        ("regrow_x/a.pyc", None, "regrow_x/a.pyc is no file of a package"),
        ("regrow_x/notes.log", None, "regrow_x/notes.log is no file of a package"),
    ],
)
def test_a_fault_of_a_wheel_is_seen(more: str | None, less: str | None, fault: str) -> None:
    names = [name for name in [*WHEEL, more] if name and name != less]
    assert wrong_in_wheel("regrow_x", names, commands=False) == [fault]


def test_a_wheel_with_commands_announces_them() -> None:
    assert wrong_in_wheel("regrow_x", WHEEL, commands=True) == [f"{INFO}/entry_points.txt is missing"]


@pytest.mark.parametrize(
    ("more", "less", "fault"),
    [
        (None, "regrow_x-1/README.md", "README.md is missing"),
        ("regrow_x-1/tests/test_a.py", None, "tests/test_a.py is outside src/regrow_x"),
        ("regrow_x-1/src/regrow_x/conftest.py", None, "src/regrow_x/conftest.py is no file of a package"),
        ("other/a.py", None, "it has 2 folders at its top: other, regrow_x-1"),
    ],
)
def test_a_fault_of_a_source_distribution_is_seen(more: str | None, less: str | None, fault: str) -> None:
    assert wrong_in_source("regrow_x", [name for name in [*SOURCE, more] if name and name != less]) == [fault]


@each_package
def test_the_first_command_of_a_readme_is_there(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = first_command((package / "README.md").read_text()).split()
    if command[0] == "python":
        return  # run by `make dist`
    assert command[0] == "regrow"
    verbs = [word for word in command[1:3] if re.fullmatch(r"[a-z][a-z-]*", word)]
    assert main([*verbs, "--help"]) == 0
    assert f"Usage: regrow {' '.join(verbs)}" in capsys.readouterr().out


def test_the_digests_are_those_of_the_pinned_versions() -> None:
    versions, locked = pinned(ROOT / "requirements-dev.txt"), pinned(ROOT / "requirements-dev.lock")
    assert len(versions) > 50
    assert versions.pop("torch") and "torch" not in locked
    assert locked == versions, "make requirements-dev.lock anew: its first lines say how"


@pytest.mark.parametrize("file", ["requirements-dev.lock", "website/requirements.txt", "releases/requirements.txt"])
def test_every_pinned_file_has_a_digest(file: str) -> None:
    entries = re.split(r"\n(?=[\w.-]+==)", (ROOT / file).read_text())[1:]
    assert len(entries) > 20
    assert [entry for entry in entries if "--hash=sha256:" not in entry] == []
    assert "file:" not in (ROOT / file).read_text()


@pytest.mark.full
def test_releases_are_built_and_tried(tmp_path: Path) -> None:
    """All but `twine` and the demo, which `make dist` has too."""
    for package in PACKAGES:
        command = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path)]
        subprocess.run(command, cwd=package, check=True, timeout=300, capture_output=True)
    assert any(name.endswith("py.typed") for name in names_in(next(tmp_path.glob("regrow-*.whl"))))
    assert check(tmp_path, Path(sys.executable), untried={"regrow"}) == []
