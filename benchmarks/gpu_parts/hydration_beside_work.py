"""Part 4: how fast state is read for a newcomer while the device works, on the stream that works and on another."""

import sys
import time
from contextlib import AbstractContextManager, nullcontext

import torch

from gpu_parts.jobs import DEVICE, tell
from regrow.hydration.memory import Outgoing
from regrow.hydration.plan import CHUNK_BYTES, ByteSpan

BYTES = 1 << 30
MATMULS = 2000
MOST_S = 4.0
WIDTH = 2048


def rate(state: torch.Tensor, stream: AbstractContextManager[object]) -> float:
    """GB/s of reading what fits into some seconds, as a holder reads it."""
    reader = Outgoing(lambda name: state, CHUNK_BYTES)
    began, read = time.perf_counter(), 0
    with stream:
        while read < state.nbytes and time.perf_counter() - began < MOST_S:
            reader.read((ByteSpan("state", read, CHUNK_BYTES),))
            read += CHUNK_BYTES
    return read / (time.perf_counter() - began) / 1e9


def main() -> int:
    """Idle and busy, on either stream; a busy device still works when the reading ends, or the figure is marked."""
    device = torch.device(DEVICE, 0)
    state = torch.randint(256, (BYTES,), dtype=torch.uint8, device=device)
    factor = torch.randn(WIDTH, WIDTH, device=device)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    for name in ("default", "own"):
        for busy in (False, True):
            stream = torch.cuda.stream(side) if name == "own" else nullcontext()
            torch.cuda.synchronize()
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            for _ in range(MATMULS if busy else 0):
                torch.mm(factor, factor)
            done.record()
            found = rate(state, stream)
            over = done.query()  # type: ignore[no-untyped-call]
            tell(stream=name, busy=busy, gb_per_s=round(found, 3), still_busy=not over)
    return 0


if __name__ == "__main__":
    sys.exit(main())
