"""Distinguishes regrow's code from a script's: by the name of its package, and by the folder of its file.

One table for all packages of regrow, as code of any of them may run between a script and the engine. `lz_penalty` is
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
    """True if the module of this name belongs to regrow."""
    return module.partition(".")[0] in OWN_PACKAGES


def is_own_file(file: str) -> bool:
    """True if code in the file of this name belongs to regrow."""
    return file.startswith(own_folders())


@functools.cache
def own_folders() -> tuple[str, ...]:
    """The folders of the installed packages, with a separator at the end; nothing is imported to find them.

    A folder that is reached by a link has both names: files are named by the path by which they were imported.
    """
    found = {str(Path(os.path.abspath(__file__)).parents[2])}
    for name in OWN_PACKAGES - {"regrow"}:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):  # another finder's error, or a module of that name without a spec
            continue
        # A folder without `__init__.py`, or a file, of that name belongs to somebody else.
        if spec is None or spec.origin is None or not spec.has_location or spec.submodule_search_locations is None:
            continue
        found.add(os.path.dirname(os.path.abspath(spec.origin)))
    return tuple(sorted({os.path.join(each, "") for folder in found for each in (folder, str(Path(folder).resolve()))}))
