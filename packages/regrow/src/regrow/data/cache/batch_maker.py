"""Makes the batches of one reader of a loader, in the producer, in the order in which they are requested."""

import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

from torch.utils.data import DataLoader, Dataset

from regrow.core.errors import NotCacheable
from regrow.core.ids import Instant, Seconds
from regrow.data.cache.entry import encode
from regrow.data.cache.folder import sweep
from regrow.data.cache.layout import Key, draft
from regrow.data.mapstyle import KeyedDataset, end_workers, keyed, pipeline_of
from regrow.data.order import Address
from regrow.data.sampling import plan_of

_PREFETCH = 2
"""Number of batches that each loader worker gets ahead, as in torch."""


class Made(NamedTuple):
    """A batch, or the draft of its entry. `samples`: digest of the addresses; `seconds`: duration of making it."""

    key: Key
    batch: Any
    samples: str
    seconds: Seconds


class Missed(NamedTuple):
    """A batch that could not be made because the data set raised an error or a loader worker died."""

    key: Key
    reason: str


class Drafting(NamedTuple):
    """The folder in which loader workers write the entries that they make."""

    folder: Path
    identity: bytes


class _Started(NamedTuple):
    key: Key
    at: Instant


class _Batch(list[Address]):
    """The addresses of one entry's samples, with its key, as sent to a loader worker."""

    key = Key(0, 0, 1)


class BatchMaker:
    """Makes the batches of the entries that `fill` chooses.

    With loader workers the batches come in any order, and `take` does not block while `ready` is true.

    Args:
        loader: the script's loader.
        workers: number of loader workers; 0 makes the batches in this process, one at a time.
        drafting: folder in which loader workers write the entries, so that no batch goes through a queue; None: none.
    """

    def __init__(self, loader: DataLoader[Any], *, seed: int, workers: int, drafting: Drafting | None = None) -> None:
        self._loader = loader
        self._drafting = drafting if workers else None
        self._plan = plan_of(loader, seed=seed)
        self._dataset = _Guarded(keyed(loader, seed=seed))
        self.workers = workers
        """Number of loader workers; 0: `take` makes the batch in this process."""
        self._capacity = workers * (loader.prefetch_factor or _PREFETCH) if workers else 1
        self._chosen: deque[Key] = deque()
        self._started: list[_Started] = []
        self._pipeline: DataLoader[Any] | None = None
        self._iterator: Any = None

    @property
    def underway(self) -> list[Key]:
        """Keys that were chosen and whose batches were not taken yet."""
        return [started.key for started in self._started] + list(self._chosen)

    @property
    def has_room(self) -> bool:
        """True if `fill` would choose one more entry."""
        return len(self._started) + len(self._chosen) < self._capacity

    @property
    def descriptor(self) -> int | None:
        """Descriptor that becomes readable when a loader worker delivers a batch; None if there is none."""
        reader = getattr(getattr(self._iterator, "_data_queue", None), "_reader", None)
        return None if reader is None or not self._started else reader.fileno()

    @property
    def ready(self) -> bool:
        """True if `take` would return something."""
        if self._iterator is None or not self.workers:
            return bool(self.underway)
        queue = getattr(self._iterator, "_data_queue", None)
        return bool(self._started) and (queue is None or not queue.empty())

    def fill(self, choose: Callable[[], Key | None]) -> list[Missed]:
        """Start as many batches as the loader workers accept; `choose` returns the next key, or None."""
        while self.has_room and (key := choose()) is not None:
            self._chosen.append(key)
        if not self.workers or not self._chosen:
            return []
        try:
            self._give_out()
        except Exception as error:  # noqa: BLE001 - of sampler or data set: the reading worker meets it by itself
            return self._give_up(error)
        return []

    def take(self) -> Made | list[Missed]:
        """Return a batch; with loader workers, call it only when `ready`. Missed batches can be chosen again."""
        try:
            if self._iterator is None:
                self._iterator = self._begun()
            key, samples, batch = next(self._iterator)
        except Exception as error:  # noqa: BLE001 - as above
            return self._give_up(error)
        started = next(started for started in self._started if started.key == key)
        self._started.remove(started)
        if isinstance(batch, _Failed):
            return [Missed(started.key, batch.reason)]
        return Made(started.key, batch, samples, time.monotonic() - started.at)

    def check(self) -> list[Missed]:
        """Check that the loader workers are alive; returns the missed batches if a worker is not."""
        dead = [worker for worker in getattr(self._iterator, "_workers", []) if not worker.is_alive()]
        return self._give_up(RuntimeError(f"loader worker {dead[0].pid} ended with {dead[0].exitcode}")) if dead else []

    def close(self) -> None:
        """End the loader workers. The object can be used again."""
        iterator, self._iterator, self._pipeline = self._iterator, None, None
        end_workers(iterator)
        if iterator is not None and self._drafting is not None:
            sweep(self._drafting.folder)  # remove drafts that were not taken
        self._chosen.clear()
        self._started.clear()

    def _give_up(self, error: Exception) -> list[Missed]:
        """Close a pipeline in an unknown state, so that the next one starts anew. Its first batch counts as missed."""
        first = min(self.underway, default=None)
        self.close()
        return [] if first is None else [Missed(first, _in_words(error))]

    def _give_out(self) -> None:
        # torch's loader starts one batch for each that it returns, so an idle loader worker would stay idle.
        put = getattr(self._iterator, "_try_put_index", None)
        if put is not None:
            while self._chosen:
                put()
        elif not self._started:
            self._iterator = self._begun()

    def _begun(self) -> Iterator[Any]:
        if self._pipeline is None:
            # This object is the pipeline's batch sampler. No pinning: the accelerator belongs to the training alone.
            self._pipeline = pipeline_of(self._loader, self._dataset, self, workers=self.workers, pin_memory=False)
            self._pipeline.collate_fn = _Guard(self._pipeline.collate_fn, self._drafting)
            self._pipeline.in_order = False
            self._pipeline.timeout = 0
        iterator = iter(self._pipeline)
        if self.workers:
            # torch's handler would raise at any point of this process; `check` detects dead workers too.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return iterator

    # --- as the pipeline's batch sampler -------------------------------------------------------------------------

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[Address]:
        if not self._chosen:
            raise StopIteration
        batch = _Batch(self._plan.keys_at(*self._chosen[0]))
        batch.key = self._chosen.popleft()
        self._started.append(_Started(batch.key, time.monotonic()))
        return batch


# --- in the loader worker ----------------------------------------------------------------------------------------


class _Failed(NamedTuple):
    """Returned instead of a batch: an error that affects this batch alone."""

    reason: str


class _Attempt(NamedTuple):
    addresses: _Batch
    read: Any


class _Guarded(Dataset[Any]):
    """A data set that returns errors as values, so that each error affects only its own batch."""

    def __init__(self, dataset: KeyedDataset) -> None:
        self.dataset = dataset

    def __getitems__(self, addresses: _Batch) -> _Attempt:
        """The samples at these addresses, or the error."""
        try:
            return _Attempt(addresses, self.dataset.__getitems__(addresses))
        except Exception as error:  # noqa: BLE001 - reported to the producer; the reading worker meets it by itself
            return _Attempt(addresses, _Failed(_in_words(error)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


class _Guard:
    """A `collate_fn` that returns errors as values, and writes the batch to a draft at once if possible."""

    def __init__(self, collate_fn: Callable[[Any], tuple[str, Any]], drafting: Drafting | None) -> None:
        self._collate_fn, self._drafting = collate_fn, drafting

    def __call__(self, attempt: Any) -> tuple[Key, str, Any]:
        key, failed = attempt.addresses.key, attempt.read
        if not isinstance(failed, _Failed):
            try:
                samples, batch = self._collate_fn(attempt.read)
                return key, samples, self._drafted(key, samples, batch)
            except Exception as error:  # noqa: BLE001 - as above
                failed = _Failed(_in_words(error))
        return key, "", failed

    def _drafted(self, key: Key, samples: str, batch: Any) -> Any:
        if self._drafting is None:
            return batch
        folder, identity = self._drafting
        try:
            return draft(folder, encode(batch, identity=identity, key=key, samples=samples))
        except (NotCacheable, OSError):
            return batch  # the producer gets the same error, and makes room or gives up


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
