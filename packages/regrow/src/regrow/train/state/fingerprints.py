"""Digests protected state: as a whole to compare replicas, and by block to find where and by how much they differ."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import xxhash

from regrow.hydration.inventory import Inventory, TensorEntry
from regrow.train.values.arrays import flat_bytes

BLOCK_BYTES = 1 << 20
MOST_BLOCKS = 64
"""Largest number of differing blocks kept until the steps have been run again: 64 MiB."""
_PYTHON = "the Python state"


@dataclass(frozen=True)
class Fingerprint:
    """Digest of a rank's state, in two parts."""

    tensors: bytes
    python: bytes

    @property
    def whole(self) -> bytes:
        """16 bytes, equal if and only if both parts are."""
        return xxhash.xxh3_128_digest(self.tensors + self.python)


@dataclass(frozen=True)
class Block:
    """A piece of a tensor's bytes, at most `BLOCK_BYTES` of them."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Suspect:
    """The bytes of a block that differed between replicas, as this rank had them."""

    block: Block
    dtype: torch.dtype
    data: torch.Tensor


def digest_tensors(entries: list[TensorEntry], tensors: Mapping[str, torch.Tensor], left_out: frozenset[str]) -> bytes:
    """xxh3_128 of names, shapes and bytes; the interpreter lock is free while a tensor's bytes are read."""
    total = xxhash.xxh3_128()
    for entry in entries:
        if entry.name not in left_out:
            total.update(f"{entry.name}|{entry.dtype}|{entry.shape}|{entry.box}\n".encode())
            total.update(flat_bytes(tensors[entry.name]).numpy().data)
    return total.digest()


def fingerprint(
    inventory: Inventory, tensors: Mapping[str, torch.Tensor], left_out: frozenset[str] = frozenset()
) -> Fingerprint:
    """Fingerprint of a canonical inventory and its tensors.

    Args:
        left_out: tensors that each rank has for itself.
    """
    return Fingerprint(digest_tensors(inventory.entries, tensors, left_out), xxhash.xxh3_128_digest(inventory.python))


def blocks(inventory: Inventory, left_out: frozenset[str]) -> list[Block]:
    """All blocks, in an order that replicas share; the last stands for the Python state."""
    found = [
        Block(entry.name, start, min(start + BLOCK_BYTES, entry.nbytes))
        for entry in inventory.entries
        if entry.name not in left_out
        for start in range(0, entry.nbytes, BLOCK_BYTES)
    ]
    return [*found, Block(_PYTHON, 0, 0)]


def digest_blocks(inventory: Inventory, tensors: Mapping[str, torch.Tensor], left_out: frozenset[str]) -> Iterator[int]:
    """xxh3_64 of each block, as a signed integer."""
    whole: tuple[str, torch.Tensor] = ("", torch.empty(0, dtype=torch.uint8))
    for block in blocks(inventory, left_out):
        if block.name == _PYTHON:
            digest = xxhash.xxh3_64_digest(inventory.python)
        else:
            if whole[0] != block.name:
                whole = block.name, flat_bytes(tensors[block.name])
            digest = xxhash.xxh3_64_digest(whole[1][block.start : block.stop].numpy().data)
        yield int.from_bytes(digest, "little", signed=True)


def keep(differing: list[Block], tensors: Mapping[str, torch.Tensor]) -> list[Suspect]:
    """Copies of the first differing blocks, without the Python state."""
    found: list[Suspect] = []
    for block in differing:
        if block.name != _PYTHON and len(found) < MOST_BLOCKS:
            data = flat_bytes(tensors[block.name])[block.start : block.stop].clone()
            found.append(Suspect(block, tensors[block.name].dtype, data))
    return found


def distance(suspects: list[Suspect], tensors: Mapping[str, torch.Tensor]) -> float | None:
    """Sum of absolute differences between kept blocks and the present tensors, in double precision.

    None if no block was kept. NaN if an element is or was NaN, infinite if a tensor is gone.
    """
    if not suspects:
        return None
    total = 0.0
    for suspect in suspects:
        now = tensors.get(suspect.block.name)
        if now is None or now.dtype != suspect.dtype or now.nbytes < suspect.block.stop:
            return float("inf")
        present = flat_bytes(now)[suspect.block.start : suspect.block.stop].clone()
        was, now_is = (_numbers(data, suspect.dtype) for data in (suspect.data, present))
        total += float((was - now_is).abs().sum())
    return total


def _numbers(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    numbers = data.view(dtype)
    return torch.view_as_real(numbers).double() if dtype.is_complex else numbers.double()
