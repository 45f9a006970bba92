"""State on disk: the contents of a durable checkpoint.

A checkpoint is a folder `step-<n>` in the format of `torch.distributed.checkpoint`, so that any program can read it by
`dcp.load`, into whole tensors or into `DTensor`s of any mesh: tensors under their names, the step as `regrow.step`, the
Python state of each holding as the bytes `regrow.python.<rank>`. In addition it has a manifest, `regrow.json`, which is
written last. A folder without the manifest, or without a file listed there, is torn, and is ignored.

    __<rank>_0.distcp       the tensors that this rank wrote
    .metadata               place of each piece of each tensor (a pickle, for `dcp.load`; regrow does not read it)
    regrow.json             the same for regrow, and each rank's part of it

In a file system the folder has another name at first and is renamed at the end; object stores cannot rename: there the
manifest alone marks a whole checkpoint.
"""

import math

import msgspec
import torch
import xxhash

from regrow.core.errors import CheckpointError
from regrow.core.ids import Rank, StepNo
from regrow.core.messages.lineage import Lineage
from regrow.hydration.inventory import TensorEntry
from regrow.hydration.shards import Box

KEEP = 2
STEP = "regrow.step"
PYTHON = "regrow.python"
CHUNK_BYTES = 128 << 20
"""Larger pieces are cut along their first dimension, so that no reader needs more memory than this at once."""


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """A piece of a tensor on disk, written by `torch.save` at `offset` of `file`, `length` bytes long.

    `digest`: xxh3_64 of its elements' bytes.
    """

    box: Box
    file: str
    offset: int
    length: int
    digest: str


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor in its full shape, and the chunks that cover it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: list[Chunk]


class StoredHolding(msgspec.Struct, frozen=True):
    """State of the ranks with one holding: pieces of the tensors, and Python state under the name `python`.

    `names`: the name under which a tensor is stored, if it differs from its own: parts of a model on different ranks
    may use one name for different tensors.
    """

    rank: Rank
    entries: list[TensorEntry]
    python: str
    names: dict[str, str] = {}


class PartIndex(msgspec.Struct, frozen=True):
    """Contents of one rank's file, and all state of that rank; kept beside the file until the checkpoint is complete.

    `tensors`: those of which this rank wrote chunks; `shared`: those that a lower rank has too and has written.
    """

    step: StepNo
    attempt: int
    rank: Rank
    holding: str
    entries: list[TensorEntry]
    tensors: dict[str, StoredTensor]
    shared: dict[str, Rank] = {}


class Manifest(msgspec.Struct, frozen=True):
    """The manifest, written last. `files`: sizes in bytes, by which a folder that lost some files is recognized.

    `lineage`: owner of the checkpoint. `digest`: digest of the manifest itself; empty in older versions.
    """

    format: int
    step: StepNo
    tensors: dict[str, StoredTensor]
    holdings: dict[str, StoredHolding]
    files: dict[str, int]
    lineage: Lineage = Lineage()
    digest: str = ""


def part_file(rank: Rank) -> str:
    """Name of the file with a rank's tensors."""
    return f"__{rank}_0.distcp"


def index_file(rank: Rank) -> str:
    """Name of the file with the index of a rank's part."""
    return f"regrow.part-{rank}.json"


def whole_box(shape: tuple[int, ...]) -> Box:
    """The box that covers a whole tensor."""
    return tuple((0, size) for size in shape)


def volume(box: Box) -> int:
    """Number of elements in a box; 1 for the box of a scalar."""
    return math.prod(stop - start for start, stop in box)


def digest_of(tensor: torch.Tensor) -> str:
    """xxh3_64 of the bytes of a contiguous tensor's elements, in host memory."""
    return xxhash.xxh3_64_hexdigest(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)


def cut(box: Box, nbytes: int, limit: int = CHUNK_BYTES) -> list[Box]:
    """Cut a box along its first dimension into pieces of at most `limit` bytes, unless a single row is larger."""
    if nbytes <= limit or not box:
        return [box]
    start, stop = box[0]
    rows = max(1, (stop - start) * limit // nbytes)
    return [((at, min(at + rows, stop)), *box[1:]) for at in range(start, stop, rows)]


def overlap(one: Box, other: Box) -> Box | None:
    """Intersection of two boxes in one tensor; None if it is empty."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def joined(parts: list[PartIndex]) -> tuple[dict[str, StoredTensor], dict[str, StoredHolding]]:
    """Join the parts of all ranks. If several ranks have a piece, the lowest rank's is used.

    Raises `CheckpointError` if two ranks have different values of one piece, or a piece of a tensor is missing.
    """
    tensors: dict[str, StoredTensor] = {}
    holdings: dict[str, StoredHolding] = {}
    names: dict[Rank, dict[str, str]] = {}
    for part in sorted(parts, key=lambda each: each.rank):
        mine = names[part.rank] = {name: names[rank][name] for name, rank in part.shared.items() if name in names[rank]}
        for name, stored in part.tensors.items():
            known = tensors.setdefault(name, StoredTensor(stored.dtype, stored.shape, []))
            if _same_tensor(known, stored):
                there = {chunk.box for chunk in known.chunks}
                known.chunks.extend(chunk for chunk in stored.chunks if chunk.box not in there)
            elif _missing(stored) == 0:
                mine[name] = f"{name}@{part.rank}"
                tensors[mine[name]] = stored
            else:
                raise CheckpointError(
                    f"rank {part.rank} and a lower one have different values or shapes of the same piece of {name}",
                    hint="give such parts different names: session.protect(..., part='stage 1')",
                )
        python = f"{PYTHON}.{part.rank}"
        holdings.setdefault(part.holding, StoredHolding(part.rank, part.entries, python, mine))
    for name, stored in tensors.items():
        if _missing(stored) > 0:
            raise CheckpointError(f"no rank has written all of {name}", hint="please report this")
    return tensors, holdings


def _same_tensor(one: StoredTensor, other: StoredTensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    digests = {chunk.box: chunk.digest for chunk in one.chunks}
    return all(digests.get(chunk.box, chunk.digest) == chunk.digest for chunk in other.chunks)


def _missing(stored: StoredTensor) -> int:
    return math.prod(stored.shape) - sum(volume(chunk.box) for chunk in stored.chunks)
