"""Where these scripts compute: the processor, or the accelerator that `REGROW_TEST_DEVICE` names."""

import os
from collections.abc import Callable

import torch

DEVICE = torch.device(os.environ.get("REGROW_TEST_DEVICE", "cpu"))


def take_place(local_rank: Callable[[], int]) -> None:
    """Compute with the same bits each time; on an accelerator, on this rank's, or on the only one, which all share."""
    torch.set_num_threads(1)
    if DEVICE.type == "cuda":
        devices = torch.cuda.device_count()
        torch.cuda.set_device(local_rank() % devices if devices > 1 else 0)
        torch.use_deterministic_algorithms(True, warn_only=True)
