"""Writes a durable checkpoint: each rank's part, then the files that join the parts. `layout.py` has the contents."""

from collections.abc import Collection, Sequence
from typing import BinaryIO, NamedTuple, Protocol

import msgspec
import torch

from regrow.core.errors import CheckpointError
from regrow.core.ids import Rank, StepNo
from regrow.hydration.codec import dtype_name
from regrow.hydration.durable.catalog import WholeCheckpoint, cause_of, look
from regrow.hydration.durable.dcp import METADATA, write_metadata
from regrow.hydration.durable.layout import (
    PYTHON,
    STEP,
    Chunk,
    Manifest,
    PartIndex,
    StoredTensor,
    cut,
    digest_of,
    index_file,
    joined,
    part_file,
    whole_box,
)
from regrow.hydration.durable.names import FORMAT, MANIFEST, MARK, NO_SEAL, seal
from regrow.hydration.durable.snapshot import TornSnapshot
from regrow.hydration.durable.storage import CheckpointStorage
from regrow.hydration.inventory import Inventory
from regrow.hydration.shards import Box


class PartSource(Protocol):
    """One rank's `state@step` in memory that another process may overwrite."""

    rank: Rank
    holding: str

    @property
    def inventory(self) -> Inventory:
        """Inventory of the state."""
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor of the inventory, in the processor's memory and contiguous."""
        ...

    def check(self) -> None:
        """Raise `TornSnapshot` if data that was read since the last check may have been overwritten."""
        ...


class _Written:
    """The pieces written so far in one call, by name, box and digests, with the rank that wrote each."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[str, Box, tuple[str, ...]], Rank] = {}

    def by(self, name: str, box: Box, digests: tuple[str, ...], rank: Rank) -> Rank:
        """Rank that wrote this piece; registers `rank` if no rank has written it."""
        return self._ranks.setdefault((name, box, digests), rank)


class _Part:
    """One rank's file while it is being written."""

    def __init__(self, rank: Rank, file: BinaryIO, written: _Written) -> None:
        self.rank, self._file, self._written = rank, file, written
        self.tensors: dict[str, StoredTensor] = {}
        self.shared: dict[str, Rank] = {}

    def add(self, name: str, tensor: torch.Tensor, box: Box, whole: tuple[int, ...]) -> None:
        """Add a piece of a tensor, unless a lower rank has written the same piece."""
        pieces = [(piece, _rows(tensor, box, piece)) for piece in cut(box, tensor.nbytes)]
        digests = tuple(digest_of(rows) for _, rows in pieces)
        writer = self._written.by(name, box, digests, self.rank)
        if writer != self.rank:
            self.shared[name] = writer
            return
        stored = self.tensors.setdefault(name, StoredTensor(dtype_name(tensor.dtype), whole, []))
        for (piece, rows), digest in zip(pieces, digests, strict=True):
            offset = self._file.tell()
            _save(rows, self._file, name)
            stored.chunks.append(Chunk(piece, part_file(self.rank), offset, self._file.tell() - offset, digest))

    def add_own(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor that is not part of the protected state."""
        shape = tuple(tensor.shape)
        self.add(name, tensor, whole_box(shape), shape)


def write_parts(at: CheckpointStorage, step: StepNo, attempt: int, sources: Sequence[PartSource]) -> int:
    """Write the parts of these ranks; returns the bytes written. The first rank that has a piece writes it.

    Raises:
        TornSnapshot: a source was overwritten meanwhile.
        CheckpointError, OSError: the parts could not be written. In all these cases none of their files is left.
    """
    folder = at.working(step, attempt)
    at.begin(folder)
    written = _Written()
    files: list[str] = []
    nbytes = 0
    try:
        for source in sorted(sources, key=lambda each: each.rank):
            files += [part_file(source.rank), index_file(source.rank)]
            nbytes += _write_part(at, folder, step, attempt, source, written)
    except BaseException:
        for name in files:
            at.delete(folder, name)
        raise
    return nbytes


def _write_part(
    at: CheckpointStorage, folder: str, step: StepNo, attempt: int, source: PartSource, written: _Written
) -> int:
    inventory = source.inventory
    if inventory.step != step:
        raise TornSnapshot(f"rank {source.rank} has state@{inventory.step} where state@{step} was to be written")
    with at.write(folder, part_file(source.rank)) as file:
        part = _Part(source.rank, file, written)
        for entry in inventory.entries:
            whole = entry.shape if entry.whole is None else entry.whole
            box = whole_box(entry.shape) if entry.box is None else entry.box
            if 0 in entry.shape and 0 not in whole:
                continue  # an uneven division left nothing for this rank
            part.add(entry.name, source.tensor(entry.name), box, whole)
            source.check()
        python = torch.frombuffer(bytearray(inventory.python), dtype=torch.uint8)
        part.add_own(f"{PYTHON}.{source.rank}", python)
        part.add_own(STEP, torch.tensor(step))
        nbytes = file.tell()
    index = PartIndex(step, attempt, source.rank, source.holding, inventory.entries, part.tensors, part.shared)
    encoded = msgspec.json.encode(index)
    with at.write(folder, index_file(source.rank)) as file:
        file.write(encoded)
    return nbytes + len(encoded)


def _save(tensor: torch.Tensor, file: BinaryIO, name: str) -> None:
    try:
        torch.save(tensor, file)
    except RuntimeError as error:  # on a full disk torch complains only about the length of its own file
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise CheckpointError(f"{name} could not be written: {error}") from error


def _rows(tensor: torch.Tensor, box: Box, piece: Box) -> torch.Tensor:
    """A piece of a box, in a storage of its own, since `torch.save` writes the whole storage behind a view."""
    if piece == box:
        return tensor
    first = piece[0][0] - box[0][0]
    return _alone(tensor[first : first + piece[0][1] - piece[0][0]])


def _alone(rows: torch.Tensor) -> torch.Tensor:
    """A tensor that is the only one in its storage, over the same contiguous memory, without a copy."""
    raw = rows.view(torch.uint8).reshape(-1).numpy()
    return torch.from_numpy(raw).view(rows.dtype).reshape(rows.shape)


class Finished(NamedTuple):
    """A complete checkpoint. `unkept`: old checkpoints that could not be removed, and the reasons, for people."""

    folder: str
    nbytes: int
    unkept: str = ""


def finish(
    at: CheckpointStorage,
    step: StepNo,
    attempt: int,
    ranks: Sequence[Rank],
    keep: int,
    *,
    refused: Collection[StepNo] = (),
) -> Finished:
    """Join the parts, publish the checkpoint, remove all but the newest `keep` and the remains of earlier writers.

    Args:
        at: the place, and the checkpoint's owner: files of another training stay as they are.
        step, attempt: the checkpoint's step and its number.
        ranks: the ranks that have written parts.
        keep: number of checkpoints that stay.
        refused: steps of earlier checkpoints that could not be read; they do not count among those that are kept.

    Raises `CheckpointError`, `OSError`; the checkpoint is torn then. Other torn checkpoints cause no failure.
    """
    folder = at.working(step, attempt)
    sizes = at.sizes(folder)
    parts = [_index(at, folder, rank, step, attempt) for rank in ranks]
    tensors, holdings = joined(parts)
    with at.write(folder, METADATA) as file:
        write_metadata(tensors, file)
        sizes[METADATA] = file.tell()
    wanted = {METADATA, *(part_file(rank) for rank in ranks)}
    for name in sizes.keys() - wanted - {MARK}:
        at.delete(folder, name)
    files = {name: size for name, size in sizes.items() if name in wanted}
    encoded = seal(msgspec.json.encode(Manifest(FORMAT, step, tensors, holdings, files, at.own, NO_SEAL)))
    with at.write(folder, MANIFEST) as file:
        file.write(encoded)
    final = at.publish(folder, step)
    return Finished(final, sum(files.values()) + len(encoded), clean(at, keep, newest=final, refused=refused))


def clean(at: CheckpointStorage, keep: int, *, newest: str = "", refused: Collection[StepNo] = ()) -> str:
    """Remove all complete checkpoints of this training but the newest `keep`, and all remains of its torn ones.

    Returns the reason if something could not be removed, for people; empty if all was removed.
    """
    try:
        there = look(at)
    except Exception as error:  # noqa: BLE001 - the checkpoint is complete, whatever is beside it
        return f"{at.url} cannot be looked through: {cause_of(error)}"
    old = surplus(there.own(at.own), keep, newest=newest, refused=refused)
    unkept = ""
    for folder in (*old, *(name for name, whose in there.remains.items() if at.own.owns(whose))):
        try:
            at.remove(folder)
        except Exception as error:  # noqa: BLE001 - as above
            unkept = unkept or f"{at.address(folder)} cannot be removed: {cause_of(error)}"
    return unkept


def surplus(own: Sequence[WholeCheckpoint], keep: int, *, newest: str, refused: Collection[StepNo]) -> list[str]:
    """Folders to remove: all but `keep`, which are the newly written one, then the newest that could be read."""
    order = sorted(own, key=lambda each: (each.folder != newest, each.step in refused, -each.step))
    return [each.folder for each in order[keep:]]


def abandon(at: CheckpointStorage, step: StepNo, attempt: int) -> None:
    """Remove all files of a checkpoint that will not be finished."""
    folder = at.working(step, attempt)
    if at.taken(folder) and MANIFEST not in at.sizes(folder):
        at.remove(folder)


def _index(at: CheckpointStorage, folder: str, rank: Rank, step: StepNo, attempt: int) -> PartIndex:
    try:
        with at.read(folder, index_file(rank)) as file:
            index = msgspec.json.decode(file.read(), type=PartIndex)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"the part of rank {rank} is not in {at.address(folder)}",
            hint="with several nodes, --checkpoint-dir must be a folder that all of them share",
        ) from error
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"the part of rank {rank} in {at.address(folder)} cannot be read: {error}") from error
    if (index.step, index.attempt) != (step, attempt):
        raise CheckpointError(f"the part of rank {rank} in {at.address(folder)} is of another checkpoint")
    return index
