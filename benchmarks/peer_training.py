"""The part of the training that all sides of `peers.py` share: model, batches, a line for each finished step, the end.

Model and batches are those of `workload.py`. Sides differ only in the lines that their tools require.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import TextIO

import torch
import workload
from torch import Tensor, nn

FINAL = "final.pt"


class Steps:
    """Writes a line for each step that a rank has finished.

    Args:
        folder: holds `steps.<rank>.jsonl`, to which a restarted process appends.
        rank: the rank, or the replica of tools that have no ranks.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._rank = rank
        self._lines: TextIO = (folder / f"steps.{rank}.jsonl").open("a", buffering=1, encoding="utf-8")

    def finished(self, step: int) -> None:
        """Write the line of a step after its update."""
        line = {"at": time.monotonic(), "step": step, "rank": self._rank, "pid": os.getpid()}
        self._lines.write(json.dumps(line) + "\n")


def parse(description: str | None) -> argparse.Namespace:
    """Parse the arguments of every side."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="for lines, checkpoints and final parameters")
    parser.add_argument("--checkpoint-every", type=int, default=0, help="in steps; 0: never")
    parser.add_argument("--rank", type=int, default=0, help="the replica, where the tool has no ranks")
    return parser.parse_args()


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    """Loss of a rank at a step."""
    return workload.loss_of(model, workload.make_batch(step, rank))


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint, if there is one; returns the step to go on with."""
    path = folder / "checkpoint.pt"
    if not path.exists():
        return 0
    kept = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    return int(kept["step"])


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint atomically."""
    unfinished = folder / f"checkpoint.{os.getpid()}.tmp"
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, unfinished)
    unfinished.replace(folder / "checkpoint.pt")


def finish(folder: Path, model: nn.Module) -> None:
    """Write the final parameters."""
    unfinished = folder / f"final.{os.getpid()}.tmp"
    torch.save(model.state_dict(), unfinished)
    unfinished.replace(folder / FINAL)
