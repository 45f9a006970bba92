"""A number for a tensor's values, worked out on the device where they lie: to copy them to the host takes seconds."""

from functools import cache

import torch

_CHUNK = 1 << 20
"""Words of four bytes that are looked at together: 16 MiB of the device's memory meanwhile, and 8 for good."""
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)


def digest_on_device(tensor: torch.Tensor) -> int:
    """Equal for equal bytes, another where any are changed or exchanged; only within one process can it be compared.

    The bytes are words of a number each, and their sum is taken, each times a random odd number of its own. So one word
    that changes always shows. Many that do are missed with a chance of 2**-32 at worst: where signs alone are turned.

    Args:
        tensor: a plain one whose elements lie in a row.
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
    """The bytes as numbers of 64 bits, each of four bytes."""
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
