"""Values that collectives have returned: a rank keeps them, up to a bound, and its shadow gets them as answers."""

import torch

from regrow.train.proving.trace import Trace
from regrow.train.values.arrays import flat_bytes

MOST_BYTES = 40 << 20
"""Bound for the kept answers of one step, which are sent with the rest of the trace in one message."""
_MOST_OF_REDUCTIONS = MOST_BYTES // 2
"""Bound for reduced gradients: nothing before the update reads them, unless it clips them, so large ones need not be
kept."""


class KeptAnswers:
    """Keeps answers in a trace."""

    def __init__(self, trace: Trace) -> None:
        self._answers = trace.answers
        self._bytes = self._reduced = 0

    def take(self, key: str, outputs: list[torch.Tensor], *, backward: bool) -> bool:
        """Keep an answer if there is room. Called from the thread that received it."""
        size = sum(each.nbytes for each in outputs if not each.is_sparse)
        if self._bytes + size > MOST_BYTES or (backward and self._reduced + size > _MOST_OF_REDUCTIONS):
            return True
        if any(each.is_sparse or each.layout is not torch.strided for each in outputs):
            return True
        self._bytes += size
        self._reduced += size if backward else 0
        self._answers[key] = [flat_bytes(each).numpy().tobytes() for each in outputs]
        return True


class GivenAnswers:
    """Returns the answers that are kept in another rank's trace.

    Args:
        trace: the rank's trace.
    """

    def __init__(self, trace: Trace) -> None:
        self._answers = trace.answers

    def take(self, key: str, outputs: list[torch.Tensor], *, backward: bool) -> bool:
        """Put the rank's answer into the tensors; False if the answer is not known, or has another size."""
        found = self._answers.get(key)
        if found is None or [len(data) for data in found] != [each.nbytes for each in outputs]:
            return False
        with torch.no_grad():
            for data, output in zip(found, outputs, strict=True):
                if data:
                    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(output.dtype)
                    output.detach().copy_(flat.reshape(output.shape))
        return True
