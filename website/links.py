"""Links, headings and blocks of code in pages of Markdown."""

import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})[ \t]*([\w+-]*)[^\n]*$(.*?)^ {0,3}\1\s*$", re.M | re.S)
_INLINE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.S)
_HEADING = re.compile(r"^#{1,6} +(.*?) *#*$", re.M)
_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\()([^()\s]+)(\))")
_NAMED = re.compile(r"""<a (?:id|name)=["']([^"']+)["']""")


class Block(NamedTuple):
    """A fenced block: the language after the fence (may be empty), and the text."""

    language: str
    text: str


def blocks(page: str) -> list[Block]:
    """All fenced blocks of a page, in order."""
    return [Block(match.group(2), match.group(3).lstrip("\n")) for match in _FENCE.finditer(page)]


def prose(page: str) -> str:
    """A page without its blocks and without code between backticks: neither holds links."""
    return _INLINE.sub("", _FENCE.sub("", page))


def spans(page: str) -> list[str]:
    """Code between backticks, each on one line."""
    return [" ".join(match.group(2).split()) for match in _INLINE.finditer(_FENCE.sub("", page))]


def links(page: str) -> list[str]:
    """Targets of links and pictures that are relative: neither of the web nor of mail."""
    found = [match.group(2) for match in _LINK.finditer(prose(page))]
    return [target for target in found if not re.match(r"[a-z][a-z+.-]*:", target)]


def slug(heading: str) -> str:
    """The anchor of a heading, as hosts of repositories make it: lower case, `-` for each space, other signs gone."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
    text = unicodedata.normalize("NFC", text).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(page: str) -> set[str]:
    """Anchors of a page's headings, `-1`, `-2` after those that come again, and of `<a id>`."""
    seen: dict[str, int] = {}
    found = set()
    for match in _HEADING.finditer(_FENCE.sub("", page)):
        anchor = slug(match.group(1))
        times = seen.get(anchor, 0)
        seen[anchor] = times + 1
        found.add(f"{anchor}-{times}" if times else anchor)
    return found | set(_NAMED.findall(page))


def broken(path: Path) -> Iterator[str]:
    """Links of a file that lead to no file, or to no heading of a page."""
    page = path.read_text(encoding="utf-8")
    for link in links(page):
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.exists():
            yield f"{link}: no such file"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text(encoding="utf-8")):
            yield f"{link}: no such heading"


def relinked(page: str, rename: "dict[str, str]") -> str:
    """A page whose links have other targets; blocks of code stay as they are."""
    kept = [(match.start(), match.end()) for match in _FENCE.finditer(page)]

    def changed(match: "re.Match[str]") -> str:
        if any(start <= match.start() < end for start, end in kept):
            return match.group()
        return match.group(1) + rename.get(match.group(2), match.group(2)) + match.group(3)

    return _LINK.sub(changed, page)


def with_plain_bars(page: str) -> str:
    """A page whose code in tables has plain bars: hosts of repositories want them escaped, the site's tables do not."""
    lines = page.split("\n")
    return "\n".join(
        _INLINE.sub(lambda match: match.group().replace("\\|", "|"), line) if line.startswith("|") else line
        for line in lines
    )
