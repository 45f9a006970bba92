"""What a script gives to `session.steps`, as a function of the step."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from regrow.core.errors import UsageError
from regrow.data.kept import CopiedBatch, Giving, KeptBatch, WatchedBatch
from regrow.data.mapstyle import MapStyleSource
from regrow.data.streams import CallableSource, IterableSource, SequenceSource


class Source(Protocol):
    """One kind of loader."""

    giving: Giving

    def seek(self, step: int, rank: int, world: int) -> None:
        """Makes ready for `step` at this place; cheap where it is ready."""
        ...

    def fetch(self, step: int, rank: int, world: int) -> Any:
        """The batch of `step` for `rank` of `world`."""
        ...

    def close(self) -> None:
        """Ends what was opened."""
        ...


class StepLoader:
    """The batches of a script's loader by step: the same for the same (seed, step, rank, world), however often asked.

    loader: one of
      * a `DataLoader` over a map-style data set. `batch_size` is the rank's, the global batch is `batch_size * world`.
        With the stock random or sequential sampler the order is `GlobalOrder`'s with the session's seed; a sampler or
        batch sampler with `set_epoch` keeps its own order and is told rank, world and epoch; any other sampler is
        drawn with (seed, epoch) and dealt out to the ranks;
      * a callable `fn(step)` that returns a batch;
      * a sequence of batches, or any other iterable that is a function of the step.

    Asking seeds the global random generators: whoever needs them seeded afterwards does so. Raises `UsageError`
    for what is none of these or has no batches.
    """

    def __init__(self, loader: object, *, seed: int) -> None:
        self._source = source_of(loader, seed=seed)
        self._kept: KeptBatch | None = None
        self._kept_for: tuple[int, int, int] | None = None

    def batch(self, step: int, rank: int, world: int) -> Any:
        """The batch of `step` for `rank` of `world`; an exception of the data set's own passes through.

        Whatever the body did to a batch, asking for it again gives it as it was. Raises `UsageError` where the loader
        has no batch for the step any more.
        """
        again = self._kept_again(step, rank, world)
        if again is not None:
            return again[0]
        self._kept = self._kept_for = None
        batch = self._source.fetch(step, rank, world)
        keep = WatchedBatch if self._source.giving is Giving.FRESH else CopiedBatch
        self._kept, self._kept_for = keep(batch), (step, rank, world)
        return batch

    def seek(self, step: int, rank: int, world: int) -> None:
        """Makes ready for `step`, so that loader workers fetch it in time; does nothing where that is so."""
        if self._kept_for != (step, rank, world):
            self._source.seek(step, rank, world)

    def close(self) -> None:
        """Ends loader workers and waits for them. May be called twice."""
        self._kept = self._kept_for = None
        self._source.close()

    def _kept_again(self, step: int, rank: int, world: int) -> tuple[Any] | None:
        kept = self._kept
        if kept is None or self._kept_for is None or self._kept_for[0] != step:
            return None
        same_place = self._kept_for == (step, rank, world)
        if self._source.giving is Giving.ONCE or (same_place and kept.intact()):
            return (kept.again(),)
        return None


def source_of(loader: object, *, seed: int) -> Source:
    """The kind of loader that this is. Raises `UsageError` where it is none."""
    if isinstance(loader, DataLoader):
        # A subclass with an iteration of its own is asked to iterate: what it adds there is its point.
        stock = type(loader).__iter__ is DataLoader.__iter__
        if stock and not isinstance(loader.dataset, IterableDataset):
            return MapStyleSource(loader, seed=seed)
        return IterableSource(loader, seed=seed)
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise UsageError(
            f"session.steps was given the data set {type(loader).__name__} itself, which has samples, not batches",
            hint="wrap it: torch.utils.data.DataLoader(dataset, batch_size=...)",
        )
    if isinstance(loader, torch.Tensor | str | bytes | dict):
        raise UsageError(
            f"session.steps was given a {type(loader).__name__}, which is not a loader",
            hint="give it a DataLoader, a callable fn(step), or an iterable of batches",
        )
    if isinstance(loader, Sequence):
        return SequenceSource(loader)
    if isinstance(loader, Iterable | Iterator):
        return IterableSource(loader, seed=seed)
    if callable(loader):
        return CallableSource(loader, seed=seed)
    raise UsageError(
        f"session.steps was given a {type(loader).__name__}, which is not a loader",
        hint="give it a DataLoader, a callable fn(step), or an iterable of batches",
    )
