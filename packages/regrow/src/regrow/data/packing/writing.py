"""Writes tokens to the files of a corpus; the manifest comes last and completes it."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from regrow.core.errors import UsageError
from regrow.data.packing.corpus import MANIFEST, Corpus, Recipe, Shard, item_size, shard_name

Documents = tuple[npt.NDArray[np.integer], npt.NDArray[np.integer]]
"""(tokens of some documents one after another, number of tokens of each document)."""


def write_corpus(folder: Path, recipe: Recipe, documents: Iterable[Documents]) -> Corpus:
    """Write documents, in their order, as a corpus. Raises `UsageError` if they have no tokens."""
    shards: list[Shard] = []
    files: _ShardFiles | None = None
    for tokens, lengths in documents:
        begin = 0
        while begin < len(lengths):
            files = files or _ShardFiles(folder, shard_name(len(shards)), recipe.dtype)
            sizes = np.cumsum(lengths[begin:]) + files.tokens
            # A shard ends with the document that reaches its size.
            count = int(np.searchsorted(sizes, recipe.shard_bytes // item_size(recipe.dtype)) + 1)
            taken = lengths[begin : begin + count]
            files.add(tokens[: taken.sum()], sizes[:count])
            tokens, begin = tokens[taken.sum() :], begin + count
            if count <= len(sizes):
                shards, files = [*shards, files.finish()], None
    if files is not None:
        shards.append(files.finish())
    total = sum(shard.tokens for shard in shards)
    if not total:
        raise UsageError("the inputs have no tokens", hint="look where they come from, and at --column")
    corpus = Corpus(
        dtype=recipe.dtype,
        tokens=total,
        documents=sum(shard.documents for shard in shards),
        recipe=recipe,
        shards=shards,
    )
    temporary = folder / f"{MANIFEST}.tmp"
    with temporary.open("wb") as file:
        _write(file, msgspec.json.format(msgspec.json.encode(corpus), indent=1) + b"\n")
    temporary.rename(folder / MANIFEST)
    _sync(folder)
    return corpus


class _ShardFiles:
    """The two files of one shard while they are written."""

    def __init__(self, folder: Path, name: str, dtype: str) -> None:
        self._folder, self._name, self._dtype = folder, name, np.dtype(dtype).newbyteorder("<")
        self._files = [(folder / f"{name}{suffix}").open("wb") for suffix in (".bin", ".idx")]
        self._digests = [xxhash.xxh3_64(), xxhash.xxh3_64()]
        self.tokens = self.documents = 0

    def add(self, tokens: npt.NDArray[np.integer], ends: npt.NDArray[np.integer]) -> None:
        """Append documents; `ends`: their end offsets in the shard."""
        parts = tokens.astype(self._dtype).tobytes(), ends.astype("<i8").tobytes()
        for file, digest, part in zip(self._files, self._digests, parts, strict=True):
            file.write(part)
            digest.update(part)
        self.tokens, self.documents = self.tokens + len(tokens), self.documents + len(ends)

    def finish(self) -> Shard:
        """Sync both files to disk and close them; returns the shard."""
        for file in self._files:
            with file:
                _write(file, b"")
        digest, index_digest = (each.hexdigest() for each in self._digests)
        return Shard(self._name, self.tokens, self.documents, digest, index_digest)


def _write(file: BinaryIO, content: bytes) -> None:
    file.write(content)
    file.flush()
    os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
