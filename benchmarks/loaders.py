"""Processes for `data.py`: readers of a corpus by regrow's node cache and by torch's DataLoader, and their data."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forking import Child, Failed, Parent, forked
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, RandomSampler, Sampler
from torch.utils.data import DataLoader as TorchLoader

from regrow.core.ids import Seconds, WorkerId
from regrow.core.messages.data import CacheSettings, producer_socket
from regrow.data.cache.client import NodeCache
from regrow.data.cache.making import Making
from regrow.data.cache.producer import Producer
from regrow.data.dataloader import DataLoader
from regrow.data.loader import StepLoader
from regrow.data.mapstyle import end_workers
from regrow.data.packing.corpus import Recipe
from regrow.data.packing.writing import write_corpus
from regrow.data.tokens import PackedTokens

SEED = 1
UNTIL = 1_000_000
"""Steps of the training: more than are ever read."""
_BLOCK = 1 << 20
_SOCKET_S: Seconds = 30.0

Body = Callable[[Parent], None]


# --- the corpus -----------------------------------------------------------------------------------------------------


def make_corpus(folder: Path, tokens: int) -> Path:
    """A corpus of random tokens of 16 bits, as `regrow data pack` writes them; returns the file of the tokens."""
    folder.mkdir()
    draw = np.random.default_rng(SEED)
    recipe = Recipe(
        tokenizer="random",
        tokenizer_digest="",
        column="text",
        append_eos=None,
        dtype="uint16",
        shard_bytes=1 << 40,
        inputs=[],
    )
    sizes = [min(_BLOCK, tokens - begin) for begin in range(0, tokens, _BLOCK)]
    blocks = ((draw.integers(0, 50_000, size, dtype=np.uint16), np.array([size])) for size in sizes)
    (shard,) = write_corpus(folder, recipe, blocks).shards
    return folder / f"{shard.name}.bin"


class Working(Dataset[dict[str, torch.Tensor]]):
    """Samples of a data set, each after `work_s` seconds of CPU time."""

    def __init__(self, dataset: Dataset[dict[str, torch.Tensor]], work_s: Seconds) -> None:
        self.dataset, self.work_s = dataset, work_s

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        end = time.thread_time() + self.work_s
        while time.thread_time() < end:
            pass
        return self.dataset[index]


class ArrayTokens(Dataset[dict[str, torch.Tensor]]):
    """Windows of an array of tokens, cut as in a script without regrow. `tokens`: in memory, or mapped."""

    def __init__(self, tokens: np.ndarray[Any, Any], length: int, stride: int) -> None:
        self.tokens, self.length, self.stride = tokens, length, stride

    def __len__(self) -> int:
        return (len(self.tokens) - 1 - self.length) // self.stride + 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        begin = index * self.stride
        return {"tokens": torch.from_numpy(np.array(self.tokens[begin : begin + self.length + 1]))}


@dataclass(frozen=True)
class Reading:
    """Samples of a corpus, and their batches.

    work_s: CPU seconds of the transform of each sample. dtype: of the tokens; None: as stored.
    """

    corpus: str
    length: int
    stride: int
    batch_size: int
    shuffle: bool = True
    work_s: Seconds = 0.0
    dtype: torch.dtype | None = torch.int64

    def dataset(self) -> Dataset[dict[str, torch.Tensor]]:
        """The samples, from the mapped corpus."""
        tokens = PackedTokens(self.corpus, self.length, stride=self.stride, dtype=self.dtype)
        return Working(tokens, self.work_s) if self.work_s else tokens

    @property
    def batch_bytes(self) -> int:
        """Bytes of a batch's tokens."""
        return self.batch_size * (self.length + 1) * (2 if self.dtype is None else 8)


# --- regrow's side --------------------------------------------------------------------------------------------------


class _Stepping:
    """A stand-in for a worker in the middle of an undisturbed training."""

    stepping, halted, moved = True, False, False

    def want_producer(self, loader: int) -> None:
        """Do nothing: the producer exists."""

    def beat(self) -> None:
        """Do nothing: no watchdog runs."""

    def on_halt(self, call: Callable[[], None]) -> None:
        """Do nothing: no halt occurs."""


@dataclass(frozen=True)
class Node:
    """A node's cache in `folder`, at most `budget` bytes, and its loader. `sockets`: folder of a producer's socket."""

    reading: Reading
    folder: str
    sockets: str
    budget: int

    def loader(self) -> DataLoader[dict[str, torch.Tensor]]:
        """The loader, made as in a script. In each forked process it is the first."""
        reading = self.reading
        return DataLoader(reading.dataset(), reading.batch_size, shuffle=reading.shuffle, num_workers=1)

    def produce(self, _: Parent) -> None:
        """Run the process that makes batches, as a node's agent starts it, until it is killed."""
        making = Making(self.loader(), CacheSettings(self.folder, self.budget), alone=[])
        Producer(making, producer_socket(self.sockets, 0), served=lambda: None).run()

    @property
    def in_place(self) -> bool:
        """True if ranks read the mapped corpus directly, without a producer."""
        return not self.reading.work_s

    @contextmanager
    def producing(self) -> Iterator[list[Child]]:
        """Run a listening producer, if one is needed, within the block. Raises `Failed`."""
        if self.in_place:
            yield []
            return
        with forked(self.produce) as producer:
            self._await_producer()
            yield list(producer)

    def _await_producer(self) -> None:
        deadline = time.monotonic() + _SOCKET_S
        while not os.path.exists(producer_socket(self.sockets, 0)):
            if time.monotonic() > deadline:
                raise Failed("the producer does not come")
            time.sleep(0.005)

    def steps(self) -> StepLoader:
        """The script's loader as a worker's session uses it."""
        seat, worker = CacheSettings(self.folder, self.budget), WorkerId(str(os.getpid()))
        cache = NodeCache(seat, self.sockets, worker, UNTIL, speaks=True, reader=_Stepping())
        return StepLoader(self.loader(), seed=SEED, cache=cache.source)

    def batches(self, share: int, shares: int) -> Iterator[dict[str, torch.Tensor]]:
        """Batches that the steps of one rank read."""
        steps = self.steps()
        return (steps.batch(step, share, shares) for step in count())

    def is_view(self, batch: dict[str, torch.Tensor]) -> bool:
        """True if all tensors of a batch are views of a mapped entry of the cache: nothing was copied.

        Also True if there are no entries: then each token was copied once, out of the corpus.
        """
        if self.in_place:
            return True
        with open("/proc/self/maps", encoding="utf-8") as lines:
            maps = [line.split(maxsplit=5) for line in lines]
        areas = [fields[0].split("-") for fields in maps if len(fields) > 5 and fields[5].startswith(self.folder)]
        ranges = [(int(low, 16), int(high, 16)) for low, high in areas]
        places = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in batch.values()]
        return all(any(low <= begin and end <= high for low, high in ranges) for begin, end in places)


def first_of_ours(node: Node, step: int) -> Body:
    """A worker that replaces a lost one: reports the cost of its first batch.

    Seconds, processor seconds, and whether the batch is a view of the cache.
    """

    def body(parent: Parent) -> None:
        began, worked = time.perf_counter(), time.process_time()
        steps = node.steps()
        steps.seek(step, 0, 1)
        batch = steps.batch(step, 0, 1)
        seconds = time.perf_counter() - began
        parent.say([seconds, time.process_time() - worked, node.is_view(batch)])

    return body


@dataclass
class Place:
    """Folders of the benchmark. `tokens`: the file of the small corpus; `cache`: folder of the caches."""

    folder: Path
    tokens: Path
    cache: Path
    rounds: int
    caches: int = 0

    @contextmanager
    def node(self, reading: Reading, budget: int) -> Iterator[Node]:
        """A node with an empty cache, which is removed at the end."""
        self.caches += 1
        cache, sockets = self.cache / str(self.caches), self.folder / str(self.caches)
        cache.mkdir()
        sockets.mkdir()
        try:
            yield Node(reading, str(cache), str(sockets), budget)
        finally:
            shutil.rmtree(cache)


# --- torch's side ---------------------------------------------------------------------------------------------------


class _Skipping(Sampler[list[int]]):
    """The batches of a sampler without the first ones, whose samples are not read."""

    def __init__(self, batches: BatchSampler, skipped: int) -> None:
        self._batches, self._skipped = batches, skipped

    def __iter__(self) -> Iterator[list[int]]:
        return islice(iter(self._batches), self._skipped, None)


def torch_loader(
    dataset: Dataset[dict[str, torch.Tensor]], reading: Reading, share: int, shares: int
) -> TorchLoader[dict[str, torch.Tensor]]:
    """The loader, made as in a script: one persistent loader worker; with several ranks, a distributed sampler."""
    spread: Sampler[int] | None = None
    if shares > 1:
        spread = DistributedSampler(dataset, shares, share, shuffle=reading.shuffle, seed=SEED)
    return TorchLoader(
        dataset,
        reading.batch_size,
        shuffle=reading.shuffle if spread is None else None,
        sampler=spread,
        num_workers=1,
        persistent_workers=True,
        generator=torch.Generator().manual_seed(SEED),
    )


def first_by_reading(reading: Reading, step: int) -> Body:
    """A new process that reads and discards all batches before `step`; reports when it has the batch of `step`."""

    def body(parent: Parent) -> None:
        began = time.perf_counter()
        batches = iter(torch_loader(reading.dataset(), reading, 0, 1))
        for _ in range(step):
            next(batches)
        next(batches)
        seconds = time.perf_counter() - began
        end_workers(batches)
        parent.say([seconds])

    return body


def first_by_skipping(reading: Reading, step: int) -> Body:
    """As `first_by_reading`, but only the indices of the earlier batches are drawn."""

    def body(parent: Parent) -> None:
        began = time.perf_counter()
        dataset = reading.dataset()
        order = RandomSampler(dataset, generator=torch.Generator().manual_seed(SEED))  # type: ignore[arg-type]
        rest = _Skipping(BatchSampler(order, reading.batch_size, drop_last=False), step)
        batches = iter(TorchLoader(dataset, batch_sampler=rest, num_workers=1, persistent_workers=True))
        next(batches)
        seconds = time.perf_counter() - began
        end_workers(batches)
        parent.say([seconds])

    return body


# --- readers on request ---------------------------------------------------------------------------------------------


def ours(node: Node, share: int, shares: int) -> Body:
    """A rank that reads from the node's cache on request."""
    return lambda parent: _read(parent, node.batches(share, shares), node.is_view)


def mapped(reading: Reading, share: int, shares: int) -> Body:
    """A rank with torch's loader over the mapped corpus, cut as regrow cuts it."""

    def body(parent: Parent) -> None:
        _read(parent, _endless(torch_loader(reading.dataset(), reading, share, shares)))

    return body


def array(reading: Reading, file: Path, share: int, shares: int, *, loaded: bool) -> Body:
    """A rank with torch's loader over an array: the corpus `loaded` into its memory, or `numpy.memmap`."""

    def body(parent: Parent) -> None:
        tokens = np.fromfile(file, np.uint16) if loaded else np.memmap(file, np.uint16, mode="r")
        dataset = ArrayTokens(tokens, reading.length, reading.stride)
        _read(parent, _endless(torch_loader(dataset, reading, share, shares)))

    return body


def _endless(loader: TorchLoader[dict[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    while True:
        yield from loader


def _read(
    parent: Parent,
    batches: Iterator[dict[str, torch.Tensor]],
    is_view: Callable[[dict[str, torch.Tensor]], bool] = lambda batch: False,
) -> None:
    """Read one batch; then for each received (aside, number) that many, those aside without counting.

    Reports the start and the end of the counted ones, and whether the last one was a view of the cache.
    """
    next(batches)
    parent.say("ready")
    while (turn := parent.hear()) is not None:
        aside, number = turn
        for _ in range(aside):
            next(batches)
        began = time.monotonic()
        for _ in range(number):
            batch = next(batches)
        parent.say([began, time.monotonic(), is_view(batch)])
