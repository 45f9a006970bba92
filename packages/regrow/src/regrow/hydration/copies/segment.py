"""A copy of one rank's state in shared memory: its layout, and the mark of a complete copy. Needs no torch.

0      header: magic, step, rank, lengths, xxh3_64 of holding and inventory 64     the holding, then the inventory
(msgpack) 4096·n the payload: the tensors' bytes in the order of the inventory, each from a multiple of 64 on

The step in the header is -1 while the copy is being written. A reader checks it before and after, so a writer that dies
at any moment leaves either a complete copy or one that is marked as incomplete.
"""

import contextlib
import mmap
import os
import struct
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil
import xxhash

from regrow.core.errors import NoMemoryForCopy, Torn
from regrow.core.ids import Rank, StepNo
from regrow.core.process.memory_file import is_memory_file, memory_file, reserve
from regrow.hydration.plan import CHUNK_BYTES

ALIGNMENT = 64
_MAGIC = b"regrow\x00\x01"
_HEAD = struct.Struct("<8sqiIQQQQ")
"""Fields: magic, step, rank, lengths of the holding and the inventory, start and length of the payload, digest."""
_STEP = struct.Struct("<q")
_STEP_AT, _WORDS_AT = 8, 64
_PAGE = 4096
_HUGE = 2 << 20
_NAME = "regrow-copy"
_WRITING = -1
_RESERVE = 256 << 20
"""Bytes of the machine's memory that copies must leave free."""
_CGROUP = Path("/sys/fs/cgroup")


class SegmentHead(NamedTuple):
    """Header of a complete segment. `inventory`: msgpack of an `Inventory`."""

    rank: Rank
    step: StepNo
    holding: str
    inventory: bytes
    payload: int
    """Size of the payload in bytes, including padding."""


def layout(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Offset of each tensor in the payload, given the tensors' sizes in order; and the size of the payload."""
    offsets: list[int] = []
    at = 0
    for size in sizes:
        offsets.append(at)
        at += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, at


def chunk_count(payload: int) -> int:
    """Number of checksums that cover a payload of `payload` bytes."""
    return -(-payload // CHUNK_BYTES)


def room_for_copies() -> int:
    """Bytes that may still be allocated on this machine, or in this container."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = (_CGROUP / "memory.current").read_text().strip()
    except OSError:
        return free - _RESERVE  # no container, or an old one: the machine's memory is the limit
    return (min(free, int(limit) - int(used)) if limit.isdecimal() else free) - _RESERVE


class Segment:
    """Shared memory for one copy at a time. It is freed when nobody refers to this object or a view of it.

    Made by `create` in the writer, by `attach` in a reader.

    Args:
        descriptor: descriptor of the shared memory; owned by this object from now on.
        size: number of bytes to map.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._map: mmap.mmap | None = None
        weakref.finalize(self, os.close, descriptor)
        if size:
            self._remap(size)

    @classmethod
    def create(cls) -> "Segment":
        """An empty segment, private until its descriptor is sent. Raises `NoMemoryForCopy`."""
        try:
            return cls(memory_file(_NAME, sealed=True), 0)
        except OSError as error:
            raise NoMemoryForCopy(f"shared memory cannot be had: {error.strerror}") from error

    @classmethod
    def attach(cls, path: str) -> "Segment":
        """Map another process's segment, by `/proc/<pid>/fd/<descriptor>`. Raises `OSError`; `Torn` if it is none."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        segment = cls(descriptor, 0)
        if not is_memory_file(descriptor, _NAME, sealed=True):
            raise Torn(f"{path} is no segment of copies")
        segment.refresh()
        return segment

    @property
    def descriptor(self) -> int:
        """Descriptor of the shared memory, which is valid as long as this object exists."""
        return self._descriptor

    @property
    def size(self) -> int:
        """Bytes of memory in use."""
        return os.fstat(self._descriptor).st_size

    def refresh(self) -> None:
        """Map memory that the writer has added since the last mapping."""
        size = self.size
        if self._map is None or len(self._map) != size:
            self._remap(size)

    def _remap(self, size: int) -> None:
        if size < _PAGE:
            raise Torn("a segment without a header")
        # Not closed, because views of the old map may still be in use; it is unmapped with the last view.
        self._map = mmap.mmap(self._descriptor, size)
        with contextlib.suppress(OSError):  # if the kernel refuses this, only forks are slower
            self._map.madvise(mmap.MADV_DONTFORK)

    # --- writing -----------------------------------------------------------------------------------------------

    def begin(self, rank: Rank, holding: str, inventory: bytes, payload: int) -> memoryview:
        """Mark the segment as incomplete; returns the memory for the payload. `publish` completes the copy.

        Raises `NoMemoryForCopy`, and then leaves the segment unchanged.
        """
        words = holding.encode()
        start = -(-(_WORDS_AT + len(words) + len(inventory)) // _PAGE) * _PAGE
        self._grow(start + payload)
        space = self._space()
        self._set_step(_WRITING)
        digest = xxhash.xxh3_64_intdigest(words + inventory)
        _HEAD.pack_into(space, 0, _MAGIC, _WRITING, rank, len(words), len(inventory), start, payload, digest)
        space[_WORDS_AT : _WORDS_AT + len(words)] = words
        space[_WORDS_AT + len(words) : _WORDS_AT + len(words) + len(inventory)] = inventory
        return memoryview(space)[start : start + payload]

    def publish(self, step: StepNo) -> None:
        """Mark the segment as a complete copy of `state@step`."""
        self._set_step(step)

    def void(self) -> None:
        """Mark the segment as containing no copy."""
        if self._map is not None:
            self._set_step(_WRITING)

    def _grow(self, size: int) -> None:
        have = self.size
        if size > have:
            missing = size - have
            if missing > (room := room_for_copies()):
                raise NoMemoryForCopy(
                    f"a copy needs {missing >> 20} MiB more of memory, {max(room, 0) >> 20} MiB are free"
                )
            size = -(-size // _HUGE) * _HUGE
            try:
                reserve(self._descriptor, size)
            except OSError as error:
                raise NoMemoryForCopy(f"{size >> 20} MiB of shared memory cannot be had: {error.strerror}") from error
        if self._map is None or len(self._map) < size:
            self._remap(self.size)

    def _set_step(self, step: int) -> None:
        _STEP.pack_into(self._space(), _STEP_AT, step)

    # --- reading -----------------------------------------------------------------------------------------------

    def _space(self) -> mmap.mmap:
        if self._map is None:
            raise Torn("nothing was written into this segment yet")
        return self._map

    @property
    def step(self) -> int:
        """The step of the copy in the segment; -1 if there is no copy."""
        return _WRITING if self._map is None else int(_STEP.unpack_from(self._map, _STEP_AT)[0])

    def head(self) -> SegmentHead:
        """Header of the copy in the segment. Raises `Torn`."""
        space = self._space()
        magic, step, rank, holding, inventory, start, payload, digest = _HEAD.unpack_from(space, 0)
        end = _WORDS_AT + holding + inventory
        if magic != _MAGIC or step < 0 or end > start or start + payload > len(space):
            raise Torn("the segment holds no whole copy")
        words = space[_WORDS_AT:end]
        if xxhash.xxh3_64_intdigest(words) != digest:
            raise Torn("the segment's description does not match its checksum")
        return SegmentHead(Rank(rank), StepNo(step), words[:holding].decode(), words[holding:], payload)

    def payload(self) -> memoryview:
        """The bytes of the tensors, in place. Raises `Torn`."""
        space = self._space()
        *_, start, length, _ = _HEAD.unpack_from(space, 0)
        if start + length > len(space):
            raise Torn("the segment holds no whole copy")
        return memoryview(space)[start : start + length]


def chunks_of(payload: int) -> Iterable[tuple[int, int]]:
    """Start and end of each chunk that has a checksum of its own."""
    return ((at, min(at + CHUNK_BYTES, payload)) for at in range(0, payload, CHUNK_BYTES))
