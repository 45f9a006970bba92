"""Selects the samples that a rank reads at a step: in regrow's own order, or in that of the script's sampler."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from msgspec.structs import replace
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler
from torch.utils.data import DataLoader as TorchLoader

from regrow.core.errors import UsageError
from regrow.core.messages.data import OrderSpec, SourceSpec
from regrow.data.dataloader import DataLoader
from regrow.data.mixed import Mixture
from regrow.data.order import (
    DROP,
    KEEP,
    MIXTURE,
    OPAQUE,
    ORDERED,
    WRAP,
    Address,
    dealt,
    global_batch_of,
    keys_of,
    order_of,
    spec_seed,
    steps_per_epoch,
)
from regrow.data.seeding import Draw, derive, seed_everything

_EPOCHS_KEPT = 16
"""Epochs to keep: all shares of a node, as the producer alternates between them, and all micro-batches of a step."""


class Plan(Protocol):
    """Interface of a plan, which selects the samples that each share reads at each step."""

    spec: OrderSpec
    deals: bool
    """True if the order is the same for all ranks, and is divided among them."""

    def keys_at(self, step: int, rank: int, world: int) -> list[Address]:
        """The samples that share `rank` of `world` reads at `step`. Raises `UsageError` if there are none."""
        ...

    def epoch_at(self, rank: int, world: int) -> int:
        """Number of steps per epoch for this share; 0 if epochs do not end with a step."""
        ...

    def forget(self) -> None:
        """Drop the indices drawn from a sampler, so that they are drawn anew."""
        ...


class OrderedPlan:
    """An order of regrow's own: a function of the seed, for any step in constant time."""

    deals = True

    def __init__(self, spec: OrderSpec) -> None:
        self.spec = spec
        order_of(spec, 1)  # reports now, and not in the first step, that a data set is too small

    def keys_at(self, step: int, rank: int, world: int) -> list[Address]:
        """See `Plan.keys_at`."""
        return keys_of(self.spec, step, rank, world)

    def epoch_at(self, _rank: int, world: int) -> int:
        """See `Plan.epoch_at`."""
        return steps_per_epoch(self.spec, world)

    def forget(self) -> None:
        """Does nothing: no indices were drawn."""


class SampledPlan:
    """The order of the user's sampler: its batches of an epoch, one after another, epoch after epoch.

    count: number of batches per epoch for a share. batches: the batches of an epoch for a share. deals: the sampler is
    not aware of ranks. A start in the middle of an epoch costs one pass over the sampler's indices; no sample is read.
    """

    def __init__(
        self,
        spec: OrderSpec,
        count: Callable[[int, int], int],
        batches: Callable[[int, int, int], list[list[Any]]],
        *,
        deals: bool = False,
    ) -> None:
        self.spec, self.deals = spec, deals
        self._count = count
        self._batches = batches
        self._kept: OrderedDict[tuple[int, int, int], list[list[Any]]] = OrderedDict()

    def keys_at(self, step: int, rank: int, world: int) -> list[Address]:
        """See `Plan.keys_at`."""
        count = self._count(rank, world)
        if count < 1:
            raise UsageError(
                f"the sampler gives no whole batch an epoch to rank {rank} of {world}",
                hint="make batch_size smaller, set drop_last=False, or give it more samples",
            )
        epoch, place = divmod(step, count)
        batches = self._drawn(epoch, rank, world)
        if place >= len(batches) or len(batches) > count:
            raise UsageError(
                f"the sampler's len() promises {count} batches an epoch, but epoch {epoch} had {len(batches)}",
                hint="correct its __len__: the step decides the epoch by it",
            )
        return [(epoch, index) for index in batches[place]]

    def epoch_at(self, rank: int, world: int) -> int:
        """See `Plan.epoch_at`."""
        return self._count(rank, world)

    def forget(self) -> None:
        """See `Plan.forget`."""
        self._kept.clear()

    def _drawn(self, *key: int) -> list[list[Any]]:
        epoch, rank, world = key
        if (epoch, rank, world) not in self._kept:
            self._kept[epoch, rank, world] = self._batches(epoch, rank, world)
            if len(self._kept) > max(_EPOCHS_KEPT, world + 1):
                self._kept.popitem(last=False)
        self._kept.move_to_end((epoch, rank, world))
        return self._kept[epoch, rank, world]


def plan_of(loader: TorchLoader[Any], *, seed: int) -> Plan:
    """The plan for the loader's settings. Raises `UsageError` if it has no batches."""
    size = _size_of(loader.dataset)
    batch_sampler: Any = loader.batch_sampler
    if batch_sampler is None:
        raise UsageError(
            "the DataLoader of session.steps has batch_size=None, so it gives samples, not batches",
            hint="set batch_size, or give session.steps a callable fn(step) that returns a batch",
        )
    if not _chunks_its_sampler(batch_sampler, seed):
        return _plan_of_batch_sampler(batch_sampler, OrderSpec(OPAQUE, spec_seed(seed)), seed)
    sampler, batch_size, drop_last = batch_sampler.sampler, batch_sampler.batch_size, batch_sampler.drop_last
    constant, remainder = _options_of(loader, drop_last)
    spec = OrderSpec(
        OPAQUE, spec_seed(seed), batch_size=0 if constant else batch_size, global_batch=constant, remainder=remainder
    )
    if _takes_each_once(sampler, size):
        return OrderedPlan(_own_spec(loader.dataset, size, spec, shuffle=isinstance(sampler, RandomSampler)))
    if hasattr(sampler, "set_epoch"):
        return _plan_of_own_order(sampler, spec, seed)
    return _plan_of_dealt_order(sampler, spec, seed)


def _options_of(loader: TorchLoader[Any], drop_last: bool) -> tuple[int, str]:
    """The constant global batch (0 for none), and the use of an epoch's last samples: one of `REMAINDERS`."""
    remainder = DROP if drop_last else KEEP
    if isinstance(loader, DataLoader):
        return loader.global_batch_size or 0, loader.remainder or remainder
    return 0, remainder


def _own_spec(dataset: Any, size: int, spec: OrderSpec, *, shuffle: bool) -> OrderSpec:
    if isinstance(dataset, Mixture):
        sources = [SourceSpec(name, len(part)) for name, part in dataset.sources.items()]
        return replace(spec, kind=MIXTURE, sources=sources, shuffle=shuffle, weights=dataset.schedule, remainder=WRAP)
    return replace(spec, kind=ORDERED, sources=[SourceSpec(type(dataset).__name__, size)], shuffle=shuffle)


def _size_of(dataset: Any) -> int:
    try:
        size = len(dataset)
    except TypeError as error:
        raise UsageError(
            f"the data set of the DataLoader, {type(dataset).__name__}, has no len()",
            hint="give it __len__, or make it a torch IterableDataset",
        ) from error
    if size == 0:
        raise UsageError(
            f"the data set of session.steps, {type(dataset).__name__}, is empty", hint="look where it gets its samples"
        )
    return size


def _takes_each_once(sampler: Any, size: int) -> bool:
    if type(sampler) is SequentialSampler:
        return True
    return type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == size


def _plan_of_own_order(sampler: Any, spec: OrderSpec, seed: int) -> Plan:
    """The plan for a sampler that is aware of ranks and epochs: exactly its own order, for the session's place."""
    batch_size, drop_last = spec.batch_size, spec.remainder == DROP

    def count(rank: int, world: int) -> int:
        set_place(sampler, rank, world)
        return _batches_in(_length_of(sampler), batch_size, drop_last)

    def batches(epoch: int, rank: int, world: int) -> list[list[Any]]:
        set_place(sampler, rank, world)
        sampler.set_epoch(epoch)
        return list(_chunks(_drawn(sampler, seed, epoch), batch_size, drop_last))

    return SampledPlan(spec, count, batches)


def _plan_of_batch_sampler(batch_sampler: Any, spec: OrderSpec, seed: int) -> Plan:
    """The plan for the user's batch sampler, which gives this rank's batches and must distinguish ranks itself."""
    parts = [part for part in (batch_sampler, getattr(batch_sampler, "sampler", None)) if part is not None]

    def count(rank: int, world: int) -> int:
        for part in parts:
            set_place(part, rank, world)
        return _length_of(batch_sampler)

    def batches(epoch: int, rank: int, world: int) -> list[list[Any]]:
        for part in parts:
            set_place(part, rank, world)
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        _seed_drawing(batch_sampler, seed, epoch)
        return [list(batch) for batch in batch_sampler]

    return SampledPlan(spec, count, batches)


def _plan_of_dealt_order(sampler: Any, spec: OrderSpec, seed: int) -> Plan:
    """The plan for a sampler not aware of ranks (weighted, of a subset): one order, divided among the ranks."""
    constant, drop_last = spec.global_batch > 0, spec.remainder == DROP

    def of_all(world: int) -> int:
        return global_batch_of(batch_size=spec.batch_size, global_batch=spec.global_batch, shares=world)

    def count(_rank: int, world: int) -> int:
        return _batches_in(_length_of(sampler), of_all(world), drop_last)

    def batches(epoch: int, rank: int, world: int) -> list[list[Any]]:
        chunks = _chunks(_drawn(sampler, seed, epoch), of_all(world), drop_last)
        return [dealt(chunk, rank, world, constant=constant) for chunk in chunks]

    return SampledPlan(spec, count, batches, deals=True)


def _chunks_its_sampler(batch_sampler: Any, seed: int) -> bool:
    """True if a batch sampler only cuts its sampler's order into batches: torch's own, or one that acts the same."""
    if type(batch_sampler) is BatchSampler:
        return True
    if not isinstance(batch_sampler, BatchSampler) or hasattr(batch_sampler, "set_epoch"):
        return False
    sampler = getattr(batch_sampler, "sampler", None)
    size: Any = getattr(batch_sampler, "batch_size", None)
    if sampler is None or not isinstance(size, int) or size < 1:
        return False
    chunks = list(_chunks(_drawn(sampler, seed, 0), size, bool(getattr(batch_sampler, "drop_last", False))))
    _seed_drawing(sampler, seed, 0)
    return [list(batch) for batch in batch_sampler] == chunks


def set_place(sampler: Any, rank: int, world: int) -> None:
    """Set rank and world size of a sampler that is aware of ranks."""
    if isinstance(sampler, DistributedSampler):
        if (sampler.rank, sampler.num_replicas) != (rank, world):
            # Through its own constructor, which also recomputes the number of samples.
            DistributedSampler.__init__(
                sampler,
                sampler.dataset,
                num_replicas=world,
                rank=rank,
                shuffle=sampler.shuffle,
                seed=sampler.seed,
                drop_last=sampler.drop_last,
            )
        return
    for name, value in (("rank", rank), ("num_replicas", world)):
        if hasattr(sampler, name):
            setattr(sampler, name, value)


def _drawn(sampler: Any, seed: int, epoch: int) -> list[Any]:
    """All indices of an epoch, drawn at once, because reading samples in between would reseed the same generators."""
    _seed_drawing(sampler, seed, epoch)
    return list(sampler)


def _seed_drawing(sampler: Any, seed: int, epoch: int) -> None:
    seed_everything(Draw.SAMPLER, seed, epoch)
    generator = getattr(sampler, "generator", None)
    if generator is not None:
        generator.manual_seed(derive(Draw.SAMPLER, seed, epoch) & 0xFFFF_FFFF_FFFF_FFFF)


def _length_of(sampler: Any) -> int:
    try:
        return len(sampler)
    except TypeError as error:
        raise UsageError(
            f"the sampler of session.steps, {type(sampler).__name__}, has no len(), so a step has no epoch",
            hint="give it __len__",
        ) from error


def _batches_in(samples: int, batch_size: int, drop_last: bool) -> int:
    return samples // batch_size if drop_last else -(-samples // batch_size)


def _chunks(indices: list[Any], size: int, drop_last: bool) -> Iterator[list[Any]]:
    for i in range(_batches_in(len(indices), size, drop_last)):
        yield indices[i * size : (i + 1) * size]
