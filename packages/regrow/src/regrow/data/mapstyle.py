"""Batches of a map-style data set: any step in constant time, made ahead if the user requested loader workers."""

import ctypes
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import xxhash
from torch.utils.data import DataLoader, Dataset

from regrow.core.errors import DataError
from regrow.data.fetched import Fetched, Place
from regrow.data.kept import Giving
from regrow.data.order import Address, samples_digest
from regrow.data.sampling import Plan, plan_of
from regrow.data.seeding import Draw, derive, seed_everything
from regrow.data.walks import StepWalk, Walk

_PR_SET_PDEATHSIG = 1


class _Read(NamedTuple):
    """Samples read so far and their addresses; an address is added after its sample was read."""

    addresses: list[Address]
    samples: Any


class KeyedDataset(Dataset[Any]):
    """A data set addressed by (epoch, index), whose random numbers depend only on the seed and that address.

    So a random transform of a sample gives the same result in every process and on every read.
    """

    def __init__(self, dataset: Any, seed: int, size: int) -> None:
        self.dataset = dataset
        self._seed = seed
        self._size = size

    def __getitem__(self, key: Address) -> Any:
        epoch, index = key
        seed_everything(Draw.SAMPLE, self._seed, epoch, _as_int(index))
        try:
            return self.dataset[index]
        except IndexError as error:
            self._explain(error, [index])
            raise

    def __getitems__(self, keys: list[Address]) -> _Read:
        """Read the samples of `keys`, and record their addresses."""
        read = _Read([], [])
        for key in keys:
            read.samples.append(self[key])
            read.addresses.append(key)
        return read

    def __getattr__(self, name: str) -> Any:
        # `get_worker_info().dataset` is this object: forward what a script's worker_init_fn looks up on it.
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def _explain(self, error: IndexError, indices: list[Any]) -> None:
        """Raise `DataError` if the data set has shrunk; otherwise add the requested samples to `error` as a note."""
        promised = [index for index in indices if isinstance(index, int | np.integer) and 0 <= index < self._size]
        if not promised:
            return
        name, now = type(self.dataset).__name__, len(self.dataset)
        if now < self._size:
            raise DataError(
                f"the data set {name} had {self._size} samples at the start and has {now} now: "
                f"sample {max(promised)} is gone",
                hint="give it back what it had, or start a new training: the order of samples depends on their number",
            ) from error
        asked = f"sample {promised[0]}" if len(promised) == 1 else f"a sample of {promised}"
        error.add_note(f"raised by the data set {name} for {asked}, though its len() is {now}")


class KeyedBatchDataset(KeyedDataset):
    """A `KeyedDataset` for a data set that reads a whole batch at once: one seed, from all addresses of the batch."""

    def __getitems__(self, keys: list[Address]) -> _Read:
        """Read the samples of `keys` with the data set's own `__getitems__`."""
        digest = derive(*(part for epoch, index in keys for part in (epoch, _as_int(index))))
        seed_everything(Draw.SAMPLE, self._seed, digest)
        indices = [index for _, index in keys]
        try:
            return _Read(keys, self.dataset.__getitems__(indices))
        except IndexError as error:
            self._explain(error, indices)
            raise


class _Collated:
    """Calls the script's `collate_fn` with the samples only, and returns the batch with the digest of their addresses.

    The result is a plain tuple, because torch's `pin_memory` pins the parts of one.
    """

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate_fn = collate_fn

    def __call__(self, read: Any) -> tuple[str, Any]:
        return samples_digest(read.addresses), self._collate_fn(read.samples)


class _Steps:
    """The batch sampler of regrow's loader: yields the addresses of each step from `start` on, without end."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.start: Place = (0, 0, 1)
        self.walk: Walk = StepWalk()

    def __iter__(self) -> Iterator[list[Address]]:
        place, walk = self.start, self.walk
        while True:
            yield self._plan.keys_at(*place)
            place = walk.after(place)


class MapStyleSource:
    """Makes the batches of a `DataLoader` over a map-style data set, with the samples that a plan selects.

    Keeps a pipeline prepared for the next step; a request for another step or place restarts it there, with the same
    loader workers.

    loader_workers: False makes all batches in this process and ignores the loader's `num_workers`.
    """

    giving = Giving.FRESH

    def __init__(self, loader: DataLoader[Any], *, seed: int, loader_workers: bool = True) -> None:
        plan = plan_of(loader, seed=seed)
        self.spec = plan.spec
        self._plan, self._steps = plan, _Steps(plan)
        self._original = loader
        self._dataset = keyed(loader, seed=seed)
        self._workers = loader.num_workers if loader_workers else 0
        self._loader: DataLoader[Any] | None = None
        self._iterator: Iterator[Any] | None = None
        self._ready_for: Place | None = None

    def follow(self, walk: Walk) -> None:
        """Fetch ahead in this order from now on; requests in another order are correct too, but must wait."""
        if walk != self._steps.walk:
            self._steps.walk, self._ready_for = walk, None

    def seek(self, step: int, rank: int, world: int) -> None:
        """Prepare for `step`, if that is not done yet. Without loader workers no sample is read."""
        self._opened(step, rank, world)

    def fetch(self, step: int, rank: int, world: int) -> Fetched:
        """The batch of `step` for share `rank` of `world`; exceptions of the data set pass through."""
        try:
            samples, batch = next(self._opened(step, rank, world))
        except BaseException:
            # The position of the pipeline after an error is unknown; the next call builds a new one.
            self.close()
            raise
        self._ready_for = self._steps.walk.after((step, rank, world))
        return Fetched(batch, samples)

    def read_again(self, step: int, rank: int, world: int) -> Fetched | None:
        """Make the same batch again: draw from the sampler and read the samples anew."""
        self._plan.forget()
        self._ready_for = None
        return self.fetch(step, rank, world)

    def goes_on(self) -> bool:
        """False: samples are read by address, so a second read cannot continue the first."""
        return False

    def close(self) -> None:
        """End the loader workers and wait for them."""
        iterator, self._iterator, self._loader, self._ready_for = self._iterator, None, None, None
        end_workers(iterator)

    def _opened(self, step: int, rank: int, world: int) -> Iterator[Any]:
        if self._iterator is not None and self._ready_for == (step, rank, world):
            return self._iterator
        self._ready_for = None
        self._steps.start = (step, rank, world)
        if self._loader is None:
            self._loader = pipeline_of(self._original, self._dataset, self._steps, workers=self._workers)
        self._iterator = iter(self._loader)
        self._ready_for = (step, rank, world)
        return self._iterator


def end_workers(iterator: Iterator[Any] | None) -> None:
    """End the worker processes of a `DataLoader`'s iterator, if it has any.

    torch itself does so when the iterator is garbage-collected, which a stored traceback may delay.
    """
    shutdown = getattr(iterator, "_shutdown_workers", None)
    if shutdown is not None:
        shutdown()


def end_workers_of(loader: DataLoader[Any]) -> None:
    """End the workers of the iterator that a loader keeps with `persistent_workers`, so that it is not reused.

    The next pass starts new workers, without state of the last pass, as in a rank that joins at that point.
    """
    kept, vars(loader)["_iterator"] = vars(loader).get("_iterator"), None
    end_workers(kept)


def keyed(loader: DataLoader[Any], *, seed: int) -> KeyedDataset:
    """Wrap the user's data set so that it is addressed by (epoch, index)."""
    made = KeyedBatchDataset if hasattr(loader.dataset, "__getitems__") else KeyedDataset
    return made(loader.dataset, seed, len(loader.dataset))  # type: ignore[arg-type]  # a plan has found a len()


def pipeline_of(
    loader: DataLoader[Any],
    dataset: Dataset[Any],
    batches: Iterable[list[Address]],
    *,
    workers: int,
    pin_memory: bool = True,
) -> DataLoader[Any]:
    """The user's loader with regrow's batch sampler: yields each batch with the digest of its samples' addresses.

    workers: loader workers, which run until `end_workers`. pin_memory: False: never pin, whatever the loader's setting.
    """
    return DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=_Collated(loader.collate_fn),
        pin_memory=loader.pin_memory and pin_memory,
        timeout=loader.timeout if workers else 0,
        worker_init_fn=_WorkerInit(loader.worker_init_fn),
        multiprocessing_context=loader.multiprocessing_context if workers else None,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor if workers else None,
        persistent_workers=workers > 0,
    )


class _WorkerInit:
    """Runs in each loader worker, and makes it end with the job's worker that started it, even if that is killed."""

    def __init__(self, after: Callable[[int], None] | None) -> None:
        self._after = after

    def __call__(self, worker_id: int) -> None:
        # On other systems, or if the call is refused, torch's own watchdog ends it within seconds.
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if self._after is not None:
            self._after(worker_id)


def _as_int(index: Any) -> int:
    return index if isinstance(index, int) else xxhash.xxh3_128_intdigest(repr(index).encode())
