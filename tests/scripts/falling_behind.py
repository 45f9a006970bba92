"""The stand-in device of a rank stands still in a script's step, while the host goes on."""

import threading
import time
from pathlib import Path
from typing import Any

import torch

PATIENCE_S = 120.0


def _steering() -> Any:
    from standin import device  # type: ignore[import-not-found]  # placing.py has made it known

    return device.load()


class Standstill:
    """The stand-in of this rank stands still from the end of a step's update on, so that its host is ahead of it.

    Args:
        wanted: RANK:STEP, each once in the job, in whose folder that is remembered.
        until_next: it goes on where the host comes into the next body; else it never does, and its host goes on when
            the other ranks have committed the step.
    """

    def __init__(self, wanted: list[str], *, until_next: bool) -> None:
        self._wanted, self._until_next = wanted, until_next
        self._gate = 0
        self._waits = 0

    def enters(self) -> None:
        """The host is in a body again."""
        if self._gate and self._until_next:
            self._go_on(f"{_steering().waits() - self._waits} waits")

    def updated(self, rank: int, number: int, world: int) -> None:
        """The update of a step is enqueued."""
        if not self._stand(rank, number) or self._until_next:
            return
        others = [Path(f"committed-{other}-{number}") for other in range(world) if other != rank]
        until = time.monotonic() + PATIENCE_S
        while not all(each.exists() for each in others):
            if time.monotonic() > until:
                raise TimeoutError(f"others have not committed step {number}")
            time.sleep(0.005)

    def committed(self, rank: int, number: int) -> None:
        """The host has committed a step."""
        if any(each.endswith(f":{number}") for each in self._wanted):
            Path(f"committed-{rank}-{number}").touch()

    def _stand(self, rank: int, number: int) -> bool:
        """True if it stands still from now on, as was wanted."""
        mark = Path(f"stood-{rank}-{number}")
        if f"{rank}:{number}" not in self._wanted or mark.exists():
            return False
        mark.touch()
        self._waits = _steering().waits()
        self._gate = _steering()._call("close_gate", torch.accelerator.current_device_index())
        if self._until_next:
            late = threading.Timer(PATIENCE_S, self._go_on, ["late"])  # a host that waits would wait for ever
            late.daemon = True
            late.start()
        return True

    def _go_on(self, how: str) -> None:
        gate, self._gate = self._gate, 0
        if gate:
            Path("ahead").write_text(how)
            _steering()._call("open_gate", gate)
