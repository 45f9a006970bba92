"""Features of devices under CUDA's name, NVIDIA's and AMD's by HIP: NCCL, and regrow's kernels in Triton.

All else that regrow needs of a device is in `accelerators.py`, and is the same for every kind.
"""

import torch

KIND = "cuda"


def available() -> bool:
    """True if this process could use an NVIDIA or AMD device."""
    return torch.cuda.is_available()


def nccl_available() -> bool:
    """True if this torch has NCCL, and a device that NCCL serves."""
    return available() and torch.distributed.is_nccl_available()


def toolkit() -> str:
    """Version of CUDA with which this torch was built; empty if it was built without CUDA."""
    return torch.version.cuda or ""


def is_one(device: torch.device) -> bool:
    """True if the device is an NVIDIA or AMD device."""
    return device.type == KIND
