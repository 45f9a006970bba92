"""Part 12: `recovery.py` with a large model: kills in a row, with a standby."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from gpu_parts.jobs import DEVICE, LIMIT_S, tell

BENCHMARK = Path(__file__).parents[1] / "recovery.py"
ROOM_OF_LARGE = 110 << 30
"""Four ranks and a standby of 1 billion parameters, with AdamW in float32, and what they compute with."""


def model() -> str:
    """Largest model that fits."""
    if DEVICE != "cuda":
        return "25m"
    return "1b" if torch.cuda.get_device_properties(0).total_memory > ROOM_OF_LARGE else "300m"


def main() -> int:
    """Its figures, in one line; its own output is that of this part."""
    figures, kills = Path(os.environ["REGROW_HOME"]) / "figures.json", 5 if DEVICE == "cuda" else 1
    command = [sys.executable, str(BENCHMARK), f"--device={DEVICE}", f"--model={model()}", f"--soak={kills}"]
    tell(model=model())
    code = subprocess.run([*command, f"--json={figures}"], timeout=LIMIT_S, check=False).returncode
    if figures.exists():
        print(" ".join(figures.read_text().split()), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
