"""Tables of Markdown, and text within their cells."""

from collections.abc import Iterable, Sequence


def cell(text: object) -> str:
    """A text that may stand in a cell: one line, with bars and angle brackets as such."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def code(text: object) -> str:
    """A text between backticks, in a cell; the site's tables take a bar there as it is."""
    return f"`{' '.join(str(text).split())}`" if str(text) else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; its cells are ready. Empty without rows."""
    lines = [" | ".join(row) for row in rows]
    if not lines:
        return ""
    return "\n".join(f"| {line} |" for line in [" | ".join(head), " | ".join("---" for _ in head), *lines]) + "\n"
