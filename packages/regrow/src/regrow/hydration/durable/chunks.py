"""Reads one chunk of a checkpoint as a tensor. A chunk is a zip archive of torch's; its pickle is never read."""

import io
import struct
import zipfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import torch

from regrow.core.errors import CheckpointError
from regrow.hydration.codec import dtype_of

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_DATA = "/data/0"
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")


def read_chunk(file: BinaryIO, offset: int, length: int, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """Read the tensor that `torch.save` wrote to `length` bytes of a file at `offset`, using only its elements' bytes.

    Raises `CheckpointError`, `OSError`, `zipfile.BadZipFile`, and any other error that a damaged archive causes.
    """
    tensor = torch.empty(tuple(shape), dtype=dtype_of(dtype))
    if tensor.numel() == 0:
        return tensor
    with zipfile.ZipFile(cast(BinaryIO, _Section(file, offset, length))) as archive:
        found = [each for each in archive.infolist() if each.filename.endswith(_DATA)]
    if len(found) != 1 or found[0].compress_type != zipfile.ZIP_STORED or found[0].file_size != tensor.nbytes:
        raise CheckpointError(f"the content at {offset} differs from the manifest")
    file.seek(offset + found[0].header_offset)
    header = file.read(_LOCAL_HEADER.size)
    *_, name, extra = _LOCAL_HEADER.unpack(header)
    file.seek(offset + found[0].header_offset + _LOCAL_HEADER.size + name + extra)
    into = tensor.reshape(-1).view(torch.uint8).numpy().data
    at = 0
    while at < len(into):
        read = cast(Any, file).readinto(into[at:])
        if not read:
            raise CheckpointError(f"the file ends in the middle of what is at {offset}")
        at += read
    return tensor


class _Section(io.RawIOBase):
    """A part of a file that is read like a file of its own."""

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
