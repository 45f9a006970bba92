"""Describes a script's loader for the cache, and makes the source of its batches in this process."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data import DataLoader as TorchLoader

from regrow.core.errors import UsageError
from regrow.core.messages.data import OrderSpec
from regrow.data.dataloader import Cached, DataLoader
from regrow.data.fetched import Source
from regrow.data.inplace import InPlaceSource, is_in_place
from regrow.data.iteration import dealt_out, torch_iterates
from regrow.data.mapstyle import MapStyleSource
from regrow.data.order import OPAQUE
from regrow.data.sampling import set_place
from regrow.data.streams import CallableSource, IterableSource, SequenceSource


@dataclass(frozen=True)
class CachedLoader:
    """A script's loader whose batches may be cached on the node, with all that a cache must know of it.

    number: counts the script's loaders. map_style: True if its batches can be made for any step and share at any time,
    so ahead of training; else only by iterating up to them. parts: everything else that determines a batch, besides
    `spec`, `seed`, `version`, data set and `collate_fn`; in its state before the first batch, which is the same in all
    ranks.
    """

    loader: TorchLoader[Any]
    number: int
    version: str
    seed: int
    spec: OrderSpec
    map_style: bool
    parts: tuple[Any, ...] = ()

    @property
    def dataset(self) -> Any:
        """The script's data set."""
        return self.loader.dataset

    @property
    def collate_fn(self) -> Any:
        """The function that makes a batch from samples."""
        return self.loader.collate_fn

    def source(self, *, loader_workers: bool = True) -> MapStyleSource | IterableSource:
        """A new source that makes the batches in this process.

        loader_workers: True: with the loader's `num_workers`; False: in this process alone. An iterable loader always
        has its own workers, as its batches may depend on them.
        """
        if self.map_style:
            return MapStyleSource(self.loader, seed=self.seed, loader_workers=loader_workers)
        walked, dealt = dealt_out(self.loader, seed=self.seed) or (self.loader, None)
        return IterableSource(walked, seed=self.seed, dealt=dealt)


def cached_loader(loader: object, *, seed: int) -> CachedLoader | None:
    """Describe a `regrow.DataLoader` or a result of `regrow.cached` for a cache; None for anything else.

    Also None if batches are slices of a memory map: the page cache already is the node's cache.

    Raises `UsageError` if it has no batches.
    """
    if not isinstance(loader, DataLoader | Cached):
        return None
    inner = loader.loader if isinstance(loader, Cached) else loader
    map_style = torch_iterates(inner)
    if map_style and is_in_place(inner):
        return None
    spec = source_of(inner, seed=seed).spec
    parts = _parts_of(inner, spec, map_style)
    return CachedLoader(inner, loader.number, loader.version, seed, spec, map_style, parts)


def source_of(loader: object, *, seed: int) -> Source:
    """The source for this kind of loader; it makes batches in this process. Raises `UsageError` if it is no loader."""
    if isinstance(loader, Cached):
        loader = loader.loader
    if isinstance(loader, TorchLoader):
        if not torch_iterates(loader):
            walked, dealt = dealt_out(loader, seed=seed) or (loader, None)
            return IterableSource(walked, seed=seed, dealt=dealt)
        return InPlaceSource(loader, seed=seed) if is_in_place(loader) else MapStyleSource(loader, seed=seed)
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise UsageError(
            f"session.steps was given the data set {type(loader).__name__} itself, which has samples, not batches",
            hint="wrap it: regrow.DataLoader(dataset, batch_size=...)",
        )
    if not isinstance(loader, torch.Tensor | str | bytes | dict):
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


def _parts_of(loader: TorchLoader[Any], spec: OrderSpec, map_style: bool) -> tuple[Any, ...]:
    parts: list[Any] = [loader.worker_init_fn]
    if not map_style:
        # An iterable divides its samples among loader workers itself; and its batches are the loader's own.
        return (*parts, type(loader), loader.num_workers, loader.batch_size, loader.drop_last)
    if spec.kind != OPAQUE:
        return tuple(parts)
    samplers: tuple[Any, ...] = (getattr(loader.batch_sampler, "sampler", None), loader.batch_sampler)
    for sampler in samplers:
        if sampler is None or type(sampler) in (SequentialSampler, BatchSampler):
            continue
        if type(sampler) is RandomSampler:
            # Its generator is seeded for each epoch, and its data set is the loader's.
            parts += ["random", sampler.replacement, sampler.num_samples]
            continue
        set_place(sampler, 0, 1)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(0)
        parts.append(sampler)
    return tuple(parts)
