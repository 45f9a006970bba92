"""Which samples a rank reads at a step: our own order, or that of the script's sampler."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Protocol

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from regrow.core.errors import UsageError
from regrow.data.order import GlobalOrder, padded, slice_for
from regrow.data.seeding import Draw, derive, seed_everything

Key = tuple[int, Any]
"""(epoch, index) of a sample: what the random numbers of its transforms depend on, besides the seed."""


class Plan(Protocol):
    """Which samples a rank reads from a step on."""

    def keys_from(self, step: int, rank: int, world: int) -> Iterator[list[Key]]:
        """One list of keys for `step` and each step after it, without end."""
        ...


class OrderedPlan:
    """Our own order, shuffled by the session's seed or as it stands; `batch_size` samples a rank."""

    def __init__(self, size: int, batch_size: int, *, seed: int, shuffle: bool, drop_last: bool) -> None:
        self._size = size
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._drop_last = drop_last

    def keys_from(self, step: int, rank: int, world: int) -> Iterator[list[Key]]:
        """As `Plan` says. Raises `UsageError` where the data set holds no global batch."""
        order = GlobalOrder(
            self._size, self._batch_size * world, seed=self._seed, shuffle=self._shuffle, drop_last=self._drop_last
        )
        return self._walk(order, step, rank, world)

    @staticmethod
    def _walk(order: GlobalOrder, step: int, rank: int, world: int) -> Iterator[list[Key]]:
        while True:
            epoch = order.epoch_of(step)
            yield [(epoch, index) for index in slice_for(padded(order.indices(step), world), rank, world)]
            step += 1


class SampledPlan:
    """The order of a sampler of the user's: its batches of an epoch, one after another, epoch after epoch.

    count: batches an epoch at a place. batches: those of an epoch at a place. To get into the middle of an epoch costs
    one pass over the sampler's indices; no sample is read for it.
    """

    def __init__(
        self, count: Callable[[int, int], int], batches: Callable[[int, int, int], Iterator[list[Any]]]
    ) -> None:
        self._count = count
        self._batches = batches

    def keys_from(self, step: int, rank: int, world: int) -> Iterator[list[Key]]:
        """As `Plan` says. Raises `UsageError` where an epoch has no batch."""
        count = self._count(rank, world)
        if count < 1:
            raise UsageError(
                f"the sampler gives no whole batch an epoch to rank {rank} of {world}",
                hint="make batch_size smaller, set drop_last=False, or give it more samples",
            )
        return self._walk(count, step, rank, world)

    def _walk(self, count: int, step: int, rank: int, world: int) -> Iterator[list[Key]]:
        epoch, place = divmod(step, count)
        while True:
            given = place
            for batch in islice(self._batches(epoch, rank, world), place, None):
                given += 1
                if given <= count:
                    yield [(epoch, index) for index in batch]
            if given != count:
                raise UsageError(
                    f"the sampler's len() promises {count} batches an epoch, but epoch {epoch} had {given}",
                    hint="correct its __len__: the step decides the epoch by it",
                )
            epoch, place = epoch + 1, 0


def plan_of(loader: DataLoader[Any], *, seed: int) -> Plan:
    """Which order the loader asks for. Raises `UsageError` where it has no batches."""
    size = _size_of(loader.dataset)
    batch_sampler = loader.batch_sampler
    if batch_sampler is None:
        raise UsageError(
            "the DataLoader of session.steps has batch_size=None, so it gives samples, not batches",
            hint="set batch_size, or give session.steps a callable fn(step) that returns a batch",
        )
    if type(batch_sampler) is not BatchSampler:
        return _plan_of_batch_sampler(batch_sampler, seed)
    sampler, batch_size, drop_last = batch_sampler.sampler, batch_sampler.batch_size, batch_sampler.drop_last
    if _takes_each_once(sampler, size):
        plan = OrderedPlan(size, batch_size, seed=seed, shuffle=isinstance(sampler, RandomSampler), drop_last=drop_last)
        plan.keys_from(0, 0, 1)  # a data set that is too small is reported here, not in the first step
        return plan
    if hasattr(sampler, "set_epoch"):
        return _plan_of_own_order(sampler, batch_size, drop_last, seed)
    return _plan_of_dealt_order(sampler, batch_size, drop_last, seed)


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


def _plan_of_own_order(sampler: Any, batch_size: int, drop_last: bool, seed: int) -> Plan:
    """A sampler that knows ranks and epochs: its order exactly, at the session's current place."""

    def count(rank: int, world: int) -> int:
        tell_place(sampler, rank, world)
        return _batches_in(_length_of(sampler), batch_size, drop_last)

    def batches(epoch: int, rank: int, world: int) -> Iterator[list[Any]]:
        tell_place(sampler, rank, world)
        sampler.set_epoch(epoch)
        return _chunks(_drawn(sampler, seed, epoch), batch_size, drop_last)

    return SampledPlan(count, batches)


def _plan_of_batch_sampler(batch_sampler: Any, seed: int) -> Plan:
    """A batch sampler of the user's gives this rank's batches; telling ranks apart is up to it."""
    parts = [part for part in (batch_sampler, getattr(batch_sampler, "sampler", None)) if part is not None]

    def count(rank: int, world: int) -> int:
        for part in parts:
            tell_place(part, rank, world)
        return _length_of(batch_sampler)

    def batches(epoch: int, rank: int, world: int) -> Iterator[list[Any]]:
        for part in parts:
            tell_place(part, rank, world)
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        _seed_drawing(batch_sampler, seed, epoch)
        return iter([list(batch) for batch in batch_sampler])

    return SampledPlan(count, batches)


def _plan_of_dealt_order(sampler: Any, batch_size: int, drop_last: bool, seed: int) -> Plan:
    """A sampler that knows no ranks (weighted, of a subset): the same order everywhere, dealt out to the ranks."""

    def count(_rank: int, world: int) -> int:
        return _batches_in(_length_of(sampler), batch_size * world, drop_last)

    def batches(epoch: int, rank: int, world: int) -> Iterator[list[Any]]:
        for chunk in _chunks(_drawn(sampler, seed, epoch), batch_size * world, drop_last):
            yield slice_for(padded(chunk, world), rank, world)

    return SampledPlan(count, batches)


def tell_place(sampler: Any, rank: int, world: int) -> None:
    """Tells a sampler that knows ranks where it stands now."""
    if isinstance(sampler, DistributedSampler):
        if (sampler.rank, sampler.num_replicas) != (rank, world):
            # Its own constructor: that also works out the number of samples anew.
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
    """All that the sampler gives in an epoch: at once, as reading samples in between would seed the same generators."""
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
