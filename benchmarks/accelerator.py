"""Step time on an accelerator with and without regrow, on the tests' stand-in device.

    python benchmarks/accelerator.py            # about 5 minutes
    python benchmarks/accelerator.py --quick    # about 2 minutes

The stand-in takes 200 µs for each launch in addition to its arithmetic, and its queue has room for one step. A host
that runs ahead keeps it busy, so each time that the host waits for the whole queue is visible. Sides: one rank; two
ranks that average their gradients on the host; and two of DDP over groups of the device's own, as NCCL's are. All sides
run at once and train in turns, a block of steps each. `step_over_plain`: regrow's shortest block over plain torch's,
which other load on the machine affects least. `drains_a_step`: regrow's waits for the device in addition to the
script's own; `ahead_over_plain`: length of the queue at the end of a step, over that under plain torch. Figures of DDP
end in `_ddp`: its gate has to wait for the sums of gradients, once a step. `silent_differences`: losses, and digests of
parameters, that differ from the same training on the CPU. g++ builds the device at the first use.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from targets import tell, warn_if_busy

HERE = Path(__file__).resolve().parent
TRAINING = HERE / "accelerator_training.py"
LAG_US, BLOCK = 200, 5
START_S, BLOCK_S = 240.0, 120.0
WORLDS = ((1, ""), (2, ""), (2, "ddp"))
"""World size, and the way of averaging gradients."""
WARM = 2


class Block(NamedTuple):
    """One block: milliseconds a step, number of host waits for the device, and length of the queue at a step's end."""

    ms: float
    waits: float
    queued: float


class Side:
    """One training, which trains only in its turns."""

    def __init__(self, name: str, world: int, way: str, device: str, rounds: int, folder: Path) -> None:
        self.name, self.found = f"{name}, {world} ranks on {device} {way}", folder / f"{name}-{world}-{device}.json"
        self.blocks: list[Block] = []
        here = folder / f"{name}-{world}-{device}"
        here.mkdir()
        go, done = here / "go", here / "done"
        for path in (go, done):
            os.mkfifo(path)
        environment = {
            **os.environ,
            "REGROW_TEST_DEVICE": device,
            "STANDIN_LAG_US": str(LAG_US),
            "STANDIN_GROUPS": str(int(way == "ddp")),
            "TURN_DDP": str(int(way == "ddp")),
            "TURN_GO": str(go),
            "TURN_DONE": str(done),
            "TURN_ROUNDS": str(rounds),
            "TURN_BLOCK": str(BLOCK),
            "REGROW_HOME": str(here),
            "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(HERE.parent)]),
        }
        # Opened for both directions, so that opening does not block.
        self._asks, self._answers = os.open(go, os.O_RDWR), os.open(done, os.O_RDWR | os.O_NONBLOCK)
        self.log = here / "log"
        script = [str(TRAINING), name, str(self.found)]
        self.processes = []
        for command, more in _commands(name, world, script):
            with self.log.open("ab") as log:
                started = subprocess.Popen([sys.executable, *command], stdout=log, stderr=log, env=environment | more)
            self.processes.append(started)

    def block(self, limit: float) -> Block:
        """Train for one block of steps."""
        os.write(self._asks, b"go\n")
        until = time.monotonic() + limit
        while time.monotonic() < until:
            try:
                return Block(*map(float, os.read(self._answers, 128).split()))
            except BlockingIOError:
                if any(process.poll() for process in self.processes):
                    break
                time.sleep(0.002)
        self.end()
        raise SystemExit(f"{self.name} does not train:\n{self.log.read_text(errors='replace')[-2000:]}")

    def result(self) -> dict[str, object]:
        """The side's final result."""
        for process in self.processes:
            if process.wait(timeout=BLOCK_S):
                raise SystemExit(f"{self.name} has failed:\n{self.log.read_text(errors='replace')[-2000:]}")
        found: dict[str, object] = json.loads(self.found.read_text())
        return found

    def end(self) -> None:
        """End the side."""
        for process in self.processes:
            process.terminate()
            process.wait(timeout=BLOCK_S)
        for descriptor in (self._asks, self._answers):
            os.close(descriptor)


def _commands(name: str, world: int, script: list[str]) -> list[tuple[list[str], dict[str, str]]]:
    """The processes of a side, each with its additional environment variables."""
    if name == "regrow":
        words = ["run", "--standalone", f"--nproc-per-node={world}", "--hang-timeout=1h", "--job=accelerator"]
        return [(["-m", "regrow", *words, *script], {})]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world)}
    return [(script, place | {"RANK": str(rank)}) for rank in range(world)]


def differences(truth: dict[str, object], found: dict[str, object]) -> int:
    """Number of differing losses, plus 1 if the parameters differ."""
    mine, theirs = truth["losses"], found["losses"]
    if not isinstance(mine, list) or not isinstance(theirs, list) or len(mine) != len(theirs):
        return len(str(mine))
    others = [a for a, b in zip(mine, theirs, strict=True) if a != b]
    return len(others) + int(truth["digest"] != found["digest"])


def measure(world: int, way: str, rounds: int, folder: Path) -> dict[str, float]:
    """The figures of one world."""
    truth = Side("plain", world, way, "cpu", rounds, folder)
    for _ in range(rounds):
        truth.block(START_S)
    expected = truth.result()
    truth.end()
    plain, regrow = sides = [Side(name, world, way, "standin", rounds, folder) for name in ("plain", "regrow")]
    for number in range(rounds):
        for side in sides if number % 2 else reversed(sides):
            side.blocks.append(side.block(BLOCK_S if number else START_S))
    silent = sum(differences(expected, side.result()) for side in sides)
    for side in sides:
        side.end()
    theirs, ours = plain.blocks[WARM:], regrow.blocks[WARM:]  # earlier, the queue has no limit yet
    return {
        "step_over_plain": min(each.ms for each in ours) / min(each.ms for each in theirs),
        "plain_ms": min(each.ms for each in theirs),
        "regrow_ms": min(each.ms for each in ours),
        "plain_drains_a_step": median(each.waits for each in theirs),
        "drains_a_step": median(each.waits for each in ours) - median(each.waits for each in theirs),
        "ahead_over_plain": median(each.queued for each in ours) / max(1.0, median(each.queued for each in theirs)),
        "silent_differences": float(silent),
    }


def main() -> int:
    """Both worlds, a table, and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    args = parser.parse_args()
    console = Console()
    warn_if_busy()
    sys.path[:0] = [str(HERE.parent)]
    from tests.standin.building import Unbuildable, library

    try:
        library()
    except Unbuildable as reason:
        console.print(str(reason))
        return 1
    table = Table("ranks", "plain", "regrow", "over plain", "its waits", "regrow's beyond", "ahead", "differences")
    figures: dict[str, float] = {}
    for world, way in WORLDS:
        with tempfile.TemporaryDirectory(prefix="regrow-accelerator-") as folder:
            found = measure(world, way, 12 if args.quick else 40, Path(folder))
        table.add_row(
            f"{world} {way}",
            f"{found['plain_ms']:.1f} ms",
            f"{found['regrow_ms']:.1f} ms",
            f"{found['step_over_plain']:.3f}",
            f"{found['plain_drains_a_step']:.2f}",
            f"{found['drains_a_step']:.2f}",
            f"{found['ahead_over_plain']:.2f}",
            f"{found['silent_differences']:.0f}",
        )
        figures |= {f"{name}_{way or world}": value for name, value in found.items()}
    for name in ("step_over_plain", "drains_a_step", "silent_differences"):
        figures[name] = max(figures[f"{name}_{way or world}"] for world, way in WORLDS)
    console.print(table)
    tell("accelerator", figures, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
