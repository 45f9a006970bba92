"""Part 7: finds calls that hold Python's lock while they block on a full launch queue."""

import sys
import threading
import time
from collections.abc import Callable

import torch

from gpu_parts.jobs import DEVICE, tell

BUSY_S = 1.2
BLOCKS_S = 0.3
"""A call that takes longer has waited for the device."""
TICK_S = 0.001
CALLS = 4
MOST_LAUNCHES = 8000


class Ticker:
    """A thread that needs the lock every millisecond: its longest gap is the time that another thread held it."""

    def __init__(self) -> None:
        self._gaps: list[float] = []
        self._over = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        last = time.perf_counter()
        while not self._over.wait(TICK_S):
            now = time.perf_counter()
            self._gaps.append(now - last)
            last = now

    def longest(self) -> float:
        """The longest gap since the last call."""
        time.sleep(10 * TICK_S)
        gaps, self._gaps = self._gaps, []
        return max(gaps, default=0.0)

    def end(self) -> None:
        """End the thread."""
        self._over.set()


class Device:
    """Keeps the device busy for a known time."""

    def __init__(self) -> None:
        self.x = torch.zeros(64, device=DEVICE)
        self._cycles_a_second = 1e9
        self._busy(0.2)
        torch.cuda.synchronize()
        began = time.perf_counter()
        self._busy(0.5)
        torch.cuda.synchronize()
        self._cycles_a_second *= 0.5 / (time.perf_counter() - began)

    def _busy(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * self._cycles_a_second))  # type: ignore[no-untyped-call]

    def launches(self) -> int:
        """Number of launches that the queue takes before one blocks."""
        torch.cuda.synchronize()
        self._busy(2.0)
        for count in range(1, MOST_LAUNCHES):
            began = time.perf_counter()
            self.x.add_(1)
            if time.perf_counter() - began > 0.05:
                return count
        return MOST_LAUNCHES

    def fill(self, launches: int) -> None:
        """Make the device busy, and queue `launches` launches behind that work."""
        torch.cuda.synchronize()
        self._busy(BUSY_S)
        for _ in range(launches):
            self.x.add_(1)


def calls(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Calls of training scripts and of regrow."""
    mask = torch.zeros(64, dtype=torch.bool, device=DEVICE)
    side, event = torch.cuda.Stream(), torch.cuda.Event()  # type: ignore[no-untyped-call]
    host = torch.zeros(64)

    def synchronized() -> None:
        event.record()
        event.synchronize()

    return {
        "add_": lambda: x.add_(1),
        "event.record": event.record,
        "record_event": lambda: torch.cuda.current_stream().record_event(),
        "wait_stream": lambda: side.wait_stream(torch.cuda.current_stream()),
        "index_put": lambda: x.__setitem__(1, 5),
        "masked": lambda: x.__setitem__(mask, 0),
        "item": lambda: x[0].item(),
        "cpu": x.cpu,
        "to_device": lambda: x.copy_(host, non_blocking=True),
        "synchronize": torch.cuda.synchronize,
        "event.synchronize": synchronized,
    }


def compiled(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """A launch of the compiler's kernels; empty if there is no compiler."""
    kernel = torch.compile(lambda y: y.add_(1))
    try:
        kernel(x)
    except Exception as error:  # noqa: BLE001  the part goes on without
        tell(compiler=repr(error)[:200])
        return {}
    return {"compiled": lambda: kernel(x)}


def measure(name: str, call: Callable[[], object], device: Device, ticker: Ticker, launches: int) -> None:
    """Print one line with the queue full, and one with the device only busy."""
    for full in (True, False):
        device.fill(launches if full else 0)
        ticker.longest()
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        took, stood = time.perf_counter() - began, ticker.longest()
        lock = "held" if stood > BLOCKS_S else "released" if took > BLOCKS_S else "did not block"
        tell(call=name, full=full, took_s=round(took, 3), ticker_stood_s=round(stood, 3), lock=lock)


def main() -> int:
    """Measure all calls; the compiled one comes last, as the compiler takes long."""
    device, ticker = Device(), Ticker()
    known = calls(device.x)
    for call in known.values():
        call()
    limit = device.launches()
    tell(queue=limit)
    for name, call in known.items():
        measure(name, call, device, ticker, limit - 2)
    for name, call in compiled(device.x).items():
        measure(name, call, device, ticker, limit - 2)
    ticker.end()
    torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
