"""Batches of memory-mapped corpora, which each worker slices out of the map.

The page cache has the node's only copy. So nothing is made ahead, and there is no producer, cache entry or loader
worker: slicing costs less than fetching a batch from any of them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from regrow.data.fetched import Fetched, Place
from regrow.data.kept import Giving
from regrow.data.mixed import Mixture
from regrow.data.order import OPAQUE, Address, samples_digest
from regrow.data.sampling import plan_of
from regrow.data.tokens import PackedTokens
from regrow.data.walks import StepWalk, Walk


def is_in_place(loader: DataLoader[Any]) -> bool:
    """True if the loader's batches are plain slices of a map, made without any of the script's own code."""
    return loader.collate_fn is default_collate and loader.worker_init_fn is None and _is_mapped(loader.dataset)


def _is_mapped(dataset: Any) -> bool:
    if type(dataset) is Mixture:
        first, *others = dataset.sources.values()
        return _is_mapped(first) and all(_is_mapped(each) and each.window == first.window for each in others)
    # A subclass may change its samples.
    return type(dataset) is PackedTokens


class InPlaceSource:
    """Makes the batches of a loader for which `is_in_place` is true, in this process, for any step and share.

    Args:
        loader: the script's loader; its `num_workers` is ignored.
        seed: the session's seed.
    """

    giving = Giving.FRESH

    def __init__(self, loader: DataLoader[Any], *, seed: int) -> None:
        self._plan = plan_of(loader, seed=seed)
        self.spec = self._plan.spec
        self._dataset: Any = loader.dataset
        self._walk: Walk = StepWalk()
        self._keys: tuple[Place | None, list[Address]] = None, []
        """The place (step, share, shares) that is expected next, and its addresses."""
        self._pins = loader.pin_memory and torch.accelerator.is_available()

    def follow(self, walk: Walk) -> None:
        """Expect this order of fetches from now on, so that pages are read ahead."""
        self._walk = walk

    def seek(self, step: int, rank: int, world: int) -> None:
        """Ask the kernel to read the pages that `step` needs, if they are not in memory."""
        self._expect((step, rank, world))

    def fetch(self, step: int, rank: int, world: int) -> Fetched:
        """The batch of `step` for share `rank` of `world`. Raises `DataError` if the corpus is damaged."""
        place = (step, rank, world)
        keys = self._keys[1] if self._keys[0] == place else self._plan.keys_at(*place)
        batch = _read(self._dataset, [index for _, index in keys])
        self._expect(self._walk.after(place))
        if self._pins:
            batch = pin_memory(batch)  # type: ignore[no-untyped-call]
        return Fetched(batch, samples_digest(keys))

    def close(self) -> None:
        """Does nothing: there is nothing to release."""

    def _expect(self, place: Place) -> None:
        if self._keys[0] == place or self.spec.kind == OPAQUE:  # a script's sampler may have no next step
            return
        self._keys = place, self._plan.keys_at(*place)
        indices = [index for _, index in self._keys[1]]
        if type(self._dataset) is not Mixture:
            self._dataset.expect(indices)
            return
        for source, inside in _by_source(self._dataset, indices):
            source.expect([index for _, index in inside])


def _read(dataset: Any, indices: Sequence[Any]) -> Any:
    """The batch that `default_collate` would make of the samples at these indices."""
    if not indices:
        return default_collate([])  # raises the error that torch's loader raises
    if type(dataset) is not Mixture:
        return dataset.batch(indices)
    parts = [(inside, source.batch([index for _, index in inside])) for source, inside in _by_source(dataset, indices)]
    order = torch.argsort(torch.tensor([row for inside, _ in parts for row, _ in inside]))
    return {name: torch.cat([batch[name] for _, batch in parts])[order] for name in parts[0][1]}


def _by_source(mixture: Mixture, indices: Sequence[Any]) -> list[tuple[PackedTokens, list[tuple[int, int]]]]:
    """For each source in the batch: pairs of a row of the batch and the index of its sample in the source."""
    places = [mixture.place_of(index) for index in indices]
    found = []
    for number, source in enumerate(mixture.sources.values()):
        inside = [(row, at) for row, (of, at) in enumerate(places) if of == number]
        if inside:
            found.append((source, inside))
    return found
