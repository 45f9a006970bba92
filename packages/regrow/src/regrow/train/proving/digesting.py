"""Digests of values that a rank has computed; the same in two processes for the same bits."""

import numpy as np
import torch
import xxhash

from regrow.hydration.shards import local
from regrow.train.state.device_digest import digest_on_device
from regrow.train.values.arrays import flat_bytes

_WHOLE_BYTES = 4 << 20
_BLOCKS = 64
"""Number of blocks of a larger tensor that are digested, together `_WHOLE_BYTES` large."""


def digest_tensor(tensor: torch.Tensor) -> int:
    """Digest of a tensor's local part, shape and dtype; of a large one only some blocks, the same on all ranks."""
    here = local(tensor).detach()
    total = xxhash.xxh3_64(f"{here.dtype}|{tuple(here.shape)}|{here.layout}\n".encode())
    if here.is_sparse:
        total.update(str(digest_tensor(here.coalesce().values())).encode())
        return total.intdigest()
    if here.layout is not torch.strided or here.is_meta:
        return total.intdigest()
    for piece in _pieces(here):
        if piece.device.type == "cpu":
            total.update(flat_bytes(piece).numpy().data)
        else:
            total.update(str(digest_on_device(piece.contiguous())).encode())
    return total.intdigest()


def _pieces(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.nbytes <= _WHOLE_BYTES or not tensor.is_contiguous():
        return [tensor]
    flat, size = tensor.reshape(-1), max(1, _WHOLE_BYTES // _BLOCKS // tensor.element_size())
    starts = [at * (flat.numel() - size) // (_BLOCKS - 1) for at in range(_BLOCKS)]
    return [flat[start : start + size] for start in starts]


def digest_bytes(data: bytes) -> int:
    """Digest of bytes."""
    return xxhash.xxh3_64_intdigest(data)


def digest_text(text: str) -> int:
    """Digest of a string."""
    return digest_bytes(text.encode("utf-8", "surrogatepass"))


def digest_array(array: np.ndarray) -> int:
    """Digest of a plain array's values; for an array of objects, of its `repr`."""
    if array.dtype.hasobject:
        return digest_text(repr(array)[:10_000])
    return digest_text(f"{array.dtype}|{array.shape}|") ^ digest_bytes(np.ascontiguousarray(array).tobytes())
