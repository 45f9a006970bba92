"""A batch as an entry of the cache, and back without copying."""

from pathlib import Path
from typing import Any

from regrow.core.errors import Damaged, NotCacheable
from regrow.data.cache.layout import Encoded, Key, Mapped, digest_of_parts, map_entry, sealed, write
from regrow.data.cache.tree import from_tree, to_tree

__all__ = [
    "Damaged",
    "Encoded",
    "Entry",
    "Key",
    "digest_of",
    "encode",
    "open_entry",
    "write",
]


class Entry:
    """One whole entry of the cache, mapped privately; it and its batch outlive the file.

    Args:
        mapped: as `layout.map_entry` or `CacheFolder.find` gives it: it has been checked.
    """

    def __init__(self, mapped: Mapped) -> None:
        self._mapped = mapped

    @property
    def key(self) -> Key:
        """Key of the entry."""
        return self._mapped.head.key

    @property
    def digest(self) -> str:
        """Of the batch's content, 16 hexadecimal digits; what `digest_of` gives for the batch."""
        return self._mapped.head.digest

    @property
    def samples(self) -> str:
        """Digest of the addresses of the samples, as `encode` was told."""
        return self._mapped.head.samples

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self._mapped.head.nbytes

    def batch(self) -> Any:
        """The batch in fresh containers. Its tensors are views of this process's private mapping.

        A write into them stays in this process and reaches neither the file nor an entry that is opened later; a
        second call on the same entry shows it. Raises `NotCacheable` where the batch holds a class of a module that is
        not imported here, and `Damaged` where the entry is whole but holds no batch.
        """
        mapped = self._mapped
        try:
            return from_tree(mapped.tree, mapped.memory, mapped.payload_at)
        except ValueError as error:
            raise Damaged(f"the entry of {mapped.head.key} holds no batch: {error}") from error


def encode(batch: object, *, identity: bytes, key: Key, samples: str) -> Encoded:
    """The batch as an entry that can be written. Raises `NotCacheable`.

    identity: 16 bytes. samples: at most 32 ASCII characters, see `regrow.data.order.samples_digest`; may be empty.
    """
    tree, payload = to_tree(batch)
    return sealed(tree, payload, identity=identity, key=key, samples=samples)


def digest_of(batch: object) -> str:
    """Digest of a batch's content, the one its entry would have, 16 hexadecimal digits; "" where it has no bytes."""
    try:
        return digest_of_parts(*to_tree(batch))
    except NotCacheable:
        return ""


def open_entry(folder: Path, key: Key, identity: bytes) -> Entry | None:
    """The entry of `key`, checked as a whole; None where there is none.

    Raises `Damaged` where the file is not whole or is another's, which removes it; `OSError` where it cannot be read.
    """
    mapped = map_entry(folder, key, identity)
    return None if mapped is None else Entry(mapped)
