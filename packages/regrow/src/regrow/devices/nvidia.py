"""Features of devices under CUDA's name, NVIDIA's and AMD's by HIP: NCCL, and regrow's kernels in Triton.

All else that regrow needs of a device is in `accelerators.py`, and the same for every kind.
"""

import torch

KIND = "cuda"


def available() -> bool:
    """True if this process could use such a device."""
    return torch.cuda.is_available()


def nccl_available() -> bool:
    """True if this torch has NCCL, and a device that NCCL serves."""
    return available() and torch.distributed.is_nccl_available()


def toolkit() -> str:
    """Version of CUDA that this torch was built with; empty if it was built without."""
    return torch.version.cuda or ""


def is_one(device: torch.device) -> bool:
    """True if this is a device of that kind."""
    return device.type == KIND
