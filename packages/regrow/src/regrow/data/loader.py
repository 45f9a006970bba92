"""Loader of a script, as given to `session.steps`, as a function of the step."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data import DataLoader as TorchLoader

from regrow.core.errors import UsageError
from regrow.core.messages.data import BatchRecord, OrderSpec
from regrow.data.cache.entry import digest_of
from regrow.data.dataloader import Cached, DataLoader
from regrow.data.fetched import Fetched, ReadsAgain, Source
from regrow.data.inplace import InPlaceSource, is_in_place
from regrow.data.iteration import dealt_out, torch_iterates
from regrow.data.kept import CopiedBatch, Giving, KeptBatch, WatchedBatch, holds_data
from regrow.data.mapstyle import MapStyleSource
from regrow.data.naming import name_of
from regrow.data.order import OPAQUE
from regrow.data.sampling import tell_place
from regrow.data.streams import CallableSource, IterableSource, Numbered, SequenceSource, SharedCallable
from regrow.data.walks import Follower, Walk

Share = tuple[int, int]
"""(share, shares)."""


@dataclass(frozen=True)
class CachedLoader:
    """A loader of the script's whose batches may be kept on the node: all that a cache must know of it.

    number: of the loader, as the script makes them. map_style: whether its batches can be made for any place at any
    time, so ahead of training; otherwise only by who walks there. parts: all else that decides what is in a batch,
    besides `spec`, `seed`, `version`, data set and `collate_fn`; as it stands before the first batch, the same in all
    ranks.
    """

    loader: TorchLoader[Any]
    number: int
    version: str
    seed: int
    spec: OrderSpec
    map_style: bool
    parts: tuple[Any, ...] = ()

    @property
    def dataset(self) -> Any:
        """The script's data set."""
        return self.loader.dataset

    @property
    def collate_fn(self) -> Any:
        """Function that makes a batch of samples."""
        return self.loader.collate_fn

    def source(self, *, loader_workers: bool = True) -> MapStyleSource | IterableSource:
        """A way to make the batches in this process; one of its own at each call.

        loader_workers: whether by as many processes as the loader's `num_workers` says, or by this process alone. An
        iterable loader always has its own, as what they give may depend on them.
        """
        if self.map_style:
            return MapStyleSource(self.loader, seed=self.seed, loader_workers=loader_workers)
        walked, dealt = dealt_out(self.loader, seed=self.seed) or (self.loader, None)
        return IterableSource(walked, seed=self.seed, dealt=dealt)


Caching = Callable[[CachedLoader], Source]
"""Puts a cache before a loader's own source. It closes what it has opened in its own `close`."""


def cached_loader(loader: object, *, seed: int) -> CachedLoader | None:
    """Description, for a cache, of a `regrow.DataLoader` or a result of `regrow.cached`; None for anything else.

    None also if batches are slices of a memory map, which is the cache.

    Raises `UsageError` if it has no batches.
    """
    if not isinstance(loader, DataLoader | Cached):
        return None
    inner = loader.loader if isinstance(loader, Cached) else loader
    map_style = torch_iterates(inner)
    if map_style and is_in_place(inner):
        return None
    spec = source_of(inner, seed=seed).spec
    parts = _parts_of(inner, spec, map_style)
    return CachedLoader(inner, loader.number, loader.version, seed, spec, map_style, parts)


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


def source_of(loader: object, *, seed: int) -> Source:
    """The kind of loader that this is; batches are made in this process. Raises `UsageError` where it is none."""
    if isinstance(loader, Cached):
        loader = loader.loader
    if isinstance(loader, TorchLoader):
        if not torch_iterates(loader):
            walked, dealt = dealt_out(loader, seed=seed) or (loader, None)
            return IterableSource(walked, seed=seed, dealt=dealt)
        return InPlaceSource(loader, seed=seed) if is_in_place(loader) else MapStyleSource(loader, seed=seed)
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise UsageError(
            f"session.steps was given the data set {type(loader).__name__} itself, which has samples, not batches",
            hint="wrap it: regrow.DataLoader(dataset, batch_size=...)",
        )
    if isinstance(loader, torch.Tensor | str | bytes | dict):
        raise UsageError(
            f"session.steps was given a {type(loader).__name__}, which is not a loader",
            hint="give it a DataLoader, a callable fn(step), or an iterable of batches",
        )
    if isinstance(loader, Sequence):
        return SequenceSource(loader)
    if isinstance(loader, Iterable | Iterator):
        return IterableSource(loader, seed=seed)
    if callable(loader):
        return CallableSource(loader, seed=seed)
    raise UsageError(
        f"session.steps was given a {type(loader).__name__}, which is not a loader",
        hint="give it a DataLoader, a callable fn(step), or an iterable of batches",
    )


def _parts_of(loader: TorchLoader[Any], spec: OrderSpec, map_style: bool) -> tuple[Any, ...]:
    parts: list[Any] = [loader.worker_init_fn]
    if not map_style:
        # How an iterable is dealt out to loader workers is up to it; and its batches are the loader's own.
        return (*parts, type(loader), loader.num_workers, loader.batch_size, loader.drop_last)
    if spec.kind != OPAQUE:
        return tuple(parts)
    samplers: tuple[Any, ...] = (getattr(loader.batch_sampler, "sampler", None), loader.batch_sampler)
    for sampler in samplers:
        if sampler is None or type(sampler) in (SequentialSampler, BatchSampler):
            continue
        if type(sampler) is RandomSampler:
            # Its generator is seeded for each epoch, and its data set is the loader's.
            parts += ["random", sampler.replacement, sampler.num_samples]
            continue
        tell_place(sampler, 0, 1)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(0)
        parts.append(sampler)
    return tuple(parts)
