"""Rate of reading a holder's state while its device is busy, against that of an idle one, on the stand-in device.

    python benchmarks/reading.py            # about half a minute

The queue of the script's stream is full: each launch takes 1 ms in addition to its arithmetic. A chunk of 1 MiB takes
as long on any stream. `busy_over_idle` is the rate during that work over the idle rate, both medians of pieces that are
read in turns; `in_the_scripts_stream` is the same for a reader without a stream of its own, which waits for the queue.
g++ builds the device at the first use.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from statistics import median

from targets import tell, warn_if_busy

ROOT = Path(__file__).resolve().parent.parent
LAG_US, QUEUE = 1000, 1024
BYTES, ROUNDS = 32 << 20, 5


def main() -> int:
    """Print the table; returns 1 if nothing could be measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ |= {"STANDIN_LAG_US": str(LAG_US), "STANDIN_QUEUE": str(QUEUE)}
    sys.path.insert(0, str(ROOT))
    warn_if_busy()
    figures = measured()
    for name, figure in figures.items():
        sys.stdout.write(f"{name:24}{figure:10.3f}\n")
    tell("reading", figures, args.json)
    return 0


def measured() -> dict[str, float]:
    """The figures."""
    import torch
    from tests.standin import device

    from regrow.devices.stream_points import StreamPoint
    from regrow.hydration.memory import Outgoing
    from regrow.hydration.plan import CHUNK_BYTES, ByteSpan

    device.load()
    here = torch.device(device.NAME, 0)
    state, other = torch.ones(BYTES, dtype=torch.uint8, device=here), torch.ones(16, device=here)
    chunks = [(ByteSpan("state", at, CHUNK_BYTES),) for at in range(0, BYTES, CHUNK_BYTES)]

    def rate(*, busy: bool, own: bool) -> float:
        torch.accelerator.synchronize()
        behind = StreamPoint([here]) if own else None
        for _ in range(QUEUE - len(chunks) if busy else 0):
            other.add_(1)
        work, began = StreamPoint([here]), time.perf_counter()
        read = sum(len(data) for data in Outgoing(lambda _: state, CHUNK_BYTES, behind).read_all(chunks))
        took = time.perf_counter() - began
        if busy and own and work.passed():
            raise SystemExit("the device was done before all was read: nothing was measured")
        return read / took / 1e9

    found: dict[tuple[bool, bool], list[float]] = {}
    for _ in range(ROUNDS):
        for busy, own in ((False, True), (True, True), (True, False)):
            found.setdefault((busy, own), []).append(rate(busy=busy, own=own))
    rates = {key: median(each) for key, each in found.items()}
    return {
        "idle_gbps": rates[False, True],
        "busy_gbps": rates[True, True],
        "busy_over_idle": rates[True, True] / rates[False, True],
        "in_the_scripts_stream": rates[True, False] / rates[False, True],
    }


if __name__ == "__main__":
    sys.exit(main())
