"""Code that the documentation names is there."""

import re
import tomllib
from pathlib import Path

import pytest
from tests.sources import PACKAGES, ROOT, SOURCE, SOURCES

PAGES = sorted((ROOT / "docs").glob("*.md"))
OVERVIEWS = [ROOT / name for name in ("README.md", "AGENTS.md", "BENCHMARKS.md", "CHANGELOG.md", "CONTRIBUTING.md")]
LINKED = [*PAGES, *sorted((ROOT / "docs" / "decisions").glob("*.md")), *OVERVIEWS]
CODE = {path: path.read_text() for source in SOURCES for path in source.rglob("*.py")}
FILES = [*CODE, *(ROOT / "tests").rglob("*.py"), *ROOT.glob("packages/*/tests/*.py"), ROOT / "conftest.py"]


def has_method(owner: str, method: str, file: str) -> bool:
    """True if a file (any, if none is named) has the class and, in it or below it, the method."""
    texts = CODE.values() if not file else [CODE[SOURCE / file]]
    return any(
        re.search(rf"^class {owner}\b", text, re.M) and re.search(rf"^    (async )?def {method}\b", text, re.M)
        for text in texts
    )


def is_there(file: str) -> bool:
    """True if a path is one of the source's, of the repository's, or the end of one of the source's or the tests'."""
    return (SOURCE / file).exists() or (ROOT / file).exists() or any(str(each).endswith("/" + file) for each in FILES)


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    named = set(re.findall(r"`([\w./]+\.py)`", page.read_text())) - {"train.py", "a.py"}
    assert sorted(file for file in named if not is_there(file)) == []


def test_every_method_on_the_way_of_a_fault_is_there() -> None:
    """One that is followed by a file in brackets is in that file."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`([A-Z]\w+)\.(\w+)`(?:\s+\(`([\w/]+\.py)`)?", text)
    assert len(named) > 25, "the way of a fault is not told by its methods any more"
    assert sum(bool(file) for _, _, file in named) > 12
    assert [f"{owner}.{method}" for owner, method, file in named if not has_method(owner, method, file)] == []
    functions = re.findall(r"`([a-z]\w+)`\s+\(`([\w/]+\.py)`", text)
    assert len(functions) >= 2
    assert [name for name, file in functions if not re.search(rf"^def {name}\b", CODE[SOURCE / file], re.M)] == []


def test_every_call_on_the_way_of_a_lost_pod_is_there_and_they_are_few() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    section = page.split("## A lost pod, through the code")[1].split("\n## ")[0]
    assert 0 < len(re.findall(r"^\d+\. ", section, re.M)) <= 12
    named = re.findall(r"`([A-Z]\w+)\.(\w+)`", section)
    assert len(named) > 7
    assert [f"{owner}.{method}" for owner, method in named if not has_method(owner, method, "")] == []


def test_the_way_into_the_code_names_every_room_and_every_page() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    folders = [path.parent for path in CODE if path.name == "__init__.py" and path.parent != SOURCE]
    # The engine's rooms by their own names, other packages' with the package's name before them.
    rooms = [
        next(
            folder.relative_to(source if source == SOURCE else source.parent).as_posix()
            for source in SOURCES
            if source in (folder, *folder.parents)
        )
        for folder in folders
    ]
    assert len(rooms) > 40
    # A room in a room may be named beside it; one that is named by the file to open first is found too.
    missing = [
        room for room in rooms if not re.search(rf"`({room}|{room.rpartition('/')[2]})/`|`{room}/\w+\.py`", text)
    ]
    assert missing == []
    assert [page.name for page in PAGES if page.name != "architecture.md" and f"({page.name})" not in text] == []


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", page.read_text()) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_way_into_the_code_is_short() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    glossary = text.partition("## Glossary")[2]
    assert len(text.splitlines()) <= 150
    assert 10 <= len(re.findall(r"^\| ", glossary, re.M)) - 2 <= 30


def test_every_decision_says_whether_it_is_in_force() -> None:
    decisions = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert len(decisions) > 30
    third = {path.name: path.read_text(encoding="utf-8").split("\n")[2] for path in decisions}
    assert [name for name, line in third.items() if not line.startswith("Status: ")] == []


def test_the_first_page_is_short_and_has_its_proof_at_the_top() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert any("torchrun" in line for line in lines[:15]), "one row of proof comes before all else"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_every_link_of_a_packages_page_leads_somewhere(package: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", (package / "README.md").read_text()) if "://" not in link]
    assert [link for link in links if not (package / link).exists()] == []


def test_every_figure_has_a_day_and_a_command_that_is_there() -> None:
    text = (ROOT / "BENCHMARKS.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    figures = [row for row in rows if len(row) == 6 and row[0] not in ("what", "---")]
    assert len(figures) > 30
    assert [row[0] for row in figures if not re.fullmatch(r"20\d\d-\d\d-\d\d", row[4])] == []
    assert [
        row[0] for row in figures if not re.fullmatch(r"the same|`(\.\.\.|benchmarks/\w+\.py)( .*)?`", row[5])
    ] == []
    scripts = set(re.findall(r"benchmarks/\w+\.py", text))
    assert [script for script in sorted(scripts) if not (ROOT / script).exists()] == []


def test_fragments_of_news_are_named_by_the_kind_of_change() -> None:
    kinds = [
        each["directory"] for each in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]["type"]
    ]
    fragments = [path for path in sorted((ROOT / "news").iterdir()) if path.name != "README.md"]
    wrong = [path.name for path in fragments if not re.fullmatch(rf"[\w-]+\.({'|'.join(kinds)})\.md", path.name)]
    assert wrong == []
    assert [path.name for path in fragments if not path.read_text().strip().endswith(".")] == []


def test_ten_pairs_show_the_tone_of_the_prose() -> None:
    pairs = (ROOT / "CONTRIBUTING.md").read_text().partition("| before | after |")[2].partition("\n\n")[0]
    after = [line.split("|")[2].strip() for line in pairs.splitlines()[2:]]
    assert len(after) == 10
    assert [text for text in after if re.match(r"(What|Which|How|Who|Whether|So)\b", text)] == []
