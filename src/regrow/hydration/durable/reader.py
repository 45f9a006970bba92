"""Reading a durable checkpoint: a worker takes just its own pieces, whichever ranks had them when it was written."""

import contextlib
import io
import math
import pickle
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, BinaryIO, cast

import msgspec
import torch

from regrow.core.errors import CheckpointError, StateError
from regrow.core.ids import Rank, StepNo
from regrow.hydration.codec import dtype_name
from regrow.hydration.durable.dcp import METADATA, read_metadata
from regrow.hydration.durable.layout import (
    FORMAT,
    MANIFEST,
    PYTHON,
    Chunk,
    Manifest,
    StoredHolding,
    StoredTensor,
    digest_of,
    overlap,
    step_of,
    volume,
    whole_box,
)
from regrow.hydration.durable.storage import CheckpointStorage
from regrow.hydration.inventory import Inventory, StateSink, TensorEntry
from regrow.hydration.shards import Box

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

Piece = Callable[[TensorEntry], TensorEntry]
"""The entry of a tensor as the reader has it: another piece of the same whole, or the same piece."""


class _OldManifest(msgspec.Struct, frozen=True):
    """That of format 1: one rank had everything."""

    format: int
    step: StepNo
    entries: list[TensorEntry]
    python_bytes: int
    files: dict[str, int]


class _Format(msgspec.Struct, frozen=True):
    format: int
    files: dict[str, int]


def complete(at: CheckpointStorage) -> list[tuple[StepNo, str]]:
    """Step and folder of all complete checkpoints, newest first."""
    named = [(step, name) for name in at.folders() if (step := step_of(name)) is not None]
    return [(step, name) for step, name in sorted(named, reverse=True) if is_complete(at, name)]


def latest(at: CheckpointStorage) -> tuple[StepNo, str] | None:
    """Step and folder of the newest complete checkpoint; None where there is none."""
    named = [(step, name) for name in at.folders() if (step := step_of(name)) is not None]
    return next(((step, name) for step, name in sorted(named, reverse=True) if is_complete(at, name)), None)


def is_complete(at: CheckpointStorage, folder: str) -> bool:
    """Whether it has its manifest, of a format that we know, and all files that this lists."""
    return _raw_manifest(at, folder) is not None


def manifest_of(at: CheckpointStorage, folder: str) -> Manifest | None:
    """The manifest of a complete checkpoint; None of a torn one. Raises `CheckpointError` where it is damaged."""
    data = _raw_manifest(at, folder)
    if data is None:
        return None
    try:
        if msgspec.json.decode(data, type=_Format).format == FORMAT:
            return msgspec.json.decode(data, type=Manifest)
        old = msgspec.json.decode(data, type=_OldManifest)
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"the manifest of {at.address(folder)} cannot be read: {error}") from error
    with at.read(folder, METADATA) as file:
        tensors = read_metadata(file)
    return Manifest(FORMAT, old.step, tensors, {"": StoredHolding(Rank(0), old.entries, PYTHON)}, old.files)


def load(
    sink: StateSink, at: CheckpointStorage, folder: str, *, holding: str = "", rank: int = 0, piece: Piece | None = None
) -> StepNo:
    """Read what this worker has of a checkpoint into its protected state; returns the step.

    Args:
        sink: whose state.
        at, folder: the checkpoint.
        holding: what this worker has; the Python state of the same holding is its own.
        rank: this worker's; the Python state of that rank is taken where no holding is the same.
        piece: says which piece of a tensor this worker has. Without it: the same as in the checkpoint.

    Raises:
        CheckpointError: the folder is torn or unreadable.
        StateError: it is the state of another model.
    """
    manifest = manifest_of(at, folder)
    if manifest is None:
        raise CheckpointError(f"{at.address(folder)} is no complete checkpoint", hint="choose another step-<n> folder")
    source = _choose(manifest, holding, rank)
    try:
        with _Files(at, folder) as files:
            python = _read_python(files, manifest.tensors[source.python])
            entries = [piece(entry) for entry in source.entries] if piece is not None else source.entries
            stored = {name: manifest.tensors[source.names.get(name, name)] for name in (e.name for e in source.entries)}
            _expect_same_wholes(entries, stored)
            targets = sink.prepare(Inventory(manifest.step, entries, python))
            for entry in entries:
                if entry.name in targets:
                    _fill(files, stored[entry.name], entry, targets[entry.name])
    except (OSError, RuntimeError, pickle.UnpicklingError, KeyError) as error:
        raise CheckpointError(f"{at.address(folder)} could not be read: {_cause(error)}") from error
    sink.finish()
    return manifest.step


def _choose(manifest: Manifest, holding: str, rank: int) -> StoredHolding:
    """Whose Python state and names count: the same holding's, else those of the rank next below among its equals."""
    if holding in manifest.holdings:
        return manifest.holdings[holding]
    by_rank = sorted(manifest.holdings.values(), key=lambda each: each.rank)
    return next((each for each in reversed(by_rank) if each.rank <= rank), by_rank[0])


def _expect_same_wholes(entries: Iterable[TensorEntry], stored: dict[str, StoredTensor]) -> None:
    for entry in entries:
        there = stored[entry.name]
        whole = entry.shape if entry.whole is None else entry.whole
        if (there.dtype, there.shape) != (entry.dtype, whole):
            raise StateError(
                f"{entry.name} is {entry.dtype}{list(whole)} here and {there.dtype}{list(there.shape)} on disk",
                hint="the script must build the same model as the one that was saved",
            )


def _read_python(files: "_Files", stored: StoredTensor) -> bytes:
    python = torch.empty(stored.shape, dtype=torch.uint8)
    for chunk in stored.chunks:
        (start, stop), *_ = chunk.box or ((0, 0),)
        python[start:stop] = files.tensor(chunk)
    return python.numpy().tobytes()


def _fill(files: "_Files", stored: StoredTensor, entry: TensorEntry, target: torch.Tensor) -> None:
    """Put the chunks that overlap this piece where they belong."""
    box = whole_box(entry.shape) if entry.box is None else entry.box
    missing = math.prod(entry.shape)
    if missing and stored.dtype != dtype_name(target.dtype):
        raise StateError(f"{entry.name} is {dtype_name(target.dtype)} here and {stored.dtype} on disk")
    with torch.no_grad():
        for chunk in stored.chunks if missing else ():
            common = overlap(chunk.box, box)
            if common is not None:
                read = files.tensor(chunk)[_within(common, chunk.box)]
                target.detach()[_within(common, box)].copy_(read)
                missing -= volume(common)
    if missing > 0:
        raise CheckpointError(f"{entry.name} is not all there: {missing} elements are missing")


def _within(common: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(slice(start - at, stop - at) for (start, stop), (at, _) in zip(common, outer, strict=True))


class _Files:
    """The open files of one checkpoint."""

    def __init__(self, at: CheckpointStorage, folder: str) -> None:
        self._at, self._folder = at, folder
        self._open: tuple[str, BinaryIO] | None = None
        self._closing = contextlib.ExitStack()

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def tensor(self, chunk: Chunk) -> torch.Tensor:
        """One chunk, in memory."""
        if self._open is None or self._open[0] != chunk.file:
            self._closing.close()
            self._open = chunk.file, self._closing.enter_context(self._at.read(self._folder, chunk.file))
        file = self._open[1]
        file.seek(chunk.offset)
        loaded = torch.load(
            cast(BinaryIO, _Section(file, chunk.offset, chunk.length)), map_location="cpu", weights_only=True
        )
        if not isinstance(loaded, torch.Tensor) or tuple(loaded.shape) != tuple(b - a for a, b in chunk.box):
            raise CheckpointError(f"{chunk.file} has something else at {chunk.offset} than the manifest says")
        if chunk.digest not in ("", digest_of(loaded)):
            raise CheckpointError(
                f"{self._at.address(self._folder)}/{chunk.file} is damaged at {chunk.offset}: its checksum differs",
                hint="remove this checkpoint, and an older one is used",
            )
        return loaded


class _Section(io.RawIOBase):
    """A part of a file as a file of its own, so that one chunk is read without the others and without a copy."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        super().__init__()
        self._file, self._start, self._length = file, start, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: "WriteableBuffer") -> int:
        view = memoryview(buffer).cast("B")
        wanted = max(0, min(len(view), self._length - self._at))
        self._file.seek(self._start + self._at)
        data = self._file.read(wanted)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


def _raw_manifest(at: CheckpointStorage, folder: str) -> bytes | None:
    """The manifest, if all files that it lists are there in their sizes."""
    try:
        with at.read(folder, MANIFEST) as file:
            data = file.read()
        listed = msgspec.json.decode(data, type=_Format)
        sizes = at.sizes(folder)
    except (OSError, msgspec.MsgspecError):
        return None
    whole = all(sizes.get(name) == size for name, size in listed.files.items())
    return data if whole and listed.format in (1, FORMAT) else None


def _cause(error: BaseException) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
