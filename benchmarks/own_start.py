"""Time of a training script alone to the end of its first step, which no launcher can shorten."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "tests" / "scripts" / "train_micro.py"


def own_start(folder: Path) -> float:
    """Seconds of the tests' small training in micro-batches, started by plain Python.

    Args:
        folder: for its output.
    """
    words = [sys.executable, str(SCRIPT), "--steps", "1", "--invariant", "--out", str(folder / "alone.out")]
    began = time.monotonic()
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        took = time.monotonic() - began
    if said != b"trained\n":
        raise SystemExit(f"{SCRIPT} does not run by itself: exit code {process.returncode}")
    return took


def beyond(name: str, whole: Sequence[float], own: Sequence[float]) -> dict[str, float]:
    """The figure `<name>_s`: the median, over the rounds, of the time in addition to the script's own start.

    Args:
        name: of the figure.
        whole: time of each round.
        own: time of the script alone in the same round.
    """
    return {
        f"{name}_s": statistics.median(took - alone for took, alone in zip(whole, own, strict=True)),
        f"{name}_whole_s": statistics.median(whole),
        "own_start_s": statistics.median(own),
        "rounds": len(whole),
    }
