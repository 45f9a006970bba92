"""Attributes that objects keep in slots, which `vars` does not show."""

from collections.abc import Iterator
from types import MemberDescriptorType


def slots(path: str, value: object) -> Iterator[tuple[str, object]]:
    """By name, each as an attribute of `path`. Runs no code of the object's."""
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in [names] if isinstance(names, str) else list(names):
            member = vars(kind).get(name)
            if isinstance(member, MemberDescriptorType):
                try:
                    held = member.__get__(value)
                except AttributeError:  # not set
                    continue
                yield f"{path}.{name}", held
