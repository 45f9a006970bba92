"""Lays out the site: pages of the repository, and those made from the code. `python -m website.assemble FOLDER`.

FOLDER gets `pages/`, all in Markdown, and `mkdocs.yml`. Pages keep their text; links between them, and to other files
of the repository, are made to lead to pages of the site.
"""

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from website import api, commands, metrics, nav, structs
from website.links import links, relinked, with_plain_bars
from website.tables import cell, table

ROOT: Final = Path(__file__).resolve().parents[1]
OWN: Final = ROOT / "website" / "pages"
_OF_THE_ROOT = {
    "README.md": "index.md",
    "BENCHMARKS.md": "benchmarks.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
_LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".sh": "bash"}

_FOUND_FIRST = "---\nsearch:\n  boost: 4\n---\n\n"
"""Of a page that is to come before guides and decisions when its words are searched for."""


def sources() -> list[Path]:
    """The import package of each package, by folder; the engine first."""
    found = [path for path in ROOT.glob("packages/*/src/*") if path.is_dir() and not path.name.endswith(".egg-info")]
    return sorted(found, key=lambda path: (path.name != "regrow", path.name))


def written() -> dict[Path, str]:
    """Pages that people wrote: each file of the repository, and its place in the site."""
    found = {path: path.relative_to(ROOT / "docs").as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))}
    found |= {ROOT / name: place for name, place in _OF_THE_ROOT.items()}
    found |= {path: f"packages/{path.parent.name}.md" for path in sorted(ROOT.glob("packages/*/README.md"))}
    return found | {path: path.relative_to(OWN).as_posix() for path in sorted(OWN.rglob("*.md"))}


def generated() -> dict[str, str]:
    """Pages that are made from the code, by their places."""
    packages = sources()
    found = {f"reference/cli/{name}": text for name, text in commands.pages().items()}
    found |= {f"reference/api/{name}": text for name, text in api.pages(packages).items()}
    found["reference/records.md"] = structs.records(packages[0])
    found["reference/messages.md"] = structs.messages(packages[0])
    found["reference/metrics.md"] = metrics.metrics_page(packages)
    found["reference/environment.md"] = metrics.environment_page(packages)
    found |= {f"reference/resources/{name}": text for name, text in _resources().items()}
    found["decisions/index.md"] = _decisions()
    return found


def _resources() -> Mapping[str, str]:
    """Pages of Kubernetes' resources, where the package that has them is installed."""
    try:
        from regrow_clusters.operator.crd import crd
    except ImportError:
        return {}
    return {"trainingjob.md": metrics.resource_page(crd())}


def _decisions() -> str:
    rows = []
    for path in sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md")):
        first, _, rest = path.read_text(encoding="utf-8").partition("\n")
        status = rest.partition("Status: ")[2].partition("\n\n")[0]
        number, _, title = first.lstrip("# ").partition(". ")
        rows.append((path.name[:4], f"[{cell(title or number)}]({path.name})", cell(status)))
    return "# Decisions\n\nEach design decision that a newcomer would question, with its reason.\n\n" + table(
        ("number", "decision", "status"), rows
    )


def _place_of(target: Path, places: Mapping[Path, str], files: dict[str, Path]) -> str | None:
    """The place in the site of a file or folder of the repository; one that is no page gets one in `files`."""
    if target in places:
        return places[target]
    try:
        inside = target.relative_to(ROOT).as_posix()
    except ValueError:
        return None
    if not target.exists():
        return None
    if target.suffix in (".png", ".svg") and inside.startswith("docs/"):
        return inside.removeprefix("docs/")
    if target == ROOT / "docs" / "decisions":
        return "decisions/index.md"
    if inside.startswith("docs/decisions/") and target.is_file():
        return inside.removeprefix("docs/")
    place = f"files/{inside}.md"
    files[place] = target
    return place


def _linked(text: str, at: Path, place: str, places: Mapping[Path, str], files: dict[str, Path]) -> str:
    """A page's text, with links that hold within the site."""
    rename = {}
    for link in links(text):
        file, mark, anchor = link.partition("#")
        if not file:
            continue
        found = _place_of((at.parent / file).resolve(), places, files)
        if found is not None:
            rename[link] = os.path.relpath(found, Path(place).parent).replace(os.sep, "/") + mark + anchor
    return with_plain_bars(relinked(text, rename))


def _shown(target: Path, files: dict[str, Path]) -> str:
    """The page of a file that is no page, or of a folder."""
    name = target.relative_to(ROOT).as_posix()
    if target.is_dir():
        rows = []
        for path in sorted(target.iterdir()):
            if path.is_file() and path.suffix in _LANGUAGES:
                files[f"files/{path.relative_to(ROOT).as_posix()}.md"] = path
                rows.append((f"[{path.name}]({target.name}/{path.name}.md)", cell(_first_sentence(path))))
        return f"# {name.capitalize()}\n\n" + table(("file", "contents"), rows)
    language = _LANGUAGES.get(target.suffix, "text")
    return f"# {name}\n\n````{language}\n{target.read_text(encoding='utf-8').rstrip()}\n````\n"


def _first_sentence(path: Path) -> str:
    """The first line of a file that is meant for people."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if text := line.strip().lstrip("#").strip(' "'):
            return text
    return ""


def assemble(folder: Path) -> dict[str, str]:
    """All pages of the site by their places; they are written below `folder/pages`, the configuration beside them."""
    places = written()
    files: dict[str, Path] = {"files/examples.md": ROOT / "examples"}
    pages = {
        place: _linked(path.read_text(encoding="utf-8"), path, place, places, files) for path, place in places.items()
    }
    pages |= {place: _FOUND_FIRST * place.startswith("reference/") + text for place, text in generated().items()}
    done: set[str] = set()
    while waiting := sorted(set(files) - done):
        for place in waiting:
            pages[place] = _shown(files[place], files)
            done.add(place)
    shutil.rmtree(folder / "pages", ignore_errors=True)
    for place, text in pages.items():
        target = folder / "pages" / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    for picture in sorted((ROOT / "docs" / "images").iterdir()):
        (folder / "pages" / "images").mkdir(exist_ok=True)
        shutil.copyfile(picture, folder / "pages" / "images" / picture.name)
    shutil.copyfile(ROOT / "website" / "site.css", folder / "pages" / "site.css")
    (folder / "mkdocs.yml").write_text(_configuration(pages), encoding="utf-8")
    return pages


def _configuration(pages: Mapping[str, str]) -> str:
    """The configuration of mkdocs: the fixed part, the folders of sources, and the order of the pages."""
    text = (ROOT / "website" / "mkdocs.yml").read_text(encoding="utf-8")
    folders = json.dumps([str(path.parent) for path in sources()])
    return text.replace("[]  # sources", folders) + f"nav: {json.dumps(nav.ordered(pages))}\n"


def main(words: Sequence[str]) -> None:
    """Lay the site out in the folder that is named."""
    (folder,) = words
    assemble(Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
