"""An entry as a file: how it is named, what is in it where, and how one knows that it is whole. Needs no torch.

    0      header: magic, format, identity, key, lengths, digest of the body, samples; xxh3_64 of all that
    128    the tree (msgpack), then zeros up to a multiple of 64
    64·n   the payload: the tensors' bytes, each from a multiple of 64 on, zeros between them

The digest is xxh3_64 of the body: all that follows the header, zeros included. So no bit of the file can change
unnoticed. It depends on the batch alone, not on key or identity. Files are not synced: after a crash of the machine
the checksum finds what was not on the disk yet.
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
"""Counts up with each change of the tree or the file; part of the identity, too."""
ALIGNMENT = 64
IDENTITY_BYTES = 16
ENTRY_SUFFIX = ".entry"
TEMP_SUFFIX = ".tmp"

_MAGIC = b"regrow\x00D"
_HEAD = struct.Struct("<8sII16sqIIQQQ32s16x")
"""magic, format, bytes of samples, identity, step, share, shares, bytes of the tree, of the file, digest, samples."""
_SUM = struct.Struct("<Q")
_BODY_AT = _HEAD.size + _SUM.size
_SAMPLES_BYTES = 32
_MOST_BUFFERS = 512
"""In one call of writev; the kernel's limit is 1024."""
_NAME = re.compile(r"(\d{10,18})\.(\d{1,9})\.(\d{1,9})\.entry", re.ASCII)
_TEMP = re.compile(r"[^/]+\.(\d{1,10})\.[0-9a-f]{16}\.tmp", re.ASCII)

Bytes = bytes | memoryview


class Key(NamedTuple):
    """Key of an entry: slice `share` of `shares` of the global batch of `step`."""

    step: int
    share: int
    shares: int


class Head(NamedTuple):
    """An entry's description of itself. `tree`: bytes of the tree; `nbytes`: of the file."""

    identity: bytes
    key: Key
    tree: int
    nbytes: int
    digest: str
    samples: str


@dataclass(frozen=True)
class Encoded:
    """An entry before it is written. It refers to the batch's own memory: write it before anyone changes that.

    buffers: the file's content, in order. nbytes: of the file. digest: of the batch's content, 16 hexadecimal digits.
    """

    key: Key
    buffers: Sequence[Bytes]
    nbytes: int
    digest: str
    samples: str


@dataclass(frozen=True)
class Draft:
    """An entry that is written in full and has no name yet. `nbytes`: of the file at `path`."""

    key: Key
    nbytes: int
    path: Path


@dataclass(frozen=True)
class Mapped:
    """A whole entry, mapped privately: reading copies nothing, a write stays in this process.

    It lives as long as anything refers to `memory`, whatever becomes of the file.
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
    """`size` rounded up to a multiple of 64."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def name_of(key: Key) -> str:
    """The name of the entry's file; names in order are steps in order, up to step 10**10."""
    return f"{key.step:010d}.{key.share}.{key.shares}{ENTRY_SUFFIX}"


def key_of(name: str) -> Key | None:
    """Key of the entry in a file of this name; None if it is no entry."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    key = Key(*map(int, found.groups()))
    return key if name_of(key) == name else None


def writer_of(name: str) -> int | None:
    """The process that writes, or wrote, a temporary file of this name; None where it is no such file."""
    found = _TEMP.fullmatch(name)
    return None if found is None else int(found[1])


# --- writing ---------------------------------------------------------------------------------------------------------


def digest_of_parts(tree: bytes, payload: Sequence[Bytes]) -> str:
    """The digest of a body of this tree and these tensors."""
    return _digest(_body(tree, payload))


def sealed(tree: bytes, payload: Sequence[Bytes], *, identity: bytes, key: Key, samples: str) -> Encoded:
    """An entry of this tree and these tensors. Raises `ValueError` where a part of the header has no room in it."""
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
    """Write the entry into the folder, which is made where only it is missing; returns its bytes.

    Whoever looks sees all of the entry or none of it. Raises `OSError`; then no temporary file stays.
    """
    return publish(draft(folder, encoded))


def draft(folder: Path, encoded: Encoded) -> Draft:
    """Write the entry under a name that nobody looks for. Raises `OSError`; then no temporary file stays."""
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
    """Give a draft its name; returns its bytes. Raises `OSError`; then nothing of it stays."""
    try:
        os.rename(written.path, written.path.with_name(name_of(written.key)))
    except BaseException:
        discard(written)
        raise
    return written.nbytes


def discard(written: Draft) -> None:
    """Remove a draft, as far as it is there."""
    with contextlib.suppress(OSError):  # called where something else has failed, which is the error to tell
        os.unlink(written.path)


def _create(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        # Not its parents: where the cache has been removed, its agent has ended.
        with contextlib.suppress(FileExistsError):
            os.mkdir(path.parent, 0o700)
        return os.open(path, flags, 0o600)


def _reserve(descriptor: int, size: int) -> None:
    """Take the room now. A file with holes on a full tmpfs would end its readers by SIGBUS."""
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
    """The entry of `key`, checked; None where there is none.

    Raises `Damaged` where the file is not whole or is another's, which removes it; `OSError` where it cannot be read.
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
        # It may have been replaced by a good one meanwhile: that is then made once more, which costs time only.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def check(data: bytes | mmap.mmap, key: Key, identity: bytes, *, where: str) -> Head:
    """The header of a whole entry. Raises `Damaged` where it is none, or not that of this key and identity."""
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
