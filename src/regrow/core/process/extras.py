"""The line that installs an extra of regrow, for the way in which this copy was installed."""

import functools
import json
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlparse


@functools.cache
def install_line(extra: str) -> str:
    """`pip install` with an extra: from the checkout that this copy came from, or from the package index."""
    folder, editable = _origin()
    if not folder:
        return f"pip install 'regrow[{extra}]'"
    return f"pip install {'-e ' if editable else ''}'{folder}[{extra}]'"


def _origin() -> tuple[str, bool]:
    """The folder that this copy was installed from, and whether it is read there; no folder: from an index."""
    checkout = Path(__file__).parents[4]
    if (checkout / "pyproject.toml").is_file() and (checkout / "src" / "regrow").is_dir():
        return str(checkout), True
    try:
        # PEP 610: written by pip for what comes from a folder or an address.
        text = metadata.distribution("regrow").read_text("direct_url.json")
        address = urlparse(json.loads(text)["url"]) if text else None
    except (metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        return "", False
    folder = unquote(address.path) if address is not None and address.scheme == "file" else ""
    return (folder, False) if Path(folder, "pyproject.toml").is_file() else ("", False)
