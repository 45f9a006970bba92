"""Reused memory for tensors that are reduced whole: room for each rank's tensor with a header before it."""

import torch

from regrow.comm.headers import BYTES as HEADER_BYTES

_ALIGNMENT = 64
_MOST, _MOST_BYTES = 16, 8 << 20


def aligned(nbytes: int) -> int:
    """Round a number of bytes up to an alignment at which processors load well."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class SmallMessages:
    """The buffers of one group, by the tensor's size and dtype; at most 8 MiB.

    Args:
        ranks: number of ranks in the group.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._kept: dict[tuple[int, torch.dtype], tuple[dict[int, torch.Tensor], dict[int, memoryview]]] = {}
        self.nbytes = 0
        """Bytes in use."""

    def like(self, tensor: torch.Tensor) -> tuple[dict[int, torch.Tensor], dict[int, memoryview]]:
        """For each rank: room for a tensor like this one, and the contiguous message of a header and that room."""
        key = (tensor.nbytes, tensor.dtype)
        found = self._kept.get(key)
        if found is None:
            stride = aligned(tensor.nbytes) + _ALIGNMENT
            more = stride * self._ranks
            if len(self._kept) >= _MOST or self.nbytes + more > _MOST_BYTES:
                self._kept.clear()
                self.nbytes = 0
            self.nbytes += more
            room = torch.empty(more, dtype=torch.uint8)
            starts = [(rank, rank * stride + _ALIGNMENT) for rank in range(self._ranks)]
            parts = {rank: room[at : at + tensor.nbytes].view(tensor.dtype) for rank, at in starts}
            messages = {rank: room[at - HEADER_BYTES : at + tensor.nbytes].numpy().data for rank, at in starts}
            found = self._kept[key] = (parts, messages)
        return found
