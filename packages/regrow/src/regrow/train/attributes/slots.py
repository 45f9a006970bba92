"""Attributes that objects keep in slots, which `vars` does not show."""

from collections.abc import Iterator


def slots(path: str, value: object) -> Iterator[tuple[str, object]]:
    """By name, each as an attribute of `path`."""
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in [names] if isinstance(names, str) else list(names):
            if isinstance(name, str) and name[:2] != "__" and hasattr(value, name):
                yield f"{path}.{name}", getattr(value, name)
