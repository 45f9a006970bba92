"""Tests on a real accelerator; elsewhere they are skipped with the reason. `make test-gpu` runs them."""

from pathlib import Path

import pytest
import torch

# By NVML: a process that has asked CUDA itself could not fork workers any more.
GPUS = torch.cuda.device_count()
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = pytest.mark.skip(reason="needs an NVIDIA GPU that this torch can use")
    for item in items:
        if HERE in item.path.parents and not GPUS:
            item.add_marker(reason)
