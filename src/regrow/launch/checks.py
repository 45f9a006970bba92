"""Checks of flags that several commands have."""

from regrow.core.config import duration
from regrow.core.errors import UsageError
from regrow.core.ids import Seconds


def in_range(flag: str, value: int, least: int, most: int | None = None) -> int:
    """The value. Raises `UsageError` where it is below `least` or above `most`."""
    if value < least or (most is not None and value > most):
        span = f"{least} or more" if most is None else f"from {least} to {most}"
        raise UsageError(f"{flag} {value} is out of range", hint=f"give {span}")
    return value


def some_time(flag: str, text: str, *, zero: bool = False) -> Seconds:
    """Seconds in a text such as `10min`. `zero`: none at all is one too. Raises `UsageError`, which names the flag."""
    try:
        seconds = duration(text)
    except UsageError as error:
        raise UsageError(f"{flag}: {error.cause}", hint=error.hint) from None
    if seconds <= 0 and not zero:
        raise UsageError(f"{flag} {text!r} is no time at all", hint="give more than 0 seconds")
    return seconds
