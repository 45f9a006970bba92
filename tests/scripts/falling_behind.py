"""The stand-in device of a rank stands still in a script's step, while the host goes on; and how often it waits."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import torch

PATIENCE_S = 120.0


def _steering() -> Any:
    from standin import device  # type: ignore[import-not-found]  # placing.py has made it known

    return device.load()


def _waits() -> int:
    """Times that the host has waited for this rank's device in a call of the device's own."""
    return int(_steering().waits(torch.accelerator.current_device_index()))


class WaitsOfSteps:
    """Counts how often the host of this rank waits for its stand-in, from the begin of each body to the next."""

    def __init__(self) -> None:
        from regrow.devices.stream_points import StreamPoint

        self._slept = 0
        """Waits that look again and again, which the device does not see."""
        self._at: dict[int, int] = {}
        wait = StreamPoint.wait

        def counted(point: StreamPoint, *given: Any, **named: Any) -> float:
            self._slept += not point.passed()
            return wait(point, *given, **named)

        setattr(StreamPoint, "wait", counted)  # noqa: B010  a plain assignment is no method to mypy

    def enters(self, number: int) -> None:
        """The body of a step begins."""
        self._at[number] = self._slept + _waits()

    def tell(self, rank: int) -> None:
        """Write those of each step that another one followed."""
        found = {number: self._at[number + 1] - at for number, at in self._at.items() if number + 1 in self._at}
        Path(f"device-waits.{rank}.json").write_text(json.dumps(found))


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
            self._go_on(f"{_waits() - self._waits} waits")

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
        self._waits = _waits()
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
