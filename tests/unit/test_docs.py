"""What the documentation says of the code is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "regrow"
PAGES = sorted((ROOT / "docs").glob("*.md"))
LINKED = [*PAGES, *sorted((ROOT / "docs" / "decisions").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
CODE = {path: path.read_text() for path in SOURCE.rglob("*.py")}
FILES = [*CODE, *(ROOT / "tests").rglob("*.py")]


def has_method(owner: str, method: str) -> bool:
    """Whether some file has the class and, in it or below it, the method."""
    return any(
        re.search(rf"^class {owner}\b", text, re.M) and re.search(rf"^    (async )?def {method}\b", text, re.M)
        for text in CODE.values()
    )


def is_there(file: str) -> bool:
    """Whether a path is one of the source's, of the repository's, or the end of one of the source's or the tests'."""
    return (SOURCE / file).exists() or (ROOT / file).exists() or any(str(each).endswith("/" + file) for each in FILES)


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    named = set(re.findall(r"`([\w./]+\.py)`", page.read_text())) - {"train.py", "a.py"}
    assert sorted(file for file in named if not is_there(file)) == []


def test_every_method_on_the_way_of_a_fault_is_there() -> None:
    named = re.findall(r"`([A-Z]\w+)\.(\w+)`", (ROOT / "docs" / "architecture.md").read_text())
    assert len(named) > 15, "the way of a fault is not told by its methods any more"
    assert [f"{owner}.{method}" for owner, method in named if not has_method(owner, method)] == []


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
