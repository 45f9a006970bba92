"""Distinguishes regrow's code from a script's: by the name of its package, and by the folder of its file.

One table covers all packages of regrow, since code of each may run between a script and the engine. `lz_penalty` is
not in it: it imports nothing of regrow, and is a library like any other to a script.
"""

import functools
import importlib.util
import os
from pathlib import Path
from typing import Final

OWN_PACKAGES: Final = frozenset(
    {"regrow", "regrow_batch", "regrow_clusters", "regrow_guests", "regrow_lab", "regrow_recipes"}
)
"""Import names of regrow's packages."""


def is_own_name(module: str) -> bool:
    """True if a module of this name belongs to regrow."""
    return module.partition(".")[0] in OWN_PACKAGES


def is_own_file(file: str) -> bool:
    """True if code in a file of this name belongs to regrow."""
    return file.startswith(own_folders())


@functools.cache
def own_folders() -> tuple[str, ...]:
    """Folders of regrow's installed packages, each with a separator at the end; found without importing the packages.

    A folder that is reached by a link is included under both names, because files are named by their import path.
    """
    found = {str(Path(os.path.abspath(__file__)).parents[2])}
    for name in OWN_PACKAGES - {"regrow"}:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):  # an error of another finder, or a module of that name without a spec
            continue
        # A folder without `__init__.py`, or a file, of that name is not regrow's.
        if spec is None or spec.origin is None or not spec.has_location or spec.submodule_search_locations is None:
            continue
        found.add(os.path.dirname(os.path.abspath(spec.origin)))
    return tuple(sorted({os.path.join(each, "") for folder in found for each in (folder, str(Path(folder).resolve()))}))
