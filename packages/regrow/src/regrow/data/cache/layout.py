"""The file format of an entry: its name, layout and checksums. Needs no torch.

    0      header: magic, format, identity, key, lengths, digest of the body, samples; xxh3_64 of these
    128    the tree (msgpack), then zeros up to a multiple of 64
    64·n   the payload: the tensors' bytes, each from a multiple of 64 on, zeros between them

The digest is xxh3_64 of the body: everything after the header, zeros included. So a change of any bit of the file is
detected. It depends on the batch alone, not on key or identity. Files are not synced: after a crash of the machine the
checksum detects data that had not reached the disk.
"""

import contextlib
import errno
import mmap
import os
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import xxhash

from regrow.core.errors import REFUSALS, Damaged

FORMAT = 1
"""Version of the tree and the file format; also part of the identity."""
ALIGNMENT = 64
IDENTITY_BYTES = 16
ENTRY_SUFFIX = ".entry"
TEMP_SUFFIX = ".tmp"

_MAGIC = b"regrow\x00D"
_HEAD = struct.Struct("<8sII16sqIIQQQ32s16x")
"""magic, format, length of samples, identity, step, share, shares, bytes of the tree, of the file, digest, samples."""
_SUM = struct.Struct("<Q")
_BODY_AT = _HEAD.size + _SUM.size
_SAMPLES_BYTES = 32
_MOST_BUFFERS = 512
"""Most buffers in one call of writev; the kernel's limit is 1024."""
_NAME = re.compile(r"(\d{10,18})\.(\d{1,9})\.(\d{1,9})\.entry", re.ASCII)
_TEMP = re.compile(r"[^/]+\.(\d{1,10})\.[0-9a-f]{16}\.tmp", re.ASCII)

Bytes = bytes | memoryview


class Key(NamedTuple):
    """The key of an entry: slice `share` of `shares` of the global batch of `step`."""

    step: int
    share: int
    shares: int


class Head(NamedTuple):
    """The header of an entry. `tree`: bytes of the tree; `nbytes`: of the file."""

    identity: bytes
    key: Key
    tree: int
    nbytes: int
    digest: str
    samples: str


@dataclass(frozen=True)
class Encoded:
    """An entry before it is written. It refers to the batch's own memory: write it before that memory changes.

    buffers: the file's content, in order. nbytes: size of the file. digest: of the batch's content, 16 hex digits.
    """

    key: Key
    buffers: Sequence[Bytes]
    nbytes: int
    digest: str
    samples: str


@dataclass(frozen=True)
class Draft:
    """A complete entry in a temporary file. `nbytes`: size of the file at `path`."""

    key: Key
    nbytes: int
    path: Path


@dataclass(frozen=True)
class Mapped:
    """A complete entry, mapped privately: reading copies nothing, a write stays in this process.

    It is valid as long as anything refers to `memory`, also after the file is removed.
    """

    memory: mmap.mmap
    head: Head

    @property
    def tree(self) -> memoryview:
        """The bytes of the tree."""
        return memoryview(self.memory)[_BODY_AT : _BODY_AT + self.head.tree]

    @property
    def payload_at(self) -> int:
        """Offset in `memory` at which the payload begins."""
        return aligned(_BODY_AT + self.head.tree)


def aligned(size: int) -> int:
    """Round `size` up to a multiple of 64."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def name_of(key: Key) -> str:
    """Name of the file of an entry; names sort by step, up to step 10**10."""
    return f"{key.step:010d}.{key.share}.{key.shares}{ENTRY_SUFFIX}"


def key_of(name: str) -> Key | None:
    """The key of the entry with this file name; None if it is not the name of an entry."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    key = Key(*map(int, found.groups()))
    return key if name_of(key) == name else None


def writer_of(name: str) -> int | None:
    """Pid of the process that made a temporary file of this name; None if it is not such a name."""
    found = _TEMP.fullmatch(name)
    return None if found is None else int(found[1])


# --- writing ---------------------------------------------------------------------------------------------------------


def digest_of_parts(tree: bytes, payload: Sequence[Bytes]) -> str:
    """Digest of the body with this tree and these tensors."""
    return _digest(_body(tree, payload))


def sealed(tree: bytes, payload: Sequence[Bytes], *, identity: bytes, key: Key, samples: str) -> Encoded:
    """Make an entry from this tree and these tensors. Raises `ValueError` if a value does not fit into the header."""
    body = list(_body(tree, payload))
    nbytes = _BODY_AT + sum(map(len, body))
    digest = _digest(body)
    encoded = samples.encode()
    if len(identity) != IDENTITY_BYTES or len(encoded) > _SAMPLES_BYTES:
        raise ValueError(
            f"an identity of {len(identity)} bytes or samples of {len(encoded)} do not fit an entry's header"
        )
    words = (_MAGIC, FORMAT, len(encoded), identity, *key, len(tree), nbytes, int(digest, 16), encoded)
    try:
        head = _HEAD.pack(*words)
    except struct.error as error:
        raise ValueError(f"{key} does not fit an entry's header: {error}") from error
    return Encoded(key, [head + _SUM.pack(xxhash.xxh3_64_intdigest(head)), *body], nbytes, digest, samples)


def _body(tree: bytes, payload: Sequence[Bytes]) -> Iterator[Bytes]:
    for part in (tree, *payload):
        if len(part):
            yield part
        if padding := aligned(len(part)) - len(part):
            yield bytes(padding)


def _digest(parts: Iterator[Bytes] | Sequence[Bytes]) -> str:
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def write(folder: Path, encoded: Encoded) -> int:
    """Write the entry into the folder, which is made if its parent exists; returns its size in bytes.

    The entry appears atomically. Raises `OSError`; then no temporary file is left.
    """
    return publish(draft(folder, encoded))


def draft(folder: Path, encoded: Encoded) -> Draft:
    """Write the entry under a temporary name. Raises `OSError`; then no temporary file is left."""
    temp = folder / f"{name_of(encoded.key)}.{os.getpid()}.{os.urandom(8).hex()}{TEMP_SUFFIX}"
    written = Draft(encoded.key, encoded.nbytes, temp)
    descriptor = _create(temp)
    try:
        try:
            _reserve(descriptor, encoded.nbytes)
            _write_all(descriptor, encoded.buffers)
        finally:
            os.close(descriptor)
    except BaseException:
        discard(written)
        raise
    return written


def publish(written: Draft) -> int:
    """Rename a draft to its final name; returns its size in bytes. Raises `OSError`; then the draft is removed."""
    try:
        os.rename(written.path, written.path.with_name(name_of(written.key)))
    except BaseException:
        discard(written)
        raise
    return written.nbytes


def discard(written: Draft) -> None:
    """Remove a draft, if it exists."""
    with contextlib.suppress(OSError):  # called after another error, which is the error to report
        os.unlink(written.path)


def _create(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        # Parents are not made: if the cache's folder was removed, its agent has ended.
        with contextlib.suppress(FileExistsError):
            os.mkdir(path.parent, 0o700)
        return os.open(path, flags, 0o600)


def _reserve(descriptor: int, size: int) -> None:
    """Reserve the space now: reading a sparse file on a full tmpfs would raise SIGBUS."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in REFUSALS:
            raise


def _write_all(descriptor: int, buffers: Sequence[Bytes]) -> None:
    waiting = [memoryview(buffer) for buffer in buffers]
    at = 0
    while at < len(waiting):
        written = os.writev(descriptor, waiting[at : at + _MOST_BUFFERS])
        if not written:
            raise OSError(errno.EIO, "the file system takes no bytes")
        while at < len(waiting) and written >= len(waiting[at]):
            written -= len(waiting[at])
            at += 1
        if written:
            waiting[at] = waiting[at][written:]


# --- reading ---------------------------------------------------------------------------------------------------------


def map_entry(folder: Path, key: Key, identity: bytes) -> Mapped | None:
    """Map the entry of `key` and check it; None if there is none.

    Raises `Damaged` if the file is incomplete or has another identity, and removes it; `OSError` if it is unreadable.
    """
    path = folder / name_of(key)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        size = os.fstat(descriptor).st_size
        if size < _BODY_AT:
            raise Damaged(f"{path} has {size} bytes, less than an entry's header")
        memory = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
        return Mapped(memory, check(memory, key, identity, where=str(path)))
    except Damaged:
        # This may remove a good file that has replaced it meanwhile, which then only has to be made once more.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def check(data: bytes | mmap.mmap, key: Key, identity: bytes, *, where: str) -> Head:
    """Check a complete entry; returns its header. Raises `Damaged` if it is invalid, or has another key or identity."""
    size = len(data)
    if size < _BODY_AT:
        raise Damaged(f"{where} has {size} bytes, less than an entry's header")
    head = data[: _HEAD.size]
    (written_sum,) = _SUM.unpack_from(data, _HEAD.size)
    magic, version, samples_bytes, whose, step, share, shares, tree, nbytes, digest, samples = _HEAD.unpack(head)
    if magic != _MAGIC:
        raise Damaged(f"{where} is no entry of a data cache")
    if xxhash.xxh3_64_intdigest(head) != written_sum:
        raise Damaged(f"the header of {where} does not match its checksum")
    if version != FORMAT:
        raise Damaged(f"{where} is of format {version}; this version reads {FORMAT}")
    if whose != identity:
        raise Damaged(f"{where} belongs to the identity {whose.hex()}, not to {identity.hex()}")
    if Key(step, share, shares) != key:
        raise Damaged(f"{where} is the entry of step {step}, share {share} of {shares}, not that of {key}")
    if nbytes != size or _BODY_AT + tree > size:
        raise Damaged(f"{where} has {size} bytes instead of {nbytes}")
    with memoryview(data) as view, view[_BODY_AT:] as body:
        found = xxhash.xxh3_64_intdigest(body)
    if found != digest:
        raise Damaged(f"the content of {where} does not match its checksum")
    return Head(whose, key, tree, nbytes, f"{digest:016x}", samples[:samples_bytes].decode("ascii", "replace"))
