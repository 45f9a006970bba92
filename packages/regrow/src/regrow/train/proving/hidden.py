"""State of a script that is not in Python attributes: torch's settings, objects written in C, hooks."""

import contextvars
import sqlite3
from collections.abc import Iterable, Iterator
from io import IOBase
from types import FunctionType, ModuleType

import torch
from torch import nn

from regrow.train.proving.digesting import digest_text
from regrow.train.proving.trace import SeenAround

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_SHORT = 60


def settings() -> Iterator[tuple[str, SeenAround]]:
    """Torch's global settings, which a script may change while it runs."""
    kind = "cpu"
    values = {
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.is_autocast_enabled()": torch.is_autocast_enabled(kind),
        "torch.get_autocast_dtype()": torch.get_autocast_dtype(kind),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
    }
    for name, value in values.items():
        yield name, SeenAround(digest_text(repr(value)), "switch", repr(value))


def hooks(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, SeenAround]]:
    """The hooks of protected modules, which are in no state dictionary."""
    for name, module in modules:
        for kind in _HOOKS:
            registered = getattr(module, kind, None) or {}
            named = ", ".join(getattr(each, "__name__", type(each).__name__) for each in registered.values())
            what = kind.strip("_").replace("_", " ")
            yield f"the {what} of {name}", SeenAround(digest_text(named), "hooks", named[:_SHORT] or "none")


def look(value: object) -> SeenAround | None:
    """Digest of an object written in C, by its own methods; None if the object is of no known kind."""
    if isinstance(value, contextvars.ContextVar):
        return SeenAround(digest_text(repr(value.get(None))), "context", repr(value.get(None))[:_SHORT])
    if isinstance(value, sqlite3.Connection):
        return SeenAround(digest_text(str(value.total_changes)), "database", f"{value.total_changes} changes")
    if isinstance(value, IOBase):
        if value.closed or not value.readable() or not value.seekable():
            return None
        return SeenAround(digest_text(str(value.tell())), "file", f"at {value.tell()}")
    if type(value).__module__ == "ctypes":
        number = repr(getattr(value, "value", None))
        return SeenAround(digest_text(number), "count", number[:_SHORT])
    if type(value).__module__ in ("_hashlib", "_md5", "_sha1", "_sha2", "_sha3", "_blake2"):
        said = getattr(value, "hexdigest", None)
        if callable(said):
            return SeenAround(digest_text(str(said())), "digest", str(said())[:8])
    return None


def put_in_place(path: str, module: ModuleType) -> Iterator[tuple[str, SeenAround]]:
    """Functions of a library's module whose name is not their own, like those that a script has patched."""
    for key, value in list(vars(module).items()):
        if isinstance(value, FunctionType) and key[:1] != "_" and value.__name__ != key:
            whole = f"{value.__module__}.{value.__qualname__}"
            yield f"{path}.{key}", SeenAround(digest_text(whole), "patched", whole[-_SHORT:])
