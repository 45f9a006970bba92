"""Access to the dictionary in which a module keeps its buffers."""

import torch
from torch import nn


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The dictionary in which the module keeps its buffers by name: a new value in it replaces the buffer."""
    return module._buffers
