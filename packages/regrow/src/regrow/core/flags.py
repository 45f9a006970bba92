"""Types of command-line values that the commands of several packages take."""

import click

from regrow.core.config import duration
from regrow.core.errors import UsageError


class _Duration(click.ParamType[float]):
    name = "TIME"

    def convert(self, value: object, param: click.Parameter | None, context: click.Context | None) -> float:
        """Convert a text such as `90`, `500ms` or `10min` to seconds. Raises `click.BadParameter`."""
        try:
            return value if isinstance(value, float) else duration(str(value))
        except UsageError as error:
            self.fail(str(error), param, context)


class _Percent(click.ParamType[float]):
    name = "PERCENT"

    def convert(self, value: object, param: click.Parameter | None, context: click.Context | None) -> float:
        """Convert a text such as `0.02%` to a fraction of 1. Raises `click.BadParameter`."""
        if isinstance(value, float):
            return value
        text = str(value).strip()
        try:
            part = float(text.removesuffix("%")) / 100
        except ValueError:
            part = -1.0
        if not text.endswith("%") or not 0 <= part <= 1:
            self.fail(f"{text!r} is no percentage: write for example 0.02%", param, context)
        return part


TIME = _Duration()
PERCENT = _Percent()
