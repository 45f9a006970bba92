"""A Lightning `DataModule` whose loaders are cached. Imports neither `lightning` nor `pytorch_lightning`."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader

from regrow.core.errors import UsageError
from regrow.data.dataloader import Cached, DataLoader, cached

_LOADERS = frozenset({"train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"})
_OWN = frozenset({"_wrapped", "_version"})


class CachedDataModule:
    """Wraps a `LightningDataModule` so that its loaders are cached by `regrow.cached`.

    `train_dataloader()` and the like return a cached loader for each torch `DataLoader` of the wrapped module, also in
    lists, tuples and dicts; anything else, or cached already, is returned unchanged. Every other attribute is read from
    and set on the wrapped module, and `isinstance` finds its class, so a `Trainer` accepts the wrapper like the module,
    and `session.steps(module.train_dataloader())` works too. Works with any version of `lightning` or
    `pytorch_lightning`.

    Args:
        datamodule: the module to wrap.
        version: part of the cache's identity, as in `regrow.cached`.

    Raises `UsageError` if `datamodule` has no loaders.
    """

    _wrapped: Any
    _version: str

    def __init__(self, datamodule: Any, *, version: str = "") -> None:
        if isinstance(datamodule, type) or not any(hasattr(datamodule, name) for name in _LOADERS):
            what = datamodule.__name__ if isinstance(datamodule, type) else type(datamodule).__name__
            raise UsageError(
                f"{what} is no DataModule: it has no loaders", hint="give an object with train_dataloader()"
            )
        object.__setattr__(self, "_wrapped", datamodule)
        object.__setattr__(self, "_version", version)

    # A Trainer uses the class for isinstance, and its name as the key of the module's state in a checkpoint.
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._wrapped)

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:
            raise AttributeError(name)  # the wrapper is not constructed yet
        found = getattr(self._wrapped, name)
        return _caching(found, self._version) if name in _LOADERS else found

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._wrapped, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._wrapped, name)

    def __dir__(self) -> list[str]:
        return dir(self._wrapped)

    def __repr__(self) -> str:
        return f"CachedDataModule({self._wrapped!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(CachedDataModule, version=self._version), (self._wrapped,)


def _caching(method: Callable[[], Any], version: str) -> Callable[[], Any]:
    # Lightning checks `__wrapped__` to see if a module defines the method.
    @functools.wraps(method)
    def loaders() -> Any:
        return _each_cached(method(), version)

    return loaders


def _each_cached(loaders: Any, version: str) -> Any:
    if isinstance(loaders, TorchDataLoader):
        return loaders if isinstance(loaders, DataLoader) else cached(loaders, version=version)
    if isinstance(loaders, Cached):
        return loaders
    if isinstance(loaders, Mapping):
        return {key: _each_cached(value, version) for key, value in loaders.items()}
    if isinstance(loaders, list | tuple):
        return [_each_cached(value, version) for value in loaders]
    return loaders
