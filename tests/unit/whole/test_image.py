"""The operator's image, by the text of its Dockerfile: nobody's root, and all that it imports."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
TEXT = re.sub(r"\\\n", " ", (ROOT / "deploy" / "Dockerfile").read_text())
LINES = [line.strip() for line in TEXT.splitlines() if line.strip() and not line.startswith("#")]


def needed(package: str, *extras: str) -> set[str]:
    """Names of the distributions that a package asks for."""
    project = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]
    asked = list(project["dependencies"])
    for extra in extras:
        asked += project["optional-dependencies"][extra]
    return {re.split(r"[^\w-]", each, maxsplit=1)[0].lower() for each in asked}


def test_the_image_has_what_its_packages_ask_for_and_no_torch() -> None:
    installed = {
        word for line in LINES if "pip install" in line for word in line.split() if word.isidentifier() or "-" in word
    }
    wanted = (needed("regrow") | needed("regrow-clusters", "kubernetes")) - {"regrow"}
    assert wanted - installed <= {"torch"} and "torch" not in installed, wanted - installed
    assert "./packages/regrow" in TEXT and "./packages/regrow-clusters" in TEXT


def test_it_runs_as_nobody_with_fixed_words_and_from_two_stages() -> None:
    words = [line.split(maxsplit=1)[0] for line in LINES]
    assert set(words) <= {"FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "ENTRYPOINT", "CMD"}, "no ADD, no VOLUME"
    assert words.count("FROM") == 2 and all(
        re.match(r"FROM \S+:\S+", line) for line in LINES if line.startswith("FROM")
    )
    (user,) = [line.split()[1] for line in LINES if line.startswith("USER")]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "a number, so that runAsNonRoot can be seen to hold"
    assert words.index("USER") < words.index("CMD") and "ENTRYPOINT []" in LINES
    environment = next(line for line in LINES if line.startswith("ENV"))
    assert "PYTHONDONTWRITEBYTECODE=1" in environment and "REGROW_HOME=/tmp/" in environment, "its root is read-only"
