"""Wheels and source distributions of all packages: contents, metadata, and each of them in an empty environment."""

import email
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from tests.sources import PACKAGES, SOURCES

import regrow
from regrow.cli import elsewhere

EXAMPLES = {"regrow/_examples/02-ddp.py", "regrow/_examples/gpt.py"}
MODULES = {package.name: source for package, source in zip(PACKAGES, SOURCES, strict=True)}
each_package = pytest.mark.parametrize("name", MODULES)


def build(package: Path, folder: Path) -> tuple[Path, Path]:
    """A wheel and a source distribution, of a package in this folder."""
    (wheel,) = WheelBuilder(str(package)).build(directory=str(folder), versions=["standard"])
    (source,) = SdistBuilder(str(package)).build(directory=str(folder), versions=["standard"])
    return Path(wheel), Path(source)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("built")
    return {package.name: build(package, folder) for package in PACKAGES}


def contents(wheel: Path) -> dict[str, str]:
    """Digests of all files but those of metadata, by their names."""
    with zipfile.ZipFile(wheel) as file:
        return {each.filename: f"{each.CRC:x}" for each in file.infolist() if ".dist-info/" not in each.filename}


def metadata(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as file:
        (path,) = [each for each in file.namelist() if each.endswith(f".dist-info/{name}")]
        return file.read(path).decode()


@each_package
def test_a_wheel_has_all_of_the_package_and_nothing_else(name: str, built: dict[str, tuple[Path, Path]]) -> None:
    source = MODULES[name]
    files = {
        path.relative_to(source.parent).as_posix()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert f"{source.name}/py.typed" in files
    assert set(contents(built[name][0])) == files | (EXAMPLES if name == "regrow" else set())


@each_package
def test_a_wheel_of_the_source_distribution_has_the_same(
    name: str, built: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    wheel, source = built[name]
    with tarfile.open(source) as file:
        file.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    assert {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "src"} <= {path.name for path in unpacked.iterdir()}
    again, _ = build(unpacked, tmp_path)
    assert contents(again) == contents(wheel)


@each_package
def test_metadata_is_complete_and_there_is_one_version(name: str, built: dict[str, tuple[Path, Path]]) -> None:
    told = email.message_from_string(metadata(built[name][0], "METADATA"))
    assert (told["Name"], told["Version"], told["License-Expression"]) == (name, regrow.__version__, "Apache-2.0")
    assert told["Description-Content-Type"] == "text/markdown" and f"# {name}" in str(told.get_payload())
    required = [each for each in told.get_all("Requires-Dist", []) if each.startswith(("regrow", "lz-penalty"))]
    pinned = [each.partition(";")[0].rstrip() for each in required]
    assert all(each.endswith(f"=={regrow.__version__}") for each in pinned), "packages of other versions do not fit"
    assert bool(required) == (name not in ("regrow", "lz-penalty"))


def test_the_commands_that_packages_announce_are_those_that_the_engine_knows_of() -> None:
    announced: dict[str, str] = {}
    for package in PACKAGES:
        points = tomllib.loads((package / "pyproject.toml").read_text())["project"].get("entry-points", {})
        announced |= dict.fromkeys(points.get(elsewhere.GROUP, {}), package.name)
    assert announced == elsewhere.ELSEWHERE


class Environment:
    """An environment of Python's with nothing but what a test installs."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True)
        self._bin = folder / "bin"
        (self._packages,) = folder.glob("lib/python*/site-packages")

    def let_see(self, folder: Path, *, but: Collection[str] = ()) -> None:
        """Make the packages that others wrote importable: they are not installed again, as there is no network."""
        folder.mkdir()
        for place in filter(None, sys.path):
            if Path(place).name not in ("site-packages", "dist-packages"):
                continue
            for path in Path(place).iterdir():
                ours = re.match(r"_*(regrow|lz_penalty|__editable__)", path.name)
                if not ours and path.name not in but and path.suffix != ".pth" and not (folder / path.name).exists():
                    (folder / path.name).symlink_to(path)
        (self._packages / "others.pth").write_text(f"{folder}\n")

    def install(self, *wheels: Path) -> None:
        given = ["--no-index", "--no-deps", "--no-compile", "--quiet", "--disable-pip-version-check", *map(str, wheels)]
        command = [sys.executable, "-m", "pip", "--python", str(self._bin / "python"), "install", *given]
        subprocess.run(command, check=True, timeout=300)

    def run(self, program: str, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run a program of it, with no way to this repository. This user may have no home."""
        home = str(self._packages.parent / "home")
        return subprocess.run(
            [str(self._bin / program), *words],
            cwd=self._packages,
            env={"REGROW_HOME": home, "HOME": home, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
            capture_output=True,
            text=True,
            timeout=300,
        )


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Environment]:
    yield Environment(tmp_path / "environment")


def test_the_penalty_alone_needs_nothing(empty: Environment, built: dict[str, tuple[Path, Path]]) -> None:
    empty.install(built["lz-penalty"][0])
    code = "import lz_penalty; print(lz_penalty.examine([1, 2, 3, 4] * 20, hit_length_limit=True).degenerate)"
    done = empty.run("python", "-c", code)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_the_engine_alone_works_and_names_the_package_of_a_verb_that_is_not_there(
    empty: Environment, built: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    empty.install(built["regrow"][0])
    empty.let_see(tmp_path / "others")
    version = empty.run("regrow", "--version")
    assert (version.stdout, version.stderr) == (f"regrow, version {regrow.__version__}\n", "")
    shown = empty.run("regrow", "--help").stdout
    assert "Train:" in shown and "goodput" in shown and "regrow-" not in shown
    code = "from regrow.launch.demo import find_script; print(find_script().is_file())"
    assert empty.run("python", "-c", code).stdout == "True\n"
    for verb, package in (("batch", "regrow-batch"), ("slurm", "regrow-clusters"), ("train", "regrow-recipes")):
        done = empty.run("regrow", verb, "submit", "x")
        assert done.returncode == 2
        assert done.stderr == f"regrow: `regrow {verb}` comes with {package} (pip install {package})\n"
    former = empty.run("python", "-c", "import regrow.adapters.trl")
    assert former.stderr.endswith("regrow_recipes.adapters now: it comes with pip install regrow-recipes\n")


def test_all_together_have_their_commands(
    empty: Environment, built: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    empty.install(*(wheel for wheel, _ in built.values()))
    empty.let_see(tmp_path / "others")
    shown = empty.run("regrow", "--help").stdout
    for package in set(elsewhere.ELSEWHERE.values()):
        verbs = ", ".join(sorted(verb for verb, home in elsewhere.ELSEWHERE.items() if home == package))
        assert re.search(rf"^  {package} +{verbs}$", shown, re.M), shown
    code = (
        "from regrow.cli.tree import commands\n"
        "for verb in ('batch', 'k8s', 'operator', 'plan', 'port', 'recipes', 'sim', 'slurm', 'train'):\n"
        "    commands.main([verb, '--help'], standalone_mode=False)\n"
        "import regrow_batch\n"
        "print(regrow_batch.run_batch.__module__, regrow_batch.__file__)\n"
    )
    done = empty.run("python", "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage:") == 9
    assert "regrow_batch.job" in done.stdout and str(tmp_path) in done.stdout.splitlines()[-1]
    assert empty.run("regrow", "sim", "replay", "17").returncode == 0


def test_the_first_command_of_the_recipes_needs_the_engine_and_nothing_of_their_extras(
    empty: Environment, built: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    empty.install(built["regrow"][0], built["regrow-recipes"][0])
    empty.let_see(
        tmp_path / "others", but=("transformers", "peft", "lightning", "trl", "accelerate", "pyarrow", "yaml")
    )
    done = empty.run("regrow", "recipes", "list")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == ["pretrain", "full", "lora", "dpo", "grpo"]
    absent = empty.run("python", "-c", "from regrow_recipes.adapters.transformers import Trainer")
    assert "needs accelerate, which is not installed (pip install 'regrow-recipes[trainer]')" in absent.stderr
