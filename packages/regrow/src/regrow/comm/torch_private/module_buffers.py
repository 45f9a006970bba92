"""Access to the place where a module keeps its buffers."""

import torch
from torch import nn


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The module's own buffers by name, as it holds them: what is put in there takes a buffer's place."""
    return module._buffers
