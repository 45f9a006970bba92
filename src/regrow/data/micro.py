"""The micro-batches of a step: the batch of share s of a fixed number of shares, whatever the world."""

from collections.abc import Callable, Sequence
from typing import Any

from regrow.core.errors import UsageError
from regrow.core.messages.data import BatchRecord, OrderSpec
from regrow.data.cache.entry import digest_of
from regrow.data.dataloader import Cached
from regrow.data.fetched import Fetched, Source
from regrow.data.inplace import InPlaceSource
from regrow.data.kept import CopiedBatch, Giving, KeptBatch, WatchedBatch
from regrow.data.loader import source_of
from regrow.data.mapstyle import MapStyleSource
from regrow.data.order import OPAQUE, spec_seed
from regrow.data.seeding import Draw, seed_everything
from regrow.data.streams import CallableSource, IterableSource, SequenceSource
from regrow.data.walks import ShareWalk


class MicroLoader:
    """The batches of a script's loader by (step, share): the same for the same seed, however often asked and by whom.

    loader: one of
      * a `DataLoader` over a map-style data set. `batch_size` is a share's, the global batch is `batch_size * shares`;
        regrow's own can have a `global_batch_size` instead;
      * a callable `fn(step, share)` that returns a batch;
      * a sequence of batches, or any other iterable: number `step * shares + share` of it, started over at its end.
        Who needs a few of them goes through all.

    shares: how many there are at first; see `divide`.
    recorded: whether `records` tell the digests of batches' contents, which cost a pass over their bytes.

    Batches are made in this process, or by loader workers of its own: the node's cache keeps none of them.

    Asking seeds the global random generators. Raises `UsageError` for what is none of these or has no batches.
    """

    def __init__(self, loader: object, *, seed: int, shares: int, recorded: bool = True) -> None:
        self._shares, self._recorded = shares, recorded
        source: Source = source_of(loader, seed=seed)
        if isinstance(source, CallableSource) and callable(loader):
            source = _CallableShares(loader, seed=seed)
        elif isinstance(source, SequenceSource | IterableSource):
            source = _Numbered(source)
        self._source = source
        self._step = -1
        self._kept: dict[int, KeptBatch] = {}
        self._records: dict[int, BatchRecord] = {}

    @property
    def spec(self) -> OrderSpec:
        """The order of samples, for as many shares as there are."""
        return self._source.spec

    def divide(self, shares: int) -> None:
        """Cut the global batch of each step into so many shares from now on."""
        if shares != self._shares:
            self._shares, self._step = shares, -1
            self._kept.clear()
            self._records.clear()

    def deal(self, shares: Sequence[int]) -> None:
        """Which shares of each step will be asked for here, in order: so that they can be fetched ahead of time."""
        if isinstance(self._source, MapStyleSource | InPlaceSource):
            self._source.follow(ShareWalk(tuple(shares)))

    def batch(self, step: int, share: int) -> Any:
        """The batch of a share; an exception of the data set's own passes through.

        Whatever the body did to a batch, asking for it again gives it as it was, until another step is asked for.
        """
        kept = self._kept.get(share) if step == self._step else None
        if kept is not None and (self._source.giving is Giving.ONCE or kept.intact()):
            return kept.again()
        if step != self._step:
            self._step = step
            self._kept.clear()
            self._records.clear()
        self._kept.pop(share, None)
        self._records.pop(share, None)
        fetched = self._source.fetch(step, share, self._shares)
        keep = WatchedBatch if self._source.giving is Giving.FRESH else CopiedBatch
        self._records[share] = BatchRecord(share, self._shares, self._digest(fetched), fetched.samples)
        self._kept[share] = keep(fetched.batch)
        return fetched.batch

    def records(self, step: int, shares: Sequence[int]) -> list[BatchRecord]:
        """What was read for these shares of a step, in their order; those that were not read last are left out."""
        return [self._records[share] for share in shares if step == self._step and share in self._records]

    def seek(self, step: int, share: int) -> None:
        """Makes ready for a share of a step, so that loader workers fetch it in time."""
        if step != self._step or not self._kept:
            self._source.seek(step, share, self._shares)

    def close(self) -> None:
        """Ends loader workers and waits for them. May be called twice."""
        self._kept.clear()
        self._source.close()

    def _digest(self, fetched: Fetched) -> str:
        if fetched.digest is not None:
            return fetched.digest
        return digest_of(fetched.batch) if self._recorded else ""


class _CallableShares:
    """A function of the step and the share."""

    giving = Giving.FRESH

    def __init__(self, function: Callable[..., Any], *, seed: int) -> None:
        self._function, self._seed = function, seed
        self.spec = OrderSpec(OPAQUE, spec_seed(seed))

    def seek(self, step: int, rank: int, world: int) -> None:
        """There is nothing to make ready."""

    def fetch(self, step: int, rank: int, world: int) -> Fetched:
        """The batch of a share; its random numbers depend on the seed, the step and the share."""
        seed_everything(Draw.STREAM, self._seed, step, rank)
        return Fetched(self._function(step, rank))

    def close(self) -> None:
        """There is nothing to end."""


class _Numbered:
    """Batches that come one after another, each a share of a step."""

    def __init__(self, source: SequenceSource | IterableSource) -> None:
        self._source = source
        self.giving, self.spec = source.giving, source.spec

    def seek(self, step: int, rank: int, world: int) -> None:
        """The same for every place."""
        self._source.seek(step * world + rank, 0, 1)

    def fetch(self, step: int, rank: int, world: int) -> Fetched:
        """The batch of a share. Raises `UsageError` where there is none, or no longer any."""
        return self._source.fetch(step * world + rank, 0, 1)

    def close(self) -> None:
        """Ends what the iterator holds."""
        self._source.close()


def batch_size_of(loader: object, shares: int) -> int:
    """How many samples one of `shares` batches of a step usually has; 1 where that is not known."""
    inner = loader.loader if isinstance(loader, Cached) else loader
    constant = getattr(inner, "global_batch_size", None)
    size = getattr(inner, "batch_size", None) if constant is None else -(-constant // shares)
    return size if isinstance(size, int) and size > 0 else 1


def samples_in(batch: Any) -> int:
    """How many samples a batch has: the first dimension of the first tensor in it.

    Raises:
        UsageError: there is no tensor with a dimension in it.
    """
    found = _first_length(batch)
    if found is None:
        raise UsageError(
            f"it cannot be seen how many samples a batch of type {type(batch).__name__} has",
            hint="say its weight: micro.backward(loss, weight=...)",
        )
    return found


def _first_length(item: Any) -> int | None:
    shape = getattr(item, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    parts = item.values() if hasattr(item, "values") else item if isinstance(item, list | tuple) else ()
    for part in parts:
        found = _first_length(part)
        if found is not None:
            return found
    return None
