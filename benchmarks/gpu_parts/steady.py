"""Part 11: a step under regrow against plain steps that drain the device 0, 1 or 2 times, in turns.

All four trainings exist at once, and one trains at a time, for a block of steps, so that other load on the machine
affects all alike. The first block of each is left out.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from gpu_parts.jobs import LIMIT_S, tell

TRAINING = Path(__file__).with_name("steady_training.py")
SIDES = ("plain_0_drains", "plain_1_drain", "plain_2_drains", "regrow")
MOST_ROUNDS = 12


class Side:
    """One training, which waits for its turns."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._go, self._done = folder / f"{name}.go", folder / f"{name}.done"
        for path in (self._go, self._done):
            os.mkfifo(path)
        plain = [sys.executable, str(TRAINING), name[6]] if name != "regrow" else []
        run = ["-m", "regrow", "run", "--standalone", "--nproc-per-node=1", "--hang-timeout=1h", "--job=steady"]
        command = plain or [sys.executable, *run, str(TRAINING), "regrow"]
        with (folder / f"{name}.log").open("wb") as log:
            environment = {**os.environ, "TURN_GO": str(self._go), "TURN_DONE": str(self._done)}
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        # Opened for both directions, so that neither side waits for the other to open it.
        self._asks, self._answers = os.open(self._go, os.O_RDWR), os.open(self._done, os.O_RDWR | os.O_NONBLOCK)

    def block(self, deadline: float) -> float | None:
        """Train for a block of steps; returns milliseconds a step. None: it has ended, or the time is over."""
        os.write(self._asks, b"go\n")
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                return float(os.read(self._answers, 64))
            except BlockingIOError:
                time.sleep(0.005)
        return None

    def end(self) -> None:
        """End the training."""
        self.process.terminate()
        self.process.wait(timeout=10)


def main() -> int:
    """Run rounds until the time is over; print the medians, and the extra time of each side over plain."""
    folder, deadline = Path(os.environ["REGROW_HOME"]), time.monotonic() + LIMIT_S - 8
    sides = [Side(name, folder) for name in SIDES]
    found: dict[str, list[float]] = {name: [] for name in SIDES}
    for number in range(MOST_ROUNDS + 1):
        for side in sides:
            took = side.block(deadline)
            if took is not None and number:
                found[side.name].append(took)
        if time.monotonic() > deadline or any(side.process.poll() is not None for side in sides):
            break
        if number:
            tell(round=number, ms={name: round(times[-1], 2) for name, times in found.items() if times})
    stopped = [side.name for side in sides if side.process.poll() is not None]
    for side in sides:
        side.end()
    for name in stopped:
        tell(ended=name, log=(folder / f"{name}.log").read_text(errors="replace")[-400:])
    if stopped or not all(found.values()):
        return 1
    base = median(found[SIDES[0]])
    for name, times in found.items():
        middle = median(times)
        more = {"more_ms": round(middle - base, 2), "more_percent": round(100 * (middle / base - 1), 1)}
        tell(side=name, blocks=len(times), median_ms=round(middle, 2), **more)
    return 0


if __name__ == "__main__":
    sys.exit(main())
