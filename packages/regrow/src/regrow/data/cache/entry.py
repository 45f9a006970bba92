"""Converts a batch to an entry of the cache, and back without copying."""

from pathlib import Path
from typing import Any

from regrow.core.errors import Damaged, NotCacheable
from regrow.data.cache.layout import Encoded, Key, Mapped, digest_of_parts, map_entry, sealed, write
from regrow.data.cache.tree import from_tree, to_tree

__all__ = ["Damaged", "Encoded", "Entry", "Key", "digest_of", "encode", "open_entry", "write"]


class Entry:
    """One complete entry of the cache, mapped privately; it and its batch stay usable when the file is removed.

    Args:
        mapped: a checked mapping, from `layout.map_entry` or `CacheFolder.find`.
    """

    def __init__(self, mapped: Mapped) -> None:
        self._mapped = mapped

    @property
    def key(self) -> Key:
        """The entry's key."""
        return self._mapped.head.key

    @property
    def digest(self) -> str:
        """Digest of the batch's content, 16 hexadecimal digits; equals `digest_of` of the batch."""
        return self._mapped.head.digest

    @property
    def samples(self) -> str:
        """Digest of the addresses of the samples, as given to `encode`."""
        return self._mapped.head.samples

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return self._mapped.head.nbytes

    def batch(self) -> Any:
        """The batch in new containers. Its tensors are views of this process's private mapping.

        A write into them stays in this process and reaches neither the file nor an entry that is opened later; a
        second call on the same entry shows it. Raises `NotCacheable` if the batch contains a class of a module that is
        not imported here, and `Damaged` if the entry is complete but holds no batch.
        """
        mapped = self._mapped
        try:
            return from_tree(mapped.tree, mapped.memory, mapped.payload_at)
        except ValueError as error:
            raise Damaged(f"the entry of {mapped.head.key} holds no batch: {error}") from error


def encode(batch: object, *, identity: bytes, key: Key, samples: str) -> Encoded:
    """Convert a batch to an entry that can be written. Raises `NotCacheable`.

    identity: 16 bytes. samples: at most 32 ASCII characters, see `regrow.data.order.samples_digest`; may be empty.
    """
    tree, payload = to_tree(batch)
    return sealed(tree, payload, identity=identity, key=key, samples=samples)


def digest_of(batch: object) -> str:
    """Digest of a batch's content, equal to that of its entry, 16 hexadecimal digits; "" if it cannot be an entry."""
    try:
        return digest_of_parts(*to_tree(batch))
    except NotCacheable:
        return ""


def open_entry(folder: Path, key: Key, identity: bytes) -> Entry | None:
    """Open the entry of `key` and check all of it; None if there is none.

    Raises `Damaged` if the file is incomplete or has another identity, and removes it; `OSError` if it is unreadable.
    """
    mapped = map_entry(folder, key, identity)
    return None if mapped is None else Entry(mapped)
