"""Batches of a callable, a sequence or any other iterable."""

from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from regrow.core.errors import UsageError
from regrow.core.messages.data import OrderSpec
from regrow.data.fetched import Fetched, ReadsAgain
from regrow.data.iteration import DealtBatches
from regrow.data.kept import Giving
from regrow.data.mapstyle import end_workers, end_workers_of
from regrow.data.order import OPAQUE, spec_seed
from regrow.data.sampling import set_place
from regrow.data.seeding import Draw, seed_everything


class CallableSource:
    """Batches of a function of the step, which is called again for a retried step."""

    giving = Giving.FRESH

    def __init__(self, function: Callable[[int], Any], *, seed: int) -> None:
        self._function = function
        self._seed = seed
        self.spec = OrderSpec(OPAQUE, spec_seed(seed))

    def seek(self, step: int, rank: int, world: int) -> None:
        """Does nothing: there is nothing to prepare."""

    def fetch(self, step: int, rank: int, world: int) -> Fetched:
        """The batch of `step`; its random numbers depend on the seed, the step and the rank."""
        seed_everything(Draw.STREAM, self._seed, step, rank)
        return Fetched(self._function(step))

    def read_again(self, step: int, rank: int, world: int) -> Fetched | None:
        """Call the function once more."""
        return self.fetch(step, rank, world)

    def goes_on(self) -> bool:
        """False: a function is called with the step."""
        return False

    def close(self) -> None:
        """Does nothing: there is nothing to release."""


class SequenceSource:
    """Batches in a list or another sequence, which starts over at its end."""

    giving = Giving.STORED

    def __init__(self, batches: Sequence[Any]) -> None:
        if len(batches) == 0:
            raise UsageError("the sequence of batches given to session.steps is empty", hint="put batches in it")
        self._batches = batches
        self.spec = OrderSpec(OPAQUE, 0)

    def seek(self, step: int, rank: int, world: int) -> None:
        """Does nothing: there is nothing to prepare."""

    def fetch(self, step: int, rank: int, world: int) -> Fetched:
        """The batch of `step`."""
        return Fetched(self._batches[step % len(self._batches)])

    def close(self) -> None:
        """Does nothing: there is nothing to release."""


class IterableSource:
    """Batches of any other iterable, which must be a function of the step.

    It is iterated, with `set_epoch` called for each epoch if it exists, and starts over at its end. A start at step n
    skips the batches before it: all of them, or those of one epoch if there is a `len()`. Its draws from the global
    random generators depend on the seed, the step and the rank. An iterator or generator can be iterated only once: if
    it ends before the last step, that is an error.

    Args:
        iterable: the script's iterable.
        seed: the session's seed.
        dealt: the batch sampler in it that yields this rank's part of an order not aware of ranks; None: no such one.
    """

    def __init__(self, iterable: Any, *, seed: int, dealt: DealtBatches | None = None) -> None:
        self._iterable, self._dealt = iterable, dealt
        self._seed = seed
        self._iterator: Iterator[Any] | None = None
        self._once = isinstance(iterable, Iterator)
        self.spec = OrderSpec(OPAQUE, spec_seed(seed))
        self.giving = Giving.ONCE if self._once else Giving.STORED
        self._epoch = 0
        self._in_epoch = 0
        self._next = 0
        self._place = (0, 1)
        self._failed: Exception | None = None
        self._ahead: list[Any] = []
        self._given_back: list[Any] = []
        self._stood: tuple[int, int, int] | None = None
        """Position at which `read_again` got the same iterator once more."""

    def seek(self, step: int, rank: int, world: int) -> None:
        """Note the place; if it has changed, an iterable starts over. Batches are skipped only at the next `fetch`."""
        if (rank, world) != self._place and not self._once:
            self._rewind()
            self._place = (rank, world)
            self._set_place()
        self._place = (rank, world)

    def fetch(self, step: int, rank: int, world: int) -> Fetched:
        """The batch of `step`. Raises `UsageError` if there is none, or no longer any."""
        self.seek(step, rank, world)
        if step < self._next:
            if self._once:
                raise UsageError(
                    f"step {step} runs again, but its batch came from {self._name()}, which gives each batch once",
                    hint="give session.steps a DataLoader, a callable fn(step), or what can be iterated twice",
                )
            self._rewind()
        if self._iterator is None and not self._once:
            self._jump(step)
        while self._next < step:
            self._take(step)
        return Fetched(self._take(step))

    def read_again(self, step: int, rank: int, world: int) -> Fetched | None:
        """Read the last batch by another iteration from the beginning; None for an iterator."""
        if self._once or self._next != step + 1:
            return None
        if isinstance(self._iterable, DataLoader):
            self._rewind()
            return self.fetch(step, rank, world)
        walked, stood = self._iterator, (self._epoch, self._in_epoch, self._next)
        self._iterator, self._epoch = None, 0
        self._open()
        self._next = 0
        if self._iterator is not walked:
            _close(walked)
            return self.fetch(step, rank, world)
        # iter() gave the same iterator: it was reset to its beginning, or continues.
        self._ahead = [self._take(step) for _ in range(step + 1)]
        self._stood = stood
        return Fetched(self._ahead[-1])

    def goes_on(self) -> bool:
        """Treat the iterable as an iterator from now on if `read_again` continued one; its batches are given next."""
        if self._stood is None:
            return False
        self._epoch, self._in_epoch, self._next = self._stood
        self._stood, self._once, self.giving = None, True, Giving.ONCE
        self._given_back = self._ahead
        return True

    def close(self) -> None:
        """Close the iterator, which ends loader workers, or runs a generator's `finally`."""
        iterator, self._iterator = self._iterator, None
        _close(iterator)
        if isinstance(self._iterable, DataLoader):
            end_workers_of(self._iterable)

    def _rewind(self) -> None:
        self.close()
        self._epoch = self._in_epoch = self._next = 0

    def _jump(self, step: int) -> None:
        length = self._length()
        if length and step >= self._next + length:
            self._epoch = step // length
            self._next = self._epoch * length

    def _take(self, wanted: int) -> Any:
        while True:
            if self._iterator is None:
                self._open()
            if self._given_back:
                self._next, self._in_epoch = self._next + 1, self._in_epoch + 1
                return self._given_back.pop(0)
            # Before each batch, so that a generator that draws gives the same batch after skipping up to here.
            seed_everything(Draw.STREAM, self._seed, self._next, self._place[0])
            try:
                batch = next(self._iterator)  # type: ignore[arg-type]
            except StopIteration:
                self._end_of_epoch(wanted)
                continue
            except Exception as error:
                if self._once:
                    self._failed = error
                else:
                    self._rewind()
                raise
            self._check_dealt()
            self._next += 1
            self._in_epoch += 1
            self._failed = None
            return batch

    def _open(self) -> None:
        if not self._once:
            self._set_place()
            for part in self._parts():
                if hasattr(part, "set_epoch"):
                    part.set_epoch(self._epoch)
            seed_everything(Draw.STREAM, self._seed, self._epoch)
        self._iterator = iter(self._iterable)
        self._in_epoch = 0

    def _set_place(self) -> None:
        for part in self._parts():
            set_place(part, *self._place)

    def _check_dealt(self) -> None:
        if self._dealt is None or self._dealt.asked or self._place[1] == 1:
            return
        raise UsageError(
            f"{self._name()} does not ask its batch sampler for the batches that it gives, so all {self._place[1]} "
            "ranks would read the same",
            hint="give session.steps a regrow.DataLoader or torch's own over its data set, or a sampler that knows "
            "ranks (DistributedSampler)",
        )

    def _end_of_epoch(self, wanted: int) -> None:
        if self._failed is not None:
            # A generator that has raised is at its end: report its exception.
            raise self._failed
        if self._once:
            raise UsageError(
                f"{self._name()} given to session.steps ended after {self._next} batches, before step {wanted}",
                hint="make it endless, lower `until`, or give what can be iterated twice, such as a DataLoader",
            )
        if self._in_epoch == 0:
            raise UsageError(f"{self._name()} given to session.steps has no batches", hint="look where it gets them")
        length = self._length()
        if length and self._in_epoch != length:
            raise UsageError(
                f"{self._name()} has a len() of {length}, but gave {self._in_epoch} batches in epoch {self._epoch}",
                hint="correct its __len__: a worker that joins at a later step counts epochs by it",
            )
        self.close()
        self._epoch += 1

    def _length(self) -> int | None:
        # The len() of a DataLoader over an IterableDataset is an estimate.
        estimate = isinstance(self._iterable, DataLoader) and isinstance(self._iterable.dataset, IterableDataset)
        return len(self._iterable) if isinstance(self._iterable, Sized) and not estimate else None

    def _parts(self) -> list[Any]:
        parts = [self._iterable]
        if isinstance(self._iterable, DataLoader):
            parts += [self._iterable.dataset, self._iterable.sampler, self._iterable.batch_sampler]
        return [part for part in parts if part is not None]

    def _name(self) -> str:
        return f"the {type(self._iterable).__name__}"


def _close(iterator: Iterator[Any] | None) -> None:
    end_workers(iterator)
    close = getattr(iterator, "close", None)
    if close is not None:
        close()


class SharedCallable:
    """Batches of a function of the step and the share."""

    giving = Giving.FRESH

    def __init__(self, function: Callable[[int, int], Any], *, seed: int) -> None:
        self._function, self._seed = function, seed
        self.spec = OrderSpec(OPAQUE, spec_seed(seed))

    def seek(self, step: int, rank: int, world: int) -> None:
        """Does nothing: there is nothing to prepare."""

    def fetch(self, step: int, rank: int, world: int) -> Fetched:
        """The batch of a share; its random numbers depend on the seed, the step and the share."""
        seed_everything(Draw.STREAM, self._seed, step, rank)
        return Fetched(self._function(step, rank))

    def read_again(self, step: int, rank: int, world: int) -> Fetched | None:
        """Call the function once more."""
        return self.fetch(step, rank, world)

    def goes_on(self) -> bool:
        """False: a function is called with the step."""
        return False

    def close(self) -> None:
        """Does nothing: there is nothing to release."""


class Numbered:
    """Takes item `step * world + rank` of a sequence or iterable as the batch of a share."""

    def __init__(self, source: SequenceSource | IterableSource) -> None:
        self._source = source
        self.spec = source.spec

    @property
    def giving(self) -> Giving:
        """Result of a second request to the source of the numbered items."""
        return self._source.giving

    def seek(self, step: int, rank: int, world: int) -> None:
        """Prepare the item of this share."""
        self._source.seek(step * world + rank, 0, 1)

    def fetch(self, step: int, rank: int, world: int) -> Fetched:
        """The batch of a share. Raises `UsageError` if there is none, or no longer any."""
        return self._source.fetch(step * world + rank, 0, 1)

    def read_again(self, step: int, rank: int, world: int) -> Fetched | None:
        """See `IterableSource.read_again`."""
        return self._source.read_again(step * world + rank, 0, 1) if isinstance(self._source, ReadsAgain) else None

    def goes_on(self) -> bool:
        """See `IterableSource.goes_on`."""
        return isinstance(self._source, ReadsAgain) and self._source.goes_on()

    def close(self) -> None:
        """Close the source of the numbered items."""
        self._source.close()
