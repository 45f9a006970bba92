"""Training samples of a pre-tokenized corpus."""

import contextlib
import mmap
import os
import threading
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from numpy.lib.stride_tricks import sliding_window_view
from torch.utils.data import Dataset

from regrow.core.errors import DataError, UsageError
from regrow.data.packing.corpus import MANIFEST, Shard, damage, item_size, read_corpus

_BLOCK = 1 << 24
_Numbers = npt.NDArray[np.int64]


class PackedTokens(Dataset[dict[str, torch.Tensor]]):
    """Windows of the token stream of a corpus from `regrow data pack`, whose files are memory-mapped.

    Sample i is a dict with `tokens`, of shape [length + 1]: the stream from token `i * stride` on. Inputs and targets
    are views of it: `x, y = batch["tokens"][:, :-1], batch["tokens"][:, 1:]`; with the default stride each token except
    the first is a target once. A rest at the end that does not fill a window is left out.

    With `boundaries` a sample has two more tensors, int64 of the same shape: `documents`, the number of the document
    within the window, from 0 (for block-diagonal attention), and `positions`, which restart at 0 with each document and
    each window.

    Args:
        path: folder of the corpus.
        length: targets per sample, the context length.
        stride: tokens from one sample's start to the next one's; default `length`.
        boundaries: add `documents` and `positions` to samples.
        dtype: of `tokens`; None: as stored (uint16 or uint32), without a copy if a window lies in one shard. Do not
            write to such a view.

    Raises `UsageError` if there is no finished corpus, or it is shorter than a window; `DataError` if the size of a
    file differs from the manifest, also later when another process opens it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        length: int,
        *,
        stride: int | None = None,
        boundaries: bool = False,
        dtype: torch.dtype | None = torch.int64,
    ) -> None:
        self._folder = Path(path).absolute()
        self.length, self.stride, self.boundaries, self.dtype = length, stride or length, boundaries, dtype
        if length < 1 or self.stride < 1:
            raise UsageError(f"windows of length {length} and stride {stride} do not exist", hint="give at least 1")
        self.corpus = read_corpus(self._folder)
        self._shards = [shard for shard in self.corpus.shards if shard.tokens]  # an empty file cannot be mapped
        self._ends = list(accumulate(shard.tokens for shard in self._shards))
        self._ends_array = np.array(self._ends, dtype=np.int64)
        self._count = (self.corpus.tokens - 1 - length) // self.stride + 1
        if self._count < 1:
            raise UsageError(
                f"the corpus {self._folder} has {self.corpus.tokens} tokens, a sample of length {length} needs "
                f"{length + 1}",
                hint="pack more text, or take a smaller length",
            )
        for shard in self._shards:
            self._check(shard)
        self._own = _Maps()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        begin = self._begin(index)
        pieces, cuts = self._window(begin, begin + self.length + 1)
        tokens = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        sample = {"tokens": _tensor(tokens, self.dtype)}
        if self.boundaries:
            sample |= _boundaries(cuts, self.length + 1)
        return sample

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """The samples of a batch. Having this method makes regrow seed the random generators once per batch.

        Nothing is random here, and seeding them for each sample would take longer than reading the samples.
        """
        return [self[index] for index in indices]

    @property
    def window(self) -> tuple[int, bool, torch.dtype | str]:
        """(length, boundaries, dtype of `tokens`): equal for corpora that may share a batch."""
        return self.length, self.boundaries, self.corpus.dtype if self.dtype is None else self.dtype

    def batch(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """These samples as one batch, equal to that of torch's `default_collate`; each token is copied once."""
        tokens = np.empty((len(indices), self.length + 1), self.corpus.dtype if self.dtype is None else "int64")
        begins, numbers, places = self._places(indices)
        whole = begins + self.length < self._ends_array[numbers]
        for number in sorted(set(numbers[whole].tolist())):  # np.unique would import numpy.ma
            rows = np.flatnonzero(whole & (numbers == number))
            tokens[rows] = sliding_window_view(self._mapped(number, ".bin"), self.length + 1)[places[rows]]
        for row in np.flatnonzero(~whole).tolist():
            pieces, _ = self._window(int(begins[row]), int(begins[row]) + self.length + 1)
            tokens[row] = np.concatenate(pieces)
        found = torch.from_numpy(tokens)
        batch = {"tokens": found if self.dtype is None else found.to(self.dtype)}
        if self.boundaries:
            cuts = [self._window(begin, begin + self.length + 1)[1] for begin in begins.tolist()]
            others = [_boundaries(each, self.length + 1) for each in cuts]
            batch |= {name: torch.stack([each[name] for each in others]) for name in others[0]}
        return batch

    def expect(self, indices: Sequence[int]) -> None:
        """Ask the kernel to read these samples in the background, if they are not in memory."""
        maps, size = self._own.here(), item_size(self.corpus.dtype)
        _, numbers, places = self._places(indices)
        starts = places * size // mmap.PAGESIZE * mmap.PAGESIZE
        for number, start in zip(numbers.tolist(), starts.tolist(), strict=True):
            if (found := maps.get((number, ".bin"))) is not None:  # only files that are already mapped
                length = min((self.length + 1) * size + mmap.PAGESIZE, len(found.memory) - start)
                with contextlib.suppress(OSError):  # if the kernel refuses, the pages are read on access
                    found.memory.madvise(mmap.MADV_WILLNEED, start, length)

    def _places(self, indices: Sequence[int]) -> tuple[_Numbers, _Numbers, _Numbers]:
        """For each sample: its start in the stream, the number of its shard, and its start in that shard."""
        asked = np.asarray(indices, dtype=np.int64)
        at = np.where(asked < 0, asked + self._count, asked)
        if (strange := asked[(at < 0) | (at >= self._count)]).size:
            raise IndexError(f"sample {strange[0]} of {self._count}")
        begins = at * self.stride
        numbers = np.searchsorted(self._ends_array, begins, side="right")
        return begins, numbers, begins - np.concatenate([[0], self._ends_array])[numbers]

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["_own"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._own = _Maps()

    def fingerprint(self) -> str:
        """Digest that changes with the corpus and with its division into windows, not with its path."""
        content = (self._folder / MANIFEST).read_bytes()
        cut = (self.length, self.stride, self.boundaries, str(self.dtype))
        return xxhash.xxh3_128_hexdigest(content + repr(cut).encode())

    def verify(self) -> None:
        """Read the whole corpus and compare it with its digests. Raises `DataError` if one differs."""
        for shard in self.corpus.shards:
            self._check(shard)
            for suffix, expected in ((".bin", shard.digest), (".idx", shard.index_digest)):
                path = self._folder / f"{shard.name}{suffix}"
                digest = xxhash.xxh3_64()
                with path.open("rb") as file:
                    while block := file.read(_BLOCK):
                        digest.update(block)
                if digest.hexdigest() != expected:
                    raise DataError(f"{path} is damaged: its digest is not the one in {MANIFEST}", hint=_ANEW)

    def _begin(self, index: int) -> int:
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return at * self.stride

    def _window(self, begin: int, end: int) -> tuple[list[npt.NDArray[Any]], list[int]]:
        """The stream from `begin` to `end` in pieces by shard, and the offsets in it at which documents begin."""
        pieces, cuts = [], []
        number = bisect_right(self._ends, begin)
        at = begin
        while at < end:
            base = self._ends[number - 1] if number else 0
            low, high = at - base, min(end, self._ends[number]) - base
            pieces.append(self._mapped(number, ".bin")[low:high])
            if self.boundaries:
                ends = self._mapped(number, ".idx")
                inside = ends[np.searchsorted(ends, low) : np.searchsorted(ends, high, side="right")]
                cuts += [int(cut) + base - begin for cut in inside]
            at, number = base + high, number + 1
        return pieces, cuts

    def _mapped(self, number: int, suffix: str) -> npt.NDArray[Any]:
        maps = self._own.here()
        found = maps.get((number, suffix))
        if found is None:
            shard = self._shards[number]
            self._check(shard)  # reading a map beyond the end of its file raises SIGBUS
            kind = self.corpus.dtype if suffix == ".bin" else "int64"
            found = maps[number, suffix] = _Map(self._folder / f"{shard.name}{suffix}", kind)
        return found.array

    def _check(self, shard: Shard) -> None:
        wrong = damage(self._folder, shard, self.corpus.dtype)
        if wrong:
            raise DataError(f"{wrong} (says {MANIFEST})", hint=_ANEW)


_ANEW = "the same `regrow data pack` makes what is missing anew"


def _tensor(tokens: npt.NDArray[Any], dtype: torch.dtype | None) -> torch.Tensor:
    if dtype is None:
        return torch.from_numpy(tokens)
    # numpy converts unsigned types of any width; torch does not for all.
    return torch.from_numpy(tokens.astype(np.int64)).to(dtype)


def _boundaries(cuts: list[int], length: int) -> dict[str, torch.Tensor]:
    """`documents` and `positions` of a window. Documents begin at `cuts`; some may be outside, or repeated."""
    begins = sorted({0, *(cut for cut in cuts if 0 < cut < length)})
    lengths = np.diff([*begins, length])
    documents = np.repeat(np.arange(len(begins)), lengths)
    positions = np.arange(length) - np.repeat(begins, lengths)
    return {"documents": torch.from_numpy(documents), "positions": torch.from_numpy(positions)}


class _Map:
    """A file of numbers, mapped copy-on-write: torch needs writable memory, and a write stays in this process."""

    def __init__(self, path: Path, kind: str) -> None:
        with path.open("rb") as file:
            self.memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.array: npt.NDArray[Any] = np.frombuffer(self.memory, np.dtype(kind).newbyteorder("<"))


class _Maps(threading.local):
    """The maps of this process."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._maps: dict[tuple[int, str], _Map] = {}

    def here(self) -> dict[tuple[int, str], _Map]:
        """The maps of this process; empty after a fork."""
        if self._process != os.getpid():
            self._process, self._maps = os.getpid(), {}
        return self._maps
