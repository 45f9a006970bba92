"""Compares a step under regrow with one of plain torch: both trainings run at once, and train in turns."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack

from regrow.core.ids import Seconds
from regrow.drill.ground import Ground
from regrow.drill.judging import judge_steady
from regrow.drill.verdict import Judgement, failed
from regrow.launch.processes import end

ROUNDS = 12
WARM = 2
"""Number of first rounds, which do not count."""
_TRAINS: Seconds = 25.0
"""Time for the rounds after the first ones."""
_GLANCE: Seconds = 0.005


class SteadySide:
    """One training that waits for its turns. Its pipes are opened for reading and writing, so that no open blocks."""

    def __init__(self, ground: Ground, name: str) -> None:
        self._paths = [ground.folder / f"{name}.{end}" for end in ("asks", "answers")]
        for path in self._paths:
            os.mkfifo(path)
        self.command = [ground.script("steady.py"), name, *map(str, self._paths)]
        self._asks, self._answers = (os.open(path, os.O_RDWR | os.O_NONBLOCK) for path in self._paths)

    def block(self, process: "subprocess.Popen[bytes]", until: Seconds) -> float | None:
        """Request a block of steps; returns milliseconds per step, or None if the process has ended or time is over."""
        os.write(self._asks, b"go\n")
        while time.monotonic() < until and process.poll() is None:
            try:
                return float(os.read(self._answers, 64))
            except BlockingIOError:
                time.sleep(_GLANCE)
        return None

    def close(self) -> None:
        """Close the pipes."""
        os.close(self._asks)
        os.close(self._answers)


def check(ground: Ground) -> Judgement:
    """Alternate rounds of both sides until there are enough, or the time is over. A side that ends early has failed."""
    plain_log = ground.folder / "plain.log"
    found: dict[str, list[float]] = {"plain": [], "regrow": []}
    with ExitStack() as stack:
        sides = {name: SteadySide(ground, name) for name in found}
        for side in sides.values():
            stack.callback(side.close)
        log = stack.enter_context(plain_log.open("wb"))
        plain = subprocess.Popen(
            [sys.executable, *sides["plain"].command], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        stack.callback(end, plain)
        flags = ["--nproc-per-node=1", "--hang-timeout=1h"]
        job = stack.enter_context(ground.job("steady", flags, sides["regrow"].command, here=True))
        _go_rounds(sides, {"plain": plain, "regrow": job}, found, ground.until - 10.0)
        codes = plain.poll(), job.poll()
    if codes[0] is not None:
        ground.keep_output(plain_log)
        return failed(f"the training with torch alone ended with code {codes[0]}")
    if codes[1] is not None:
        return failed(f"the training under regrow ended with code {codes[1]}")
    return judge_steady(found)


def _go_rounds(
    sides: Mapping[str, SteadySide],
    processes: "Mapping[str, subprocess.Popen[bytes]]",
    found: Mapping[str, list[float]],
    until: Seconds,
) -> None:
    """Add alternating blocks of each side to `found` until there are enough, a side has ended, or time is over."""
    rounds_end = until
    for number in range(ROUNDS + WARM):
        for name, side in sides.items():
            took = side.block(processes[name], until)
            if took is None:
                return
            if number >= WARM:
                found[name].append(took)
        if number == 0:
            rounds_end = min(until, time.monotonic() + _TRAINS)
        if number > WARM and time.monotonic() > rounds_end:
            return
