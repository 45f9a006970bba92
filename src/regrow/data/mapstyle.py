"""Batches of a map-style data set: any step in constant time, ahead of time where the user asked for loader workers."""

import ctypes
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import xxhash
from torch.utils.data import DataLoader, Dataset

from regrow.data.kept import Giving
from regrow.data.sampling import Key, Plan, plan_of
from regrow.data.seeding import Draw, derive, seed_everything
from regrow.data.walks import Place, StepWalk, Walk

_PR_SET_PDEATHSIG = 1


class KeyedDataset(Dataset[Any]):
    """A data set addressed by (epoch, index), whose random numbers depend on the seed and that address only.

    So a random transform gives the same in whichever process and however often a sample is read.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self._seed = seed

    def __getitem__(self, key: Key) -> Any:
        epoch, index = key
        seed_everything(Draw.SAMPLE, self._seed, epoch, _as_int(index))
        return self.dataset[index]

    def __getattr__(self, name: str) -> Any:
        # `get_worker_info().dataset` is this object: what a script's worker_init_fn looks up there is the data set's.
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


class KeyedBatchDataset(KeyedDataset):
    """The same for a data set that reads a whole batch at once: one seed from all addresses of the batch."""

    def __getitems__(self, keys: list[Key]) -> Any:
        """The samples of `keys`, as the data set's own `__getitems__` gives them."""
        digest = derive(*(part for epoch, index in keys for part in (epoch, _as_int(index))))
        seed_everything(Draw.SAMPLE, self._seed, digest)
        return self.dataset.__getitems__([index for _, index in keys])


class _Steps:
    """The batch sampler of our loader: the keys from `start` on."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.start: Place = (0, 0, 1)
        self.walk: Walk = StepWalk()

    def __iter__(self) -> Iterator[list[Key]]:
        return self.walk.keys(self._plan, self.start)


class MapStyleSource:
    """Batches of a `DataLoader` over a map-style data set, its samples chosen by a plan.

    Keeps a pipeline that is ready for the next step; another step or place moves it there, which with loader workers
    reuses their processes.
    """

    giving = Giving.FRESH

    def __init__(self, loader: DataLoader[Any], *, seed: int) -> None:
        self._steps = _Steps(plan_of(loader, seed=seed))
        self._original = loader
        self._seed = seed
        self._loader: DataLoader[Any] | None = None
        self._iterator: Iterator[Any] | None = None
        self._ready_for: Place | None = None

    def follow(self, walk: Walk) -> None:
        """From now on, batches are fetched in this order; another order is right too, but not ahead of time."""
        if walk != self._steps.walk:
            self._steps.walk, self._ready_for = walk, None

    def seek(self, step: int, rank: int, world: int) -> None:
        """Makes ready for `step`; does nothing where it is ready. Without loader workers no sample is read."""
        self._opened(step, rank, world)

    def fetch(self, step: int, rank: int, world: int) -> Any:
        """The batch of `step` at this place; what the data set raises passes through."""
        try:
            batch = next(self._opened(step, rank, world))
        except BaseException:
            # Where the pipeline stands after an error is not known; the next call builds a new one.
            self.close()
            raise
        self._ready_for = self._steps.walk.after((step, rank, world))
        return batch

    def close(self) -> None:
        """Ends the loader workers and waits for them."""
        iterator, self._iterator, self._loader, self._ready_for = self._iterator, None, None, None
        end_workers(iterator)

    def _opened(self, step: int, rank: int, world: int) -> Iterator[Any]:
        if self._iterator is not None and self._ready_for == (step, rank, world):
            return self._iterator
        self._ready_for = None
        self._steps.start = (step, rank, world)
        if self._loader is None:
            self._loader = _reload(self._original, self._steps, self._seed)
        self._iterator = iter(self._loader)
        self._ready_for = (step, rank, world)
        return self._iterator


def end_workers(iterator: Iterator[Any] | None) -> None:
    """Ends the worker processes of a `DataLoader`'s iterator, if it has any.

    torch itself does so when the iterator is collected; a traceback that somebody holds would put that off.
    """
    shutdown = getattr(iterator, "_shutdown_workers", None)
    if shutdown is not None:
        shutdown()


def _reload(loader: DataLoader[Any], steps: _Steps, seed: int) -> DataLoader[Any]:
    """The user's loader with our batches; its workers live until `close`."""
    keyed = KeyedBatchDataset if hasattr(loader.dataset, "__getitems__") else KeyedDataset
    return DataLoader(
        keyed(loader.dataset, seed),
        batch_sampler=steps,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=_WorkerInit(loader.worker_init_fn),
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.num_workers > 0,
    )


class _WorkerInit:
    """Runs in each loader worker: it ends with the worker of the job that started it, whatever that one dies of."""

    def __init__(self, after: Callable[[int], None] | None) -> None:
        self._after = after

    def __call__(self, worker_id: int) -> None:
        # Elsewhere torch's own watch on the parent ends it, within seconds.
        if sys.platform == "linux":
            prctl = ctypes.CDLL(None, use_errno=True).prctl
            if prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
                raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed in a loader worker")
        if self._after is not None:
            self._after(worker_id)


def _as_int(index: Any) -> int:
    return index if isinstance(index, int) else xxhash.xxh3_128_intdigest(repr(index).encode())
