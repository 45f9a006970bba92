"""Stand-in for a library: mixup with its own generator, and noise that depends on a counter of the module."""

import numpy as np
import torch
from torch import Tensor

_calls = 0


class Mixup:
    def __init__(self, alpha: float, seed: int) -> None:
        self.alpha, self.rng = alpha, np.random.default_rng(seed)

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        share = float(self.rng.beta(self.alpha, self.alpha))
        other = torch.from_numpy(self.rng.permutation(len(x)))
        return share * x + (1 - share) * x[other], share * y + (1 - share) * y[other]


def decayed_noise(x: Tensor) -> Tensor:
    """Noise that grows weaker with each call."""
    global _calls
    _calls += 1
    return x + torch.randn_like(x) / _calls
