"""Device of these scripts: the processor, or the accelerator that `REGROW_TEST_DEVICE` names.

`standin` is the tests' own (tests/standin).
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

NAME = os.environ.get("REGROW_TEST_DEVICE", "cpu")
if NAME == "standin":
    sys.path.append(str(Path(__file__).parents[1]))
    from standin import device  # type: ignore[import-not-found]  # as a package beside this folder

    device.load()
DEVICE = torch.device(NAME)


def break_device() -> None:
    """The stand-in of this rank fails for good where its stream has come to this point."""
    device.load().fail(torch.accelerator.current_device_index(), in_stream=True)


def spoil(how: str) -> None:
    """The next collective of this rank on the device, or its next connection, is spoilt: see device.py."""
    device.load().spoil(how)


def group_options() -> list[tuple[str, object]]:
    """Options that groups of the stand-in were made with in this process."""
    found: list[tuple[str, object]] = device.GROUP_OPTIONS
    return found


def take_place(local_rank: Callable[[], int]) -> None:
    """Compute with the same bits each time; on an accelerator, on this rank's, or on the only one, which all share."""
    torch.set_num_threads(1)
    if DEVICE.type != "cpu":
        devices = torch.accelerator.device_count()
        torch.accelerator.set_device_index(local_rank() % devices if devices > 1 else 0)
        torch.use_deterministic_algorithms(True, warn_only=True)
