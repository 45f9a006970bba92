"""A digest of a tensor's values, computed on the device that holds them: copying them to the host takes seconds."""

from functools import cache

import torch

_CHUNK = 1 << 20
"""Words of four bytes digested at once: uses 16 MiB of the device's memory meanwhile, and 8 MiB permanently."""
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)


def digest_on_device(tensor: torch.Tensor) -> int:
    """Digest that is equal for equal bytes, and differs if bytes are changed or exchanged; valid within one process.

    It sums the bytes as words, each multiplied by its own random odd number. A change of one word always shows. Changes
    of many words are missed with a probability of at most 2**-32, reached if only signs are flipped.

    Args:
        tensor: a plain, contiguous tensor.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
    weights = _weights(flat.device)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), 4 * _CHUNK):
        piece = flat[start : start + 4 * _CHUNK]
        words = _words(piece)
        total = total * _MIX + (words * weights[: words.numel()]).sum()
    return int(total.item())


def _words(piece: torch.Tensor) -> torch.Tensor:
    """The bytes as 64-bit integers, each from four bytes."""
    if piece.numel() % 4:
        piece = torch.nn.functional.pad(piece, (0, -piece.numel() % 4))
    elif piece.storage_offset() % 4:
        piece = piece.clone()
    return piece.view(torch.int32).to(torch.int64)


@cache
def _weights(device: torch.device) -> torch.Tensor:
    random = torch.Generator("cpu").manual_seed(20)
    limits = torch.iinfo(torch.int64)
    drawn = torch.randint(limits.min, limits.max, (_CHUNK,), generator=random, dtype=torch.int64, device="cpu")
    return (drawn | 1).to(device)
