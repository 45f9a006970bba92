"""The metadata of `torch.distributed.checkpoint`, made from our table of tensors and back.

It is a pickle. We write it for others and read it from checkpoints of format 1 alone, which had no table of our own.
"""

import pickle
from typing import BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo  # what their reader looks for in `.metadata`
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from regrow.core.errors import CheckpointError
from regrow.hydration.codec import dtype_name, dtype_of
from regrow.hydration.durable.layout import Chunk, StoredTensor

METADATA = ".metadata"


def write_metadata(tensors: dict[str, StoredTensor], file: BinaryIO) -> None:
    """Everything that `dcp.load` must know about the tensors."""
    storage: dict[MetadataIndex, _StorageInfo] = {}
    state: dict[str, TensorStorageMetadata] = {}
    for name, stored in tensors.items():
        chunks = []
        for at, chunk in enumerate(stored.chunks):
            offsets = torch.Size([start for start, _ in chunk.box])
            chunks.append(ChunkStorageMetadata(offsets, torch.Size([stop - start for start, stop in chunk.box])))
            storage[MetadataIndex(name, offsets, at)] = _StorageInfo(chunk.file, chunk.offset, chunk.length)
        properties = TensorProperties(dtype=dtype_of(stored.dtype))
        state[name] = TensorStorageMetadata(properties, torch.Size(stored.shape), chunks)
    paths = {name: (name,) for name in tensors}
    pickle.dump(Metadata({**state}, paths, storage, StorageMeta()), file)


def read_metadata(file: BinaryIO) -> dict[str, StoredTensor]:
    """The table of the tensors. Executes a pickle. Raises `CheckpointError` where it is not as we wrote it."""
    try:
        metadata = pickle.load(file)
        return {
            name: StoredTensor(dtype_name(each.properties.dtype), tuple(each.size), _chunks(name, each, metadata))
            for name, each in metadata.state_dict_metadata.items()
        }
    except (pickle.UnpicklingError, AttributeError, KeyError, EOFError, ImportError) as error:
        raise CheckpointError(f"the metadata of the checkpoint cannot be read: {error!r}") from error


def _chunks(name: str, stored: TensorStorageMetadata, metadata: Metadata) -> list[Chunk]:
    chunks = []
    for chunk in stored.chunks:
        where = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
        box = tuple((start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        chunks.append(Chunk(box, where.relative_path, where.offset, where.length))
    return chunks
