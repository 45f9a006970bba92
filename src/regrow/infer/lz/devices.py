"""Where tensors lie, as far as the penalty has to know."""

import torch

_IN_HOST_MEMORY = ("cpu", "meta")


def on_accelerator(tensor: torch.Tensor) -> bool:
    """Whether its elements lie on a device, where work is only enqueued."""
    return tensor.device.type not in _IN_HOST_MEMORY


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether its elements lie on a GPU under CUDA's name, NVIDIA's or AMD's, for which there are kernels."""
    return tensor.device.type == "cuda"


def gpu_available() -> bool:
    """Whether this process could take such a GPU into use."""
    return torch.cuda.is_available()
