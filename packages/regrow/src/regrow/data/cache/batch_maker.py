"""The batches of one reader of a loader, made in the producer in the order in which they are asked for."""

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
"""Batches that each loader worker is given ahead, as in torch."""


class Made(NamedTuple):
    """A batch, or the draft of its entry. `samples`: digest of what was read; `seconds`: from its start on."""

    key: Key
    batch: Any
    samples: str
    seconds: Seconds


class Missed(NamedTuple):
    """A batch that could not be made: the data set raised, or a loader worker ended."""

    key: Key
    reason: str


class Drafting(NamedTuple):
    """Place where loader workers write the entries they make."""

    folder: Path
    identity: bytes


class _Started(NamedTuple):
    key: Key
    at: Instant


class _Batch(list[Address]):
    """The addresses of one entry's samples, on their way to a loader worker."""

    key = Key(0, 0, 1)


class BatchMaker:
    """Makes the batches of the entries that it is told to make.

    With loader workers they come in any order, and `take` waits for none while `ready` says so.

    Args:
        loader: the script's.
        workers: loader workers; 0 makes the batches in this process, one at a time.
        drafting: where loader workers write the entries, so that no batch goes through a queue; None: nowhere.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        seed: int,
        workers: int,
        drafting: Drafting | None = None,
    ) -> None:
        self._loader = loader
        self._drafting = drafting if workers else None
        self._plan = plan_of(loader, seed=seed)
        self._dataset = _Guarded(keyed(loader, seed=seed))
        self.workers = workers
        """Its loader workers; 0: `take` makes the batch in this process."""
        self._capacity = workers * (loader.prefetch_factor or _PREFETCH) if workers else 1
        self._chosen: deque[Key] = deque()
        self._started: list[_Started] = []
        self._pipeline: DataLoader[Any] | None = None
        self._iterator: Any = None

    @property
    def underway(self) -> list[Key]:
        """Keys that were chosen and not taken yet."""
        return [started.key for started in self._started] + list(self._chosen)

    @property
    def has_room(self) -> bool:
        """True if `fill` would ask for one more."""
        return len(self._started) + len(self._chosen) < self._capacity

    @property
    def descriptor(self) -> int | None:
        """Can be read from when a batch has come from a loader worker; None where nobody will say so."""
        reader = getattr(getattr(self._iterator, "_data_queue", None), "_reader", None)
        return None if reader is None or not self._started else reader.fileno()

    @property
    def ready(self) -> bool:
        """True if `take` has something to give."""
        if self._iterator is None or not self.workers:
            return bool(self.underway)
        queue = getattr(self._iterator, "_data_queue", None)
        return bool(self._started) and (queue is None or not queue.empty())

    def fill(self, choose: Callable[[], Key | None]) -> list[Missed]:
        """Begin as many batches as the loader workers take; `choose` names the next one, or None."""
        while self.has_room and (key := choose()) is not None:
            self._chosen.append(key)
        if not self.workers or not self._chosen:
            return []
        try:
            self._give_out()
        except Exception as error:  # noqa: BLE001 - the sampler's or the data set's: the worker that reads gets its own
            return self._give_up(error)
        return []

    def take(self) -> Made | list[Missed]:
        """A batch; with loader workers only to be called when `ready`. What was missed can be chosen anew."""
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
        """Look whether the loader workers live; what is missed where one does not."""
        dead = [worker for worker in getattr(self._iterator, "_workers", []) if not worker.is_alive()]
        return self._give_up(RuntimeError(f"loader worker {dead[0].pid} ended with {dead[0].exitcode}")) if dead else []

    def close(self) -> None:
        """End the loader workers. The lane can be used again."""
        iterator, self._iterator, self._pipeline = self._iterator, None, None
        end_workers(iterator)
        if iterator is not None and self._drafting is not None:
            sweep(self._drafting.folder)  # what they had made, and nobody has taken
        self._chosen.clear()
        self._started.clear()

    def _give_up(self, error: Exception) -> list[Missed]:
        """Close a pipeline in an unknown state, so that the next one begins anew. Its first batch counts as missed."""
        first = min(self.underway, default=None)
        self.close()
        return [] if first is None else [Missed(first, _in_words(error))]

    def _give_out(self) -> None:
        # The loader itself gives out one batch for each that it returns, so what is idle once would stay idle.
        put = getattr(self._iterator, "_try_put_index", None)
        if put is not None:
            while self._chosen:
                put()
        elif not self._started:
            self._iterator = self._begun()

    def _begun(self) -> Iterator[Any]:
        if self._pipeline is None:
            # It asks this object for the addresses of each batch. The accelerator is the training's alone.
            self._pipeline = pipeline_of(self._loader, self._dataset, self, workers=self.workers, pin_memory=False)
            self._pipeline.collate_fn = _Guard(self._pipeline.collate_fn, self._drafting)
            self._pipeline.in_order = False
            self._pipeline.timeout = 0
        iterator = iter(self._pipeline)
        if self.workers:
            # torch's own would raise wherever this process is just then; `check` finds out, too.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return iterator

    # --- what the pipeline asks ----------------------------------------------------------------------------------

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
    """In the place of a batch: an error that belongs to this batch alone."""

    reason: str


class _Attempt(NamedTuple):
    addresses: _Batch
    read: Any


class _Guarded(Dataset[Any]):
    """A data set whose errors are values, so that each stays with its batch and ends nothing else."""

    def __init__(self, dataset: KeyedDataset) -> None:
        self.dataset = dataset

    def __getitems__(self, addresses: _Batch) -> _Attempt:
        """The samples, or why there are none."""
        try:
            return _Attempt(addresses, self.dataset.__getitems__(addresses))
        except Exception as error:  # noqa: BLE001 - told to the producer, which has the worker meet it by itself
            return _Attempt(addresses, _Failed(_in_words(error)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


class _Guard:
    """The same for what makes a batch of samples. What it has made it writes at once, where that can be done."""

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
            return batch  # the producer meets the same, and knows what to do: make room, or give up


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
