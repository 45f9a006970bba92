"""Part 6: time until the memory of a killed process, which held much of the GPU, is free again."""

import shutil
import subprocess
import sys
import time

from gpu_parts.jobs import DEVICE, LIMIT_S, skip, tell

HOLDER = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(min(50 << 30, free * 6 // 10), dtype=torch.uint8, device="cuda").zero_()
torch.cuda.synchronize()
print(held.nbytes, flush=True)
sys.stdin.read()
"""
SLACK_MIB = 64


def used() -> int:
    """MiB of the first GPU, by the driver: this process opens no context."""
    query = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0])


def main() -> int:
    """Measure one kill."""
    if shutil.which("nvidia-smi") is None:
        return skip(f"no nvidia-smi to ask for the memory of {DEVICE}")
    before = used()
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    if holder.stdout is None or not (held := holder.stdout.readline()):
        return 1
    during = used()
    tell(held_gb=round(int(held) / 1e9, 1), used_mib=during, before_mib=before)
    killed = time.monotonic()
    holder.kill()
    holder.wait(timeout=LIMIT_S)
    reaped = time.monotonic() - killed
    until = killed + LIMIT_S - 10
    while (now := used()) > before + SLACK_MIB and time.monotonic() < until:
        time.sleep(0.05)
    free = now <= before + SLACK_MIB
    tell(reaped_s=round(reaped, 3), free_s=round(time.monotonic() - killed, 3) if free else None, after_mib=now)
    return 0 if free else 1


if __name__ == "__main__":
    sys.exit(main())
