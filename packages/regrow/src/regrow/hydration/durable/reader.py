"""Reads a durable checkpoint: a worker takes only its own pieces, whichever ranks wrote them."""

import contextlib
import math
from collections.abc import Callable, Container, Iterable
from typing import BinaryIO

import msgspec
import torch

from regrow.core.errors import CheckpointError, StateError
from regrow.core.ids import StepNo
from regrow.hydration.codec import dtype_name
from regrow.hydration.durable.catalog import cause_of, look, manifest_at
from regrow.hydration.durable.chunks import read_chunk
from regrow.hydration.durable.layout import (
    Chunk,
    Manifest,
    StoredHolding,
    StoredTensor,
    digest_of,
    overlap,
    volume,
    whole_box,
)
from regrow.hydration.durable.storage import CheckpointStorage
from regrow.hydration.inventory import Inventory, StateSink, TensorEntry
from regrow.hydration.shards import Box

Piece = Callable[[TensorEntry], TensorEntry]
"""Maps a tensor's entry in the checkpoint to the reader's entry: another piece of the same tensor, or the same."""


def complete(at: CheckpointStorage) -> list[tuple[StepNo, str]]:
    """Step and folder of all complete checkpoints of this training, newest first."""
    return [(each.step, each.folder) for each in look(at).own(at.own)]


def latest(at: CheckpointStorage) -> tuple[StepNo, str] | None:
    """Step and folder of the newest complete checkpoint of this training; None if there is none."""
    return next(iter(complete(at)), None)


def manifest_of(at: CheckpointStorage, folder: str) -> Manifest:
    """The manifest of a complete checkpoint. Raises `CheckpointError` if it is torn, or of another format."""
    _, data = manifest_at(at, folder)
    try:
        return msgspec.json.decode(data, type=Manifest)
    except Exception as error:
        raise CheckpointError(f"its manifest cannot be read: {error}") from error


def load(
    sink: StateSink, at: CheckpointStorage, folder: str, *, holding: str = "", rank: int = 0, piece: Piece | None = None
) -> StepNo:
    """Read this worker's part of a checkpoint into its protected state; returns the step.

    Args:
        sink: receives the state.
        at, folder: the checkpoint.
        holding: this worker's holding; the worker takes the Python state of the same holding.
        rank: this worker's rank; if no holding is the same, it takes that rank's Python state.
        piece: maps a tensor to the piece that this worker has; None: the same piece as in the checkpoint.

    Raises:
        CheckpointError: the folder is torn or unreadable, whatever the reading raised; parts that were read before are
            in the state.
        StateError: it is the state of another model.
    """
    try:
        manifest = manifest_of(at, folder)
        source = _choose(manifest, holding, rank)
        with _Files(at, folder, manifest.files) as files:
            python = _read_python(files, manifest.tensors[source.python])
            entries = [piece(entry) for entry in source.entries] if piece is not None else source.entries
            stored = {name: manifest.tensors[source.names.get(name, name)] for name in (e.name for e in source.entries)}
            _expect_same_wholes(entries, stored)
            targets = sink.prepare(Inventory(manifest.step, entries, python))
            for entry in entries:
                if entry.name in targets:
                    _fill(files, stored[entry.name], entry, targets[entry.name])
    except CheckpointError as error:
        raise CheckpointError(f"{at.address(folder)}: {error.cause}", hint=error.hint) from error
    except StateError as error:
        if manifest.digest:  # the manifest is verified, so it shows what was written
            raise
        raise CheckpointError(f"{at.address(folder)} does not fit: {error}") from error
    except Exception as error:
        raise CheckpointError(f"{at.address(folder)} could not be read: {cause_of(error)}") from error
    sink.finish()
    return manifest.step


def _choose(manifest: Manifest, holding: str, rank: int) -> StoredHolding:
    """The holding whose Python state and names are used: the same one, else that of the nearest rank up to `rank`."""
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
        python[start:stop] = files.tensor(chunk, "uint8")
    return python.numpy().tobytes()


def _fill(files: "_Files", stored: StoredTensor, entry: TensorEntry, target: torch.Tensor) -> None:
    """Copy the chunks that overlap the target's piece into the target."""
    box = whole_box(entry.shape) if entry.box is None else entry.box
    missing = math.prod(entry.shape)
    if missing and stored.dtype != dtype_name(target.dtype):
        raise StateError(f"{entry.name} is {dtype_name(target.dtype)} here and {stored.dtype} on disk")
    with torch.no_grad():
        for chunk in stored.chunks if missing else ():
            common = overlap(chunk.box, box)
            if common is not None:
                read = files.tensor(chunk, stored.dtype)[_within(common, chunk.box)]
                target.detach()[_within(common, box)].copy_(read)
                missing -= volume(common)
    if missing > 0:
        raise CheckpointError(f"{entry.name} is not all there: {missing} elements are missing")


def _within(common: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(slice(start - at, stop - at) for (start, stop), (at, _) in zip(common, outer, strict=True))


class _Files:
    """The open files of one checkpoint."""

    def __init__(self, at: CheckpointStorage, folder: str, listed: Container[str]) -> None:
        self._at, self._folder, self._listed = at, folder, listed
        self._open: tuple[str, BinaryIO] | None = None
        self._closing = contextlib.ExitStack()

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def tensor(self, chunk: Chunk, dtype: str) -> torch.Tensor:
        """Read one chunk into memory and check it."""
        if self._open is None or self._open[0] != chunk.file:
            self._closing.close()
            if chunk.file not in self._listed:
                raise CheckpointError(f"its manifest lists no file {chunk.file}")
            self._open = chunk.file, self._closing.enter_context(self._at.read(self._folder, chunk.file))
        shape = [stop - start for start, stop in chunk.box]
        loaded = read_chunk(self._open[1], chunk.offset, chunk.length, dtype, shape)
        if chunk.digest != digest_of(loaded):
            raise CheckpointError(f"{chunk.file} is damaged at {chunk.offset}: its checksum differs")
        return loaded
