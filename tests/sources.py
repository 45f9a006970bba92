"""Places of the packages' sources. Tests that read them, or start processes that import them, ask here."""

import os
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
"""The repository."""
PACKAGES: Final = tuple(sorted(path.parent for path in (ROOT / "packages").glob("*/pyproject.toml")))
"""The folder of each package."""
SOURCES: Final = tuple(sorted(path for package in PACKAGES for path in (package / "src").iterdir() if path.is_dir()))
"""The import package of each."""
SOURCE: Final = ROOT / "packages" / "regrow" / "src" / "regrow"
"""The engine's."""
PYTHONPATH: Final = os.pathsep.join(str(path.parent) for path in SOURCES)
"""For processes that import any of them."""
