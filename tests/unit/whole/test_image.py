"""The images of `deploy`, by the texts of their files: nobody's root, and all that the operator imports."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TEXT = re.sub(r"\\\n", " ", (ROOT / "deploy" / "Dockerfile").read_text())


def lines_of(text: str) -> list[str]:
    """A Dockerfile's, without comments."""
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def needed(package: str, *extras: str) -> set[str]:
    """Names of the distributions that a package asks for."""
    project = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]
    asked = list(project["dependencies"])
    for extra in extras:
        asked += project["optional-dependencies"][extra]
    return {re.split(r"[^\w-]", each, maxsplit=1)[0].lower() for each in asked}


def test_the_image_has_what_its_packages_ask_for_and_no_torch() -> None:
    installed = {
        word
        for line in lines_of(TEXT)
        if "pip install" in line
        for word in line.split()
        if word.isidentifier() or "-" in word
    }
    wanted = (needed("regrow") | needed("regrow-clusters", "kubernetes")) - {"regrow"}
    assert wanted - installed <= {"torch"} and "torch" not in installed, wanted - installed
    assert "./packages/regrow" in TEXT and "./packages/regrow-clusters" in TEXT


@pytest.mark.parametrize("name", ["Dockerfile", "training.Dockerfile"])
def test_it_runs_as_nobody_with_fixed_words_and_from_two_stages(name: str) -> None:
    lines = lines_of(re.sub(r"\\\n", " ", (ROOT / "deploy" / name).read_text()))
    words = [line.split(maxsplit=1)[0] for line in lines]
    assert set(words) <= {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "ENTRYPOINT", "CMD"}, "no ADD"
    assert [line for line in lines if line.startswith("FROM")] == ["FROM ${BASE} AS build", "FROM ${BASE}"]
    assert re.fullmatch(r"ARG BASE=\S+:\S+", lines[0]), "of both"
    (user,) = [line.split()[1] for line in lines if line.startswith("USER")]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "a number, so that runAsNonRoot can be seen to hold"
    assert words.index("USER") < words.index("CMD") and "ENTRYPOINT []" in lines
    environment = next(line for line in lines if line.startswith("ENV"))
    assert "PYTHONDONTWRITEBYTECODE=1" in environment and "REGROW_HOME=/tmp/" in environment, "its root is read-only"


def test_the_image_for_jobs_has_the_torch_that_regrow_is_tested_with() -> None:
    tested = re.search(r"^(torch==\S+)$", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE)
    assert tested is not None
    assert f"ARG TORCH={tested.group(1)}" in lines_of((ROOT / "deploy" / "training.Dockerfile").read_text())
