"""Part 12: `recovery.py` with a large model: kills in a row, with a standby."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from gpu_parts.jobs import DEVICE, LIMIT_S, tell

BENCHMARK = Path(__file__).parents[1] / "recovery.py"
ROOM_OF_LARGE = 110 << 30
"""Bytes for four ranks and a standby of 1 billion parameters each, with AdamW in float32, and for their activations."""


def model() -> str:
    """Largest model that fits."""
    if DEVICE != "cuda":
        return "25m"
    return "1b" if torch.cuda.get_device_properties(0).total_memory > ROOM_OF_LARGE else "300m"


def main() -> int:
    """Print the benchmark's figures in one line; its output is passed on."""
    figures, kills = Path(os.environ["REGROW_HOME"]) / "figures.json", 5 if DEVICE == "cuda" else 1
    command = [sys.executable, str(BENCHMARK), f"--device={DEVICE}", f"--model={model()}", f"--soak={kills}"]
    tell(model=model())
    code = subprocess.run([*command, f"--json={figures}"], timeout=LIMIT_S, check=False).returncode
    if figures.exists():
        print(" ".join(figures.read_text().split()), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
