"""Cost of buddy copies in a step: none, and one every 16, 4 and 1 steps, in turns.

    python benchmarks/buddy.py            # about 8 minutes
    python benchmarks/buddy.py --quick    # about 3 minutes

One model of 25 million parameters with AdamW (300 MB of state), sharded by FSDP2 over four ranks on two nodes of this
machine, with a thread each. For a copy every rank puts its 75 MB into shared memory, its node's agent sends it to the
other node's agent during the next step, and that step's vote waits for it. On one machine both agents use the same
cores as the training; between machines the network does most of the work.

Four jobs run in turns, three paused while one trains. A turn has enough steps for the same number of copies on each
side, and its figure is the mean step time; *overhead* is the median over the rounds of the ratio to the side without
copies in the same round. *Streamed* is the speed at which one rank's copy reached the other node.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import msgspec
from contest import Job, JobStuck
from rich.console import Console
from rich.table import Table
from targets import tell, warn_if_busy

from regrow.core.records import AnyRecord, CopyStreamed

HERE = Path(__file__).resolve().parent
WORLD, NODES = 4, 2
ENDLESS = 1_000_000
EVERY = (0, 16, 4, 1)
"""Steps between two copies, for each side; 0: none."""
BLOCK = 16
"""Counted steps of a turn, after one more that is left out."""
START_DEADLINE = 180.0


@dataclass
class Side:
    """One job, and its mean step time in each round."""

    every: int
    job: Job
    records: Path
    steps: list[float] = field(default_factory=list)

    def streamed(self) -> float | None:
        """Median speed in GB/s at which a rank's copy reached the other node."""
        lines = (self.records / "events.jsonl").read_bytes().splitlines()
        records = [msgspec.json.decode(line, type=AnyRecord) for line in lines]
        speeds = [each.nbytes / each.seconds / 1e9 for each in records if isinstance(each, CopyStreamed)]
        return median(speeds) if speeds else None


def start(stack: ExitStack, folder: Path, every: int) -> Side:
    """A job that trains, paused after its first steps. Raises `JobStuck`."""
    name = f"every-{every}" if every else "without"
    command = [sys.executable, "-m", "regrow", "run", f"--local-nodes={NODES}", f"--nproc-per-node={WORLD // NODES}"]
    command += [f"--buddy-every={every}", f"--job={name}", "--quiet", "--hang-timeout=30min"]
    command += [str(HERE / "fsdp_regrow.py"), f"--steps={ENDLESS}"]
    records = folder / "jobs" / name
    environment = {"OMP_NUM_THREADS": "1", "REGROW_HOME": str(folder)}
    job = Job(name, command, records=records, log=folder / f"{name}.log", world=WORLD, environment=environment)
    stack.enter_context(job)
    # The first two copies need new memory, so wait for both.
    job.wait(lambda: job.world_step >= 2 * every + 3, deadline=START_DEADLINE, what="step after the second copy")
    job.pause()
    return Side(every, job, records)


def turn(job: Job) -> float:
    """Let a paused job run for a block of steps; the mean time between two commits of the whole world."""
    began = time.monotonic()
    job.go_on()
    job.wait_steps(BLOCK + 2)
    job.pause()
    commits = [at for _, at in job.ledger.world_commits() if at > began]
    return (commits[BLOCK + 1] - commits[1]) / BLOCK


def measure(folder: Path, rounds: int) -> list[tuple[Side, float | None]]:
    """Run all sides in turns; returns each with the speed of its copies. Raises `JobStuck`."""
    with ExitStack() as stack:
        sides = [start(stack, folder, every) for every in EVERY]
        for number in range(rounds):
            shift = number % len(sides)
            for side in sides[shift:] + sides[:shift]:
                side.steps.append(turn(side.job))
            shown = ", ".join(f"{side.job.name} {side.steps[-1]:.3f}" for side in sides)
            print(f"  round {number + 1} of {rounds}: {shown} s a step", flush=True)
        return [(side, side.streamed() if side.every else None) for side in sides]


def overheads(side: Side, none: Side) -> list[float]:
    """Overhead in percent, for each round."""
    return [100 * (ours / plain - 1) for ours, plain in zip(side.steps, none.steps, strict=True)]


def show(measured: list[tuple[Side, float | None]], console: Console) -> None:
    """Print the results."""
    table = Table(title=f"Buddy copies of 300 MB of state, {WORLD} ranks on {NODES} nodes of one machine")
    for column in ("a copy every", "step (s)", "overhead", "from", "to", "streamed"):
        table.add_column(column, justify="right")
    none = measured[0][0]
    for side, speed in measured:
        percent = overheads(side, none)
        cells = [f"{pick(percent):+.1f} %" for pick in (median, min, max)] if side.every else ["–"] * 3
        every = f"{side.every} steps" if side.every else "without"
        table.add_row(every, f"{median(side.steps):.3f}", *cells, f"{speed:.2f} GB/s" if speed else "–")
    console.print(table)


def figures(measured: list[tuple[Side, float | None]]) -> Iterator[tuple[str, float]]:
    """The numbers for `--json`."""
    none = measured[0][0]
    yield "step_s_none", median(none.steps)
    for side, speed in measured[1:]:
        yield f"overhead_percent_k{side.every}", median(overheads(side, none))
        yield f"step_s_k{side.every}", median(side.steps)
        if speed is not None:
            yield f"streamed_gbps_k{side.every}", speed


def main() -> int:
    """Measure, print, write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="turns of each side")
    parser.add_argument("--quick", action="store_true", help="3 rounds")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    warn_if_busy()
    folder = Path(tempfile.mkdtemp(prefix="regrow-buddy-"))
    try:
        measured = measure(folder, 3 if args.quick else args.rounds)
    except JobStuck as stuck:
        print(f"{stuck}; records and output are kept in {folder}")
        return 1
    show(measured, Console())
    tell("buddy", dict(figures(measured)), args.json)
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
