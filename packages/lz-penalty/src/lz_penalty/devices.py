"""Devices of tensors: CPU, any accelerator, or a GPU on which Triton's kernels run."""

import torch


def kernels_possible() -> bool:
    """True if this process could use a device on which Triton's kernels run."""
    return torch.cuda.is_available()


def takes_kernels(device: torch.device) -> bool:
    """True if Triton's kernels run on the device: NVIDIA's CUDA, or AMD's HIP under the same name."""
    return device.type == "cuda"


def on_accelerator(tensor: torch.Tensor) -> bool:
    """True if the tensor is on a device that runs asynchronously."""
    return tensor.device.type not in ("cpu", "meta")
