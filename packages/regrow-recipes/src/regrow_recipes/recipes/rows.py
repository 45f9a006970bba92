"""Rows of tokens for the steps, from memory-mapped files."""

from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset


class Rows(Dataset[dict[str, torch.Tensor]]):
    """The rows of a folder that `preparing` wrote.

    A row is a dict of int64 tensors of shape [length], or [2, length] for pairs: `input_ids`, `labels`,
    `position_ids`; and two numbers: `used`, its length without padding, and `row`, its index.
    """

    def __init__(self, folder: str | Path) -> None:
        arrays = {
            name: np.load(Path(folder) / f"{name}.npy", mmap_mode="r") for name in ("tokens", "labels", "positions")
        }
        self._arrays = {"input_ids": arrays["tokens"], "labels": arrays["labels"], "position_ids": arrays["positions"]}
        self._used = np.load(Path(folder) / "used.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self._used)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = {name: torch.from_numpy(array[index].astype(np.int64)) for name, array in self._arrays.items()}
        return row | {"used": torch.tensor(int(self._used[index].max())), "row": torch.tensor(index)}


def batch_of(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Rows as one batch, as long as the longest: [rows, length], or [rows, 2, length] for pairs; `row` is [rows]."""
    longest = max(int(row["used"]) for row in rows)
    names = [name for name in rows[0] if name not in ("used", "row")]
    batch = {name: torch.stack([row[name][..., :longest] for row in rows]) for name in names}
    return batch | {"row": torch.stack([row["row"] for row in rows])}
