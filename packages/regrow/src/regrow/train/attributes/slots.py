"""Attributes that objects keep in slots, which `vars` does not show."""

from collections.abc import Iterator

from regrow.train.graphs.kinds import slot_values


def slots(path: str, value: object) -> Iterator[tuple[str, object]]:
    """By name, each as an attribute of `path`. Runs no code of the object's."""
    return ((f"{path}.{name}", held) for name, held in slot_values(value).items())
