"""Puts the examples that `regrow demo` trains into wheels and source distributions: they stand outside this package."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_EXAMPLES = ("gpt.py", "02-ddp.py")
_PLACES = {"wheel": "regrow/_examples", "sdist": "src/regrow/_examples"}


class Examples(BuildHookInterface[Any]):
    """Adds them, unless they are there: in a source distribution they already have their place."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it builds."""
        examples = Path(self.root).parents[1] / "examples"
        if version == "editable" or not (examples / _EXAMPLES[0]).is_file():
            return
        place = _PLACES[self.target_name]
        build_data["force_include"].update({str(examples / name): f"{place}/{name}" for name in _EXAMPLES})
