"""Attributes that objects keep in slots, which `vars` does not show."""

from collections.abc import Iterator

from regrow.train.graphs.kinds import slot_values


def slots(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Values in an object's slots, each with its path as an attribute of `path`. Runs none of the object's code."""
    return ((f"{path}.{name}", held) for name, held in slot_values(value).items())
