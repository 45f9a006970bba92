"""Wraps the loader given to `session.steps` as a function of step and share."""

from collections.abc import Callable, Sequence
from typing import Any

from regrow.core.errors import UsageError
from regrow.core.messages.data import BatchRecord, OrderSpec
from regrow.data.cache.entry import digest_of
from regrow.data.described import CachedLoader, cached_loader, source_of
from regrow.data.fetched import Fetched, ReadsAgain, Source
from regrow.data.kept import CopiedBatch, Giving, KeptBatch, WatchedBatch, holds_data
from regrow.data.naming import name_of
from regrow.data.streams import CallableSource, IterableSource, Numbered, SequenceSource, SharedCallable
from regrow.data.walks import Follower, Walk

Share = tuple[int, int]
"""(share, shares)."""

Caching = Callable[[CachedLoader], Source]
"""Returns a source with a cache in front of the loader's own source; its `close` closes both sources."""


class StepLoader:
    """The batches of a script's loader by (step, share, shares): deterministic for a seed, also when read again.

    A share is a rank's part of a step's global batch; with micro-batches a rank reads several shares.

    loader: one of
    * a `DataLoader` over a map-style data set. `batch_size` is a share's, the global batch is `batch_size * shares`;
      regrow's own can have a `global_batch_size` instead.
      With torch's random or sequential sampler the order is `GlobalOrder`'s with the session's seed; a sampler or
      batch sampler with `set_epoch` keeps its own order and is given share, shares and epoch; any other sampler is
      drawn with (seed, epoch) and divided among the shares;
    * a callable `fn(step)`, for micro-batches `fn(step, share)`, that returns a batch;
    * a sequence of batches, or any other iterable that is a function of the step; for micro-batches its item number
      `step * shares + share`, started over at its end. Each reader iterates over all items.

    cache: makes the source of a loader that may be cached. None: batches are made in this process.
    recorded: True if records contain the digest of a batch's content, which costs a pass over its bytes.
    micro: True if shares are micro-batches.

    `batch` reseeds the global random generators: a caller that needs another seed must set it afterwards. Raises
    `UsageError` for anything else, and for a loader without batches.
    """

    def __init__(
        self, loader: object, *, seed: int, cache: Caching | None = None, recorded: bool = True, micro: bool = False
    ) -> None:
        described, self._cached = cached_loader(loader, seed=seed) if cache is not None else None, False
        # Iterated batches are cached by step, without shares.
        if cache is not None and described is not None and (described.map_style or not micro):
            self._source, self._cached = cache(described), True
        else:
            self._source = source_of(loader, seed=seed)
        if micro:
            self._source = _shared(self._source, loader, seed)
        self._recorded, self._micro = recorded, micro
        self.name = name_of(loader)
        """Name of the loader for messages."""
        self._step = -1
        self._kept: dict[Share, tuple[KeptBatch, BatchRecord]] = {}
        self._record: BatchRecord | None = None

    @property
    def spec(self) -> OrderSpec:
        """The order of samples."""
        return self._source.spec

    @property
    def record(self) -> BatchRecord:
        """Record of the last batch. Raises `UsageError` before the first one."""
        if self._record is None:
            raise UsageError("no batch was read yet", hint="call batch() first")
        return self._record

    def records(self, step: int, shares: Sequence[Share]) -> list[BatchRecord]:
        """Records of these shares of a step, in their order, without shares that are no longer kept."""
        return [self._kept[share][1] for share in shares if step == self._step and share in self._kept]

    def is_data(self) -> bool:
        """True if a batch of the last step has a tensor, an array or text; a bare number may be meant for all ranks."""
        return any(holds_data(kept.again()) for kept, _ in self._kept.values())

    def follow(self, walk: Walk) -> None:
        """Announce the order of the coming `batch` calls, so that batches can be fetched ahead."""
        if isinstance(self._source, Follower):
            self._source.follow(walk)

    def batch(self, step: int, share: int, shares: int) -> Any:
        """The batch of a share of `step`; exceptions of the data set pass through.

        A second call for the same batch returns it unchanged, even if the training code wrote into the first one, until
        another step is requested. Raises `UsageError` if the loader no longer has a batch for the step.
        """
        found = self._found(step, (share, shares))
        if found is not None:
            kept, record = found
            self._record = BatchRecord(share, shares, record.digest, record.samples)
            return kept.again()
        if step != self._step or not self._micro:
            self._kept.clear()
        self._step, self._record = step, None
        self._kept.pop((share, shares), None)
        fetched = self._source.fetch(step, share, shares)
        self._record = BatchRecord(share, shares, self._digest(fetched), fetched.samples)
        self._kept[share, shares] = self._keep(fetched.batch), self._record
        return fetched.batch

    def prove(self, step: int, share: int, shares: int) -> str:
        """Read the last batch once more, from the beginning, and compare; returns a warning for the user, or "".

        Only a loader that repeats its batches gives a replacement rank its predecessor's samples. Does nothing if the
        batch cannot be read twice or has no canonical bytes, or if a cache gives all workers the same batch.

        Raises:
            UsageError: the second read gave another batch.
        """
        if self._cached:
            return ""
        _, first = self._kept.get((share, shares), (None, None))
        if first is None or not first.digest or step != self._step or not isinstance(self._source, ReadsAgain):
            return ""
        again = self._source.read_again(step, share, shares)
        if again is None:
            return ""
        digest = self._digest(again)
        if digest != first.digest and self._source.goes_on():
            return ""
        if again.samples != first.samples or (digest != first.digest and not first.samples):
            raise UsageError(
                f"{self.name} gave other samples for step {step} when it was gone through a second time: it draws "
                "from a generator of its own or from the clock, or goes on where it was; a rank that is replaced "
                "would read other samples than the one before it",
                hint="draw from torch's, numpy's or Python's global generators, which regrow seeds, or from one that "
                "is made from the epoch (set_epoch) where the iteration begins; an iterator, iter(loader), is gone "
                "through once and not asked for this",
            )
        self._kept[share, shares] = self._keep(again.batch), BatchRecord(share, shares, digest, again.samples)
        if digest == first.digest:
            return ""
        return (
            f"the same samples of {self.name} have other values each time that they are read: its data set draws from "
            "a generator of its own or from the clock, so a rank that is replaced trains its step on other values "
            "than the one before it. Draw from torch's, numpy's or Python's global generators, which regrow seeds "
            "for each sample"
        )

    def seek(self, step: int, share: int, shares: int) -> None:
        """Prepare a share of `step`, so that loader workers fetch it in time, unless it was read already."""
        if step != self._step or (share, shares) not in self._kept:
            self._source.seek(step, share, shares)

    def close(self) -> None:
        """End loader workers and wait for them. May be called twice."""
        self._kept.clear()
        self._source.close()

    def _found(self, step: int, share: Share) -> tuple[KeptBatch, BatchRecord] | None:
        if step != self._step or not self._kept:
            return None
        once = self._source.giving is Giving.ONCE
        if once and not self._micro:
            return next(iter(self._kept.values()))  # even if this rank has another place by now
        found = self._kept.get(share)
        return found if found is not None and (once or found[0].intact()) else None

    def _keep(self, batch: Any) -> KeptBatch:
        return WatchedBatch(batch) if self._source.giving is Giving.FRESH else CopiedBatch(batch)

    def _digest(self, fetched: Fetched) -> str:
        if fetched.digest is not None:
            return fetched.digest
        return digest_of(fetched.batch) if self._recorded else ""


def _shared(source: Source, loader: object, seed: int) -> Source:
    """The source for shares that are micro-batches."""
    if isinstance(source, CallableSource) and callable(loader):
        return SharedCallable(loader, seed=seed)
    return Numbered(source) if isinstance(source, SequenceSource | IterableSource) else source
