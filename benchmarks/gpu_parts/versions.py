"""Part 1: versions and devices here, and a job of several ranks."""

import platform
import shutil
import subprocess
import sys

import torch

from gpu_parts.jobs import DEVICE, LIMIT_S, Job, play, tell

ASKED = ["name", "driver_version", "memory.total", "memory.used", "compute_mode", "mig.mode.current"]


def main() -> int:
    """Print the versions, and train."""
    built = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}
    tell(**built, device=DEVICE)
    if DEVICE == "cuda":
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        tell(nccl=".".join(map(str, version)), devices=torch.cuda.device_count())
    if smi := shutil.which("nvidia-smi"):
        query = [smi, f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader"]
        for line in subprocess.run(query, capture_output=True, text=True, timeout=20, check=False).stdout.splitlines():
            tell(gpu=dict(zip(ASKED, map(str.strip, line.split(",")), strict=False)))
    job = Job("none", options=())
    play([job], LIMIT_S - 5)
    return 0 if job.code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
