"""The command that installs an extra of regrow, or a package beside regrow, in the way this copy was installed."""

import functools
import json
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlparse


@functools.cache
def install_line(extra: str = "", *, package: str = "regrow") -> str:
    """A `pip install` command for an extra, from the checkout that this copy came from or from the package index."""
    wanted = f"[{extra}]" if extra else ""
    folder, editable = _origin()
    beside = Path(folder) if package == "regrow" else Path(folder).parent / package
    if not folder or not (beside / "pyproject.toml").is_file():
        name = f"{package}{wanted}"
        return f"pip install {_quoted(name) if wanted else name}"
    return f"pip install {'-e ' if editable else ''}{_quoted(f'{beside}{wanted}')}"


def _quoted(word: str) -> str:
    return f"'{word}'"


def _origin() -> tuple[str, bool]:
    """Folder from which this copy was installed, and whether it is editable; an empty folder: from an index."""
    own = Path(__file__).parents[4]
    if (own / "pyproject.toml").is_file() and (own / "src" / "regrow").is_dir():
        return str(own), True
    try:
        # PEP 610: written by pip for a package from a folder or a URL.
        text = metadata.distribution("regrow").read_text("direct_url.json")
        address = urlparse(json.loads(text)["url"]) if text else None
    except (metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        return "", False
    folder = unquote(address.path) if address is not None and address.scheme == "file" else ""
    return (folder, False) if Path(folder, "pyproject.toml").is_file() else ("", False)
