"""Cost of comparing replicas in a step: never, and every 100, 10 and 1 steps, in turns; and of its two parts alone.

    python benchmarks/digests.py            # about 10 minutes
    python benchmarks/digests.py --quick    # about 2 minutes, without every 100

One model of 25 million parameters with AdamW (300 MB of state) under DDP on two ranks of this machine, with a thread
each. For a comparison every rank reads all of its state once for the digest, and once more to copy it; both are bound
by memory bandwidth, and neither overlaps with the training. The steps of this model are short for its size (32 tokens a
rank), so the percentages are far above those of a real training; the seconds a GB apply elsewhere.

The jobs run in turns, the others paused while one trains. A turn has enough steps for the same number of comparisons on
each side, and its figure is the mean step time; *overhead* is the median over the rounds of the ratio to the side
without comparisons in the same round.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

import workload
from contest import Job, JobStuck
from rich.console import Console
from rich.table import Table
from targets import tell, warn_if_busy

from regrow.core.ids import StepNo
from regrow.train.state.fingerprints import fingerprint
from regrow.train.state.protected import ProtectedState
from regrow.train.state.verified import VerifiedCopy

HERE = Path(__file__).resolve().parent
WORLD = 2
ENDLESS = 1_000_000
START_DEADLINE = 180.0
REPEATS = 15


class Plan(NamedTuple):
    """Steps between two comparisons for each side, 0: none; and the counted steps of a turn."""

    every: tuple[int, ...]
    block: int


FULL, QUICK = Plan((0, 100, 10, 1), 100), Plan((0, 10, 1), 20)


@dataclass
class Side:
    """One job, and its mean step time in each round."""

    every: int
    job: Job
    steps: list[float] = field(default_factory=list)


class Parts(NamedTuple):
    """GB/s of one rank alone: of the digest, and of a copy into allocated memory. `nbytes`: size of its state."""

    digest: float
    copy: float
    nbytes: int


def alone() -> Parts:
    """Measure both parts of a comparison in this process alone, with one thread. Medians."""
    model = workload.prepare()
    optimizer = workload.make_optimizer(model)
    workload.loss_of(model, workload.make_batch(0, 0)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    state = ProtectedState([model, optimizer])
    copy = VerifiedCopy(state)
    number = iter(range(REPEATS + 1))

    def take() -> None:
        copy.take(StepNo(next(number)), b"", frozenset())

    take()
    digest_s = timed(lambda: fingerprint(*state.canonical()))
    copy_s = timed(take)
    return Parts(copy.nbytes / digest_s / 1e9, copy.nbytes / copy_s / 1e9, copy.nbytes)


def timed(call: Callable[[], object]) -> float:
    """Seconds, the median of several calls."""
    took = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return median(took)


def start(stack: ExitStack, folder: Path, every: int) -> Side:
    """A job that trains, paused after its first steps. Raises `JobStuck`."""
    name = f"every-{every}" if every else "without"
    command = [sys.executable, "-m", "regrow", "run", f"--nproc-per-node={WORLD}", f"--digest-every={every}"]
    command += [f"--job={name}", "--quiet", "--hang-timeout=60min", str(HERE / "ddp_regrow.py"), f"--steps={ENDLESS}"]
    environment = {"OMP_NUM_THREADS": "1", "REGROW_HOME": str(folder)}
    records = folder / "jobs" / name
    job = Job(name, command, records=records, log=folder / f"{name}.log", world=WORLD, environment=environment)
    stack.enter_context(job)
    # Comparisons whose copy needs new memory: that at step 0, and the first with optimizer state.
    job.wait(lambda: job.world_step >= max(every, 1) + 1, deadline=START_DEADLINE, what="step after two comparisons")
    job.pause()
    return Side(every, job)


def turn(job: Job, block: int) -> float:
    """Let a paused job run for a block of steps; the mean time between two commits of the whole world."""
    began = time.monotonic()
    job.go_on()
    job.wait_steps(block + 2)
    job.pause()
    commits = [at for _, at in job.ledger.world_commits() if at > began]
    return (commits[block + 1] - commits[1]) / block


def measure(folder: Path, plan: Plan, rounds: int) -> list[Side]:
    """Run all sides in turns. Raises `JobStuck`."""
    with ExitStack() as stack:
        sides = [start(stack, folder, every) for every in plan.every]
        for number in range(rounds):
            shift = number % len(sides)
            for side in sides[shift:] + sides[:shift]:
                side.steps.append(turn(side.job, plan.block))
            shown = ", ".join(f"{side.job.name} {side.steps[-1]:.3f}" for side in sides)
            print(f"  round {number + 1} of {rounds}: {shown} s a step", flush=True)
        return sides


def overheads(side: Side, none: Side) -> list[float]:
    """Overhead in percent, for each round."""
    return [100 * (ours / plain - 1) for ours, plain in zip(side.steps, none.steps, strict=True)]


def show(sides: list[Side], parts: Parts, console: Console) -> None:
    """Print the results."""
    table = Table(title=f"Comparing {parts.nbytes / 1e6:.0f} MB of state between {WORLD} replicas on one machine")
    for column in ("compared every", "step (s)", "overhead", "from", "to"):
        table.add_column(column, justify="right")
    for side in sides:
        percent = overheads(side, sides[0])
        cells = [f"{pick(percent):+.1f} %" for pick in (median, min, max)] if side.every else ["–"] * 3
        table.add_row(f"{side.every} steps" if side.every else "never", f"{median(side.steps):.3f}", *cells)
    console.print(table)
    total = 1 / parts.digest + 1 / parts.copy
    console.print(
        f"one rank alone: digest {parts.digest:.1f} GB/s, copy {parts.copy:.1f} GB/s, together {total:.2f} s a GB"
    )


def figures(sides: list[Side], parts: Parts) -> Iterator[tuple[str, float]]:
    """The numbers for `--json`."""
    yield "digest_gbps", parts.digest
    yield "copy_gbps", parts.copy
    yield "seconds_per_gb", 1 / parts.digest + 1 / parts.copy
    yield "step_s_none", median(sides[0].steps)
    for side in sides[1:]:
        yield f"overhead_percent_n{side.every}", median(overheads(side, sides[0]))
        yield f"step_s_n{side.every}", median(side.steps)


def main() -> int:
    """Measure, print, write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="turns of each side")
    parser.add_argument("--quick", action="store_true", help="short turns, 3 rounds")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    warn_if_busy()
    parts = alone()
    folder = Path(tempfile.mkdtemp(prefix="regrow-digests-"))
    try:
        sides = measure(folder, QUICK if args.quick else FULL, 3 if args.quick else args.rounds)
    except JobStuck as stuck:
        print(f"{stuck}; records and output are kept in {folder}")
        return 1
    show(sides, parts, Console())
    tell("digests", dict(figures(sides, parts)), args.json)
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
