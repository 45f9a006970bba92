"""Collectives called between two steps, outside of restartable functions: each runs as such a function by itself."""

from typing import Any

import torch

from regrow.comm.observers import AskedCollective
from regrow.comm.torch_private.internals import Work

ALIKE = frozenset(
    {
        "allreduce",
        "allreduce_coalesced",
        "reduce",
        "broadcast",
        "allgather",
        "_allgather_base",
        "all_gather_single",
        "barrier",
    }
)
"""Collectives whose largest argument has the same size on all ranks."""


class Kept:
    """Bounds the memory kept for calls since the last step. All ranks decide alike for the same calls."""

    MOST_BYTES = 16 << 20
    """Bound in bytes. An evaluation under FSDP gathers all parameters for each batch: these are not kept."""

    def __init__(self) -> None:
        self._bytes = 0

    def forget(self) -> None:
        """Count from zero again: the calls are over."""
        self._bytes = 0

    def takes(self, call: AskedCollective) -> bool:
        """True if there is room for the arguments of this call."""
        return call.name in ALIKE and self._bytes + largest(call.args) <= self.MOST_BYTES

    def add(self, call: AskedCollective) -> None:
        """Count the arguments of this call as kept."""
        self._bytes += largest(call.args)


def largest(args: tuple[Any, ...]) -> int:
    """Bytes of the largest argument."""
    return max(map(_nbytes, args), default=0)


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(_nbytes, value)) if isinstance(value, list | tuple) else 0


class LoneCall:
    """A collective between two steps. If a fault ends it, it is called again with its original arguments.

    When it is repeated for a newcomer after it has returned, it uses copies and leaves the script's tensors alone.

    Args:
        call: the script's call; its tensors are read, written or both.
    """

    def __init__(self, call: AskedCollective) -> None:
        self._call = call
        self._args: Any = call.args
        self._given: Any = _copied(call.args)
        self._begun = False

    def __call__(self) -> Work:
        """Make the call, and wait for it. Raises what collectives raise; then it can be made again."""
        args = self._args
        if args is None:
            args = _copied(self._given)
        elif self._begun:
            _put(args, self._given)
        self._begun = True
        work: Work = self._call.answer(self._call.name, args, self._call.options)
        work.wait()
        self._args = None
        return work


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple):
        copies = [_copied(each) for each in value]
        return copies if isinstance(value, list) else tuple(copies)
    return value


def _put(there: Any, given: Any) -> None:
    if isinstance(there, torch.Tensor):
        with torch.no_grad():
            there.copy_(given)
    elif isinstance(there, list | tuple):
        for each, was in zip(there, given, strict=True):
            _put(each, was)
