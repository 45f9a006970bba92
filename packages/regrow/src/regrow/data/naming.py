"""A loader's name for messages."""

import types

from torch.utils.data import DataLoader

from regrow.data.dataloader import Cached

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)


def name_of(loader: object) -> str:
    """A loader's name for messages: a function's own name, else that of its class. Never empty."""
    loader = loader.loader if isinstance(loader, Cached) else loader
    if isinstance(loader, DataLoader):
        return f"{type(loader).__name__} over {name_of(loader.dataset)}"
    named = loader if isinstance(loader, _FUNCTIONS) else type(loader)
    parts = (getattr(named, "__module__", None), getattr(named, "__qualname__", None))
    words = [part for part in parts if isinstance(part, str) and part not in ("", "__main__", "builtins")]
    return ".".join(words) or type(loader).__name__
