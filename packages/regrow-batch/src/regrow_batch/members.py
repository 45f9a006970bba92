"""Parses a list of workers: addresses, each with an optional cap. Pure."""

from urllib.parse import urlsplit

from regrow.core.errors import UsageError


def address(text: str, source: str) -> str:
    """A worker's base address in normal form. Raises `UsageError` that names the source."""
    text = text.strip().rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(text)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound:
        raise UsageError(f"{source}: {text!r} is not the address of a worker", hint="write http://host:port")
    return text


def read_list(text: str, source: str) -> dict[str, int]:
    """Workers of a file: one address a line, an optional `cap=8` behind it, comments after `#`.

    Raises `UsageError` that names the line.
    """
    found: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        place = f"{source}, line {number}"
        cap = 0
        for word in words[1:]:
            name, _, value = word.partition("=")
            if name != "cap" or not value.isdecimal() or not int(value):
                raise UsageError(f"{place}: {word!r} is not understood", hint="write http://host:port cap=8")
            cap = int(value)
        found[address(words[0], place)] = cap
    return found


def read_workers(text: str) -> dict[str, int]:
    """Workers of a comma-separated list."""
    return {address(word, "--workers"): 0 for word in text.split(",") if word.strip()}
