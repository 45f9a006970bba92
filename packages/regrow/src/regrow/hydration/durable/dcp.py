"""The metadata of `torch.distributed.checkpoint`, made from regrow's table of tensors.

It is a pickle, which regrow writes for other programs and never reads.
"""

import pickle
from typing import BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo  # torch's reader looks for this in `.metadata`
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from regrow.hydration.codec import dtype_of
from regrow.hydration.durable.layout import StoredTensor

METADATA = ".metadata"


def write_metadata(tensors: dict[str, StoredTensor], file: BinaryIO) -> None:
    """Write all that `dcp.load` must know about the tensors."""
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
