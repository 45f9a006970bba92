"""One piece of the inputs into one shard: there in full, or not at all."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from regrow.core.errors import DataError
from regrow.data.packing.corpus import DONE, TEMPORARY, Recipe, Shard, shard_name, sync_folder, write_whole
from regrow.data.packing.documents import documents
from regrow.data.packing.parts import Part
from regrow.data.packing.tokenizing import Tokenizer

Progress = Callable[[int, int, int], None]
"""Told bytes of the piece, tokens and documents that are done."""

_HELD = 1 << 20


def make_shard(part: Part, folder: Path, recipe: Recipe, tokenizer: Tokenizer, progress: Progress) -> Shard:
    """Tokenize a piece into its shard in `folder`; when this returns it is on the disk, with the note that it is done.

    Raises `DataError` for a malformed document or a token that does not fit, `OSError` where it cannot be written.
    Then nothing of the shard stays.
    """
    limit = np.iinfo(np.dtype(recipe.dtype)).max
    with ShardFiles(folder, shard_name(part.number), recipe.dtype) as files:
        for document in documents(part, recipe.column):
            try:
                tokens = tokenizer.encode(document.text)
            except Exception as error:  # whatever a tokenizer raises, the text it was given is what people look for
                raise DataError(f"{document.place}: the tokenizer failed: {error!r}") from error
            low, high = (int(tokens.min()), int(tokens.max())) if tokens.size else (0, 0)
            if low < 0 or high > limit:
                worst = low if low < 0 else high
                raise DataError(
                    f"{document.place}: token {worst} does not fit into {recipe.dtype}",
                    hint="the tokenizer's vocabulary is larger than it says",
                )
            files.add(tokens.astype(recipe.dtype), recipe.append_eos)
            progress(document.done, files.tokens, files.documents)
        return files.finish(part)


class ShardFiles:
    """The two files of a shard while they are written, under other names until `finish`.

    Args:
        folder: the corpus.
        name: the shard's.
        dtype: of the tokens.
    """

    def __init__(self, folder: Path, name: str, dtype: str) -> None:
        self._folder, self._name, self._dtype = folder, name, np.dtype(dtype).newbyteorder("<")
        self._paths = [folder / f"{name}{suffix}" for suffix in (".bin", ".idx")]
        self._held: list[npt.NDArray[np.unsignedinteger]] = []
        self._held_tokens = 0
        self._ends: list[int] = []
        self._digest, self._index_digest = xxhash.xxh3_64(), xxhash.xxh3_64()
        self.tokens = self.documents = 0

    def __enter__(self) -> Self:
        self._files = [_temporary(path).open("wb", buffering=0) for path in self._paths]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file, path in zip(self._files, self._paths, strict=True):
            file.close()
            with suppress(FileNotFoundError):
                _temporary(path).unlink()

    def add(self, tokens: npt.NDArray[np.unsignedinteger], eos: int | None) -> None:
        """The next document, and the token after it."""
        self._held.append(tokens)
        if eos is not None:
            self._held.append(np.array([eos], dtype=tokens.dtype))
        count = len(tokens) + (eos is not None)
        self._held_tokens += count
        self.tokens += count
        self.documents += 1
        self._ends.append(self.tokens)
        if self._held_tokens > _HELD:
            self._write()

    def finish(self, part: Part) -> Shard:
        """Sync, give the files their names, and note that `part` is done."""
        self._write()
        for file, path in zip(self._files, self._paths, strict=True):
            os.fsync(file.fileno())
            _temporary(path).rename(path)
        sync_folder(self._folder)
        digests = self._digest.hexdigest(), self._index_digest.hexdigest()
        shard = Shard(self._name, self.tokens, self.documents, *digests)
        write_whole(self._folder / f"{self._name}{DONE}", msgspec.json.encode(part.done(shard)))
        return shard

    def _write(self) -> None:
        if self._held:
            self._put(0, np.concatenate(self._held).astype(self._dtype, copy=False).tobytes(), self._digest)
        if self._ends:
            self._put(1, np.array(self._ends, dtype="<i8").tobytes(), self._index_digest)
        self._held, self._ends, self._held_tokens = [], [], 0

    def _put(self, which: int, content: bytes, digest: "xxhash.xxh3_64") -> None:
        digest.update(content)
        rest = memoryview(content)
        while rest:
            rest = rest[self._files[which].write(rest) :]


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")
