"""Place of tensors: on the processor, on an accelerator, or on one that Triton's kernels run on."""

import torch


def kernels_possible() -> bool:
    """True if this process could take a device into use that Triton's kernels run on."""
    return torch.cuda.is_available()


def takes_kernels(device: torch.device) -> bool:
    """True if this is such a device: one under CUDA's name, NVIDIA's or AMD's by HIP."""
    return device.type == "cuda"


def on_accelerator(tensor: torch.Tensor) -> bool:
    """True if its elements lie on a device, where work is only enqueued."""
    return tensor.device.type not in ("cpu", "meta")
