"""Loader of a script, as given to `session.steps`, as a function of the step."""

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
"""Puts a cache before a loader's own source. It closes what it has opened in its own `close`."""


class StepLoader:
    """The batches of a script's loader by (step, share, shares): the same for the same seed, however often asked.

    A share is a rank's part of a step's global batch; with micro-batches a rank reads several.

    loader: one of
      * a `DataLoader` over a map-style data set. `batch_size` is a share's, the global batch is `batch_size * shares`;
        regrow's own can have a `global_batch_size` instead.
        With the stock random or sequential sampler the order is `GlobalOrder`'s with the session's seed; a sampler or
        batch sampler with `set_epoch` keeps its own order and is told share, shares and epoch; any other sampler is
        drawn with (seed, epoch) and dealt out to the shares;
      * a callable `fn(step)`, of micro-batches `fn(step, share)`, that returns a batch;
      * a sequence of batches, or any other iterable that is a function of the step; of micro-batches number
        `step * shares + share` of it, started over at its end. Who needs a few of them goes through all.

    cache: for a loader that may be cached, gives the source to use. None: batches are made in this process.
    recorded: whether records tell the digest of a batch's content, which costs a pass over its bytes.
    micro: whether shares are micro-batches.

    Asking seeds the global random generators: whoever needs them seeded afterwards does so. Raises `UsageError`
    for what is none of these or has no batches.
    """

    def __init__(
        self, loader: object, *, seed: int, cache: Caching | None = None, recorded: bool = True, micro: bool = False
    ) -> None:
        described, self._cached = cached_loader(loader, seed=seed) if cache is not None else None, False
        # What is iterated is kept by step, and has no shares.
        if cache is not None and described is not None and (described.map_style or not micro):
            self._source, self._cached = cache(described), True
        else:
            self._source = source_of(loader, seed=seed)
        if micro:
            self._source = _shared(self._source, loader, seed)
        self._recorded, self._micro = recorded, micro
        self.name = name_of(loader)
        """For people."""
        self._step = -1
        self._kept: dict[Share, tuple[KeptBatch, BatchRecord]] = {}
        self._record: BatchRecord | None = None

    @property
    def spec(self) -> OrderSpec:
        """The order of samples."""
        return self._source.spec

    @property
    def record(self) -> BatchRecord:
        """Record of the last `batch`. Raises `UsageError` before the first."""
        if self._record is None:
            raise UsageError("no batch was read yet", hint="call batch() first")
        return self._record

    def records(self, step: int, shares: Sequence[Share]) -> list[BatchRecord]:
        """Records of these shares of a step, in their order; those that were not read last are left out."""
        return [self._kept[share][1] for share in shares if step == self._step and share in self._kept]

    def is_data(self) -> bool:
        """True if the last read has a tensor, an array or a text: a number may be meant for all ranks."""
        return any(holds_data(kept.again()) for kept, _ in self._kept.values())

    def follow(self, walk: Walk) -> None:
        """In which order batches will be asked for here: so that they can be fetched ahead of time."""
        if isinstance(self._source, Follower):
            self._source.follow(walk)

    def batch(self, step: int, share: int, shares: int) -> Any:
        """The batch of a share of `step`; an exception of the data set's own passes through.

        Whatever the body did to a batch, asking for it again gives it as it was, until another step is asked for.
        Raises `UsageError` where the loader has no batch for the step any more.
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
        """Reads what was read last once more, from the beginning; it must be the same. Empty, or a note for people.

        A rank that is replaced reads the samples of the one before it only where that is so. Does nothing where the
        batch cannot be read twice or has no canonical bytes, nor where a cache gives all workers the same one.

        Raises:
            UsageError: another batch came.
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
        """Makes ready for a share of `step`, so that loader workers fetch it in time; does nothing where that is so."""
        if step != self._step or (share, shares) not in self._kept:
            self._source.seek(step, share, shares)

    def close(self) -> None:
        """Ends loader workers and waits for them. May be called twice."""
        self._kept.clear()
        self._source.close()

    def _found(self, step: int, share: Share) -> tuple[KeptBatch, BatchRecord] | None:
        if step != self._step or not self._kept:
            return None
        once = self._source.giving is Giving.ONCE
        if once and not self._micro:
            return next(iter(self._kept.values()))  # whatever place this rank has by now
        found = self._kept.get(share)
        return found if found is not None and (once or found[0].intact()) else None

    def _keep(self, batch: Any) -> KeptBatch:
        return WatchedBatch(batch) if self._source.giving is Giving.FRESH else CopiedBatch(batch)

    def _digest(self, fetched: Fetched) -> str:
        if fetched.digest is not None:
            return fetched.digest
        return digest_of(fetched.batch) if self._recorded else ""


def _shared(source: Source, loader: object, seed: int) -> Source:
    """The same where each share of a step is asked for by itself."""
    if isinstance(source, CallableSource) and callable(loader):
        return SharedCallable(loader, seed=seed)
    return Numbered(source) if isinstance(source, SequenceSource | IterableSource) else source
