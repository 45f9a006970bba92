"""Part 4: speed of reading state for a newcomer while the device is busy, on the busy stream and on another."""

import sys
import time

import torch

from gpu_parts.jobs import DEVICE, tell
from regrow.devices.stream_points import StreamPoint
from regrow.hydration.memory import Outgoing
from regrow.hydration.plan import CHUNK_BYTES, ByteSpan

BYTES = 1 << 30
MATMULS = 2000
MOST_S = 4.0
WIDTH = 2048


def rate(state: torch.Tensor, *, own: bool) -> float:
    """GB/s of reading state for some seconds, as a holder reads it."""
    reader = Outgoing(lambda name: state, CHUNK_BYTES, StreamPoint([]) if own else None)  # the state is there already
    chunks = [(ByteSpan("state", at, CHUNK_BYTES),) for at in range(0, state.nbytes - CHUNK_BYTES + 1, CHUNK_BYTES)]
    began, read = time.perf_counter(), 0
    for data in reader.read_all(chunks):
        read += len(data)
        if time.perf_counter() - began > MOST_S:
            break
    return read / (time.perf_counter() - began) / 1e9


def main() -> int:
    """Measure idle and busy, on either stream; a figure is marked if the device's work ended before the reading."""
    device = torch.device(DEVICE, 0)
    state = torch.randint(256, (BYTES,), dtype=torch.uint8, device=device)
    factor = torch.randn(WIDTH, WIDTH, device=device)
    torch.accelerator.synchronize()
    for name in ("default", "own"):
        for busy in (False, True):
            torch.accelerator.synchronize()
            for _ in range(MATMULS if busy else 0):
                torch.mm(factor, factor)
            work = StreamPoint([device])
            found = rate(state, own=name == "own")
            tell(stream=name, busy=busy, gb_per_s=round(found, 3), still_busy=not work.passed())
    return 0


if __name__ == "__main__":
    sys.exit(main())
