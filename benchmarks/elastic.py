"""Cost of a change of the world size for the remaining ranks, cost of invariant losses, and gain of more replicas.

    python benchmarks/elastic.py            # about 12 minutes
    python benchmarks/elastic.py --quick    # about 5 minutes

*Changes*: one model of 25 million parameters with AdamW (300 MB of state) in 8 micro-batches a step, on 2 and 4 ranks
in turn, one thread each. Sides, in turns on one machine, one paused while the other runs: regrow, requested over HTTP
as by `regrow scale`; torchrun's elastic agents with a checkpoint on local disk every 10 steps, one of which joins and
leaves. *Pause* is the time from the last step committed before a change to the first one after it, minus a median
step. regrow's is taken from its records, and again from the commits of rank 0 alone. *Copied beside* is the time in
which the newcomers' bytes go over as many plain unix sockets at once, with nothing else running, after the rounds.

*Invariant*: the same model on 4 ranks in one job, blocks of steps in the default mode and in world-invariant mode in
turns. *Throughput*: a model with micro-batches of a fixed duration, on 1 to 4 replicas of one job.

Exits with 1 if a change did not happen.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
from contest import JobStuck
from hydration import PlainSocket, State
from resizing import (
    Change,
    RegrowJob,
    TorchrunJob,
    changes_of,
    changes_told,
    extra_memory,
    free_port,
    rates_by_world,
    turns,
    wait_warm,
)
from rich.console import Console
from rich.table import Table
from targets import tell, warn_if_busy

from regrow.core.errors import RegrowError
from regrow.core.ids import StepNo

MICROBATCHES = 8
NAPS = 12
"""Micro-batches of the sleeping model: worlds from 1 to 4 have equal shares."""
CHECKPOINT_EVERY = 10
SETTLE = 8
"""Steps between two changes."""
NEWCOMERS = 2
BLOCK = 4
"""Steps of one mode before the other's turn; the first is left out."""
GROWN_WITHIN_S = 0.3
"""Target of the pause of growth, in addition to the time in which a peer sends the state."""
PARTS = ("changes", "invariant", "throughput")


@dataclass
class Measured:
    """The results. `stuck`: a change that did not happen."""

    ours: list[Change] = field(default_factory=list)
    theirs: list[Change] = field(default_factory=list)
    usual: list[float] = field(default_factory=list)
    invariant: list[float] = field(default_factory=list)
    memory: float = 0.0
    copied: list[float] = field(default_factory=list)
    rates: dict[int, float] = field(default_factory=dict)
    stuck: list[str] = field(default_factory=list)

    @property
    def overhead(self) -> list[float]:
        """World-invariant mode over the default in percent of a step, for each pair of blocks."""
        return [100 * (b / a - 1) for a, b in zip(self.usual, self.invariant, strict=False)]

    def pauses(self, *, grow: bool) -> list[Change]:
        """Changes of regrow's side, of one kind."""
        return [change for change in self.ours if (change.after > change.before) == grow]


# --- measurements -----------------------------------------------------------------------------------------------


def measure_changes(folder: Path, measured: Measured, *, rounds: int) -> None:
    """Grow both sides from 2 to 4 and shrink them back, in turns."""
    with ExitStack() as stack:
        ours = RegrowJob(folder, "regrow", ["train", f"--microbatches={MICROBATCHES}"], start=2, most=4)
        theirs = TorchrunJob(
            folder, "torchrun", port=free_port(), checkpoint_every=CHECKPOINT_EVERY, microbatches=MICROBATCHES
        )
        for job in (ours, theirs):
            stack.enter_context(job)
            wait_warm(job)
            job.pause()
        for number in range(rounds):
            ours.go_on()
            for size in (4, 2):
                ours.wait_steps(SETTLE)
                ours.resize(size)
            ours.wait_steps(SETTLE)
            ours.pause()
            measured.ours = changes_told(ours.ledger)
            _progress(number, rounds, "regrow", measured.ours[-2:])
            theirs.go_on()
            for change in (theirs.join, theirs.leave):
                theirs.wait_steps(SETTLE)
                change()
            theirs.wait_steps(SETTLE)
            theirs.pause()
            measured.theirs = changes_of(theirs.ledger)
            _progress(number, rounds, "torchrun", measured.theirs[-2:])
        nbytes, _ = hydration(measured.pauses(grow=True))
        measured.copied = copied_beside(folder, int(nbytes / NEWCOMERS))


def copied_beside(folder: Path, nbytes: int, *, rounds: int = 5) -> list[float]:
    """Seconds in which each of `NEWCOMERS` plain unix sockets, all at once, transfers `nbytes`; the first is left out.

    Both ends' memory was used before, and nothing is verified.
    """
    state = State(nbytes, value=1.0)
    seconds = []
    with ExitStack() as stack:
        copies = []
        for number in range(NEWCOMERS):
            (own := folder / f"copy-{number}").mkdir()
            room = np.ones(state.nbytes, dtype=np.uint8)
            copies.append(PlainSocket(stack, state, own, room, tcp=False))
        pool = stack.enter_context(ThreadPoolExecutor(NEWCOMERS))
        for _ in range(rounds + 1):
            began = time.perf_counter()
            for done in [pool.submit(copy.copy) for copy in copies]:
                done.result()
            seconds.append(time.perf_counter() - began)
    return seconds[1:]


def _progress(number: int, rounds: int, side: str, changes: Sequence[Change]) -> None:
    words = ", ".join(f"{each.before} to {each.after} in {each.pause:.2f} s" for each in changes)
    print(f"  round {number + 1} of {rounds}, {side}: {words}", flush=True)


def measure_invariant(folder: Path, measured: Measured, *, pairs: int) -> None:
    """Run one job in both modes in turns."""
    words = ["swap", f"--microbatches={MICROBATCHES}", f"--block={BLOCK}"]
    with RegrowJob(folder, "swap", words, start=4, most=4) as job:
        # The first pair warms up.
        for pair in range(1, pairs + 2):
            end = StepNo(2 * BLOCK * pair)
            job.wait(lambda end=end: job.world_step >= end, deadline=600, what=f"step {end}")  # type: ignore[misc]
            print(f"  pair {pair - 1} of {pairs}" if pair > 1 else "  warm", flush=True)
        job.look()
        usual, invariant = turns(job.ledger, BLOCK)
        measured.usual, measured.invariant = usual[1 : pairs + 1], invariant[1 : pairs + 1]
        measured.memory = extra_memory(job.ledger, BLOCK)


def measure_throughput(folder: Path, measured: Measured, *, steps: int) -> None:
    """Grow one job by a replica at a time."""
    with RegrowJob(folder, "sleep", ["sleep", f"--microbatches={NAPS}"], start=1, most=4) as job:
        wait_warm(job)
        for size in range(1, 5):
            if size > 1:
                job.resize(size)
            job.wait_steps(steps)
            print(f"  {size} of 4 replicas", flush=True)
        measured.rates = rates_by_world(job.ledger)


# --- the report --------------------------------------------------------------------------------------------------


def show(measured: Measured, console: Console) -> None:
    """Print the results."""
    if measured.ours or measured.theirs:
        console.print(_table(measured))
        console.print(
            "regrow: by its records; rank 0: by the commits of that rank. redone: committed steps that ran again."
        )
        _show_stages(measured, console)
    if measured.overhead:
        usual, invariant = median(measured.usual), median(measured.invariant)
        low, high = min(measured.overhead), max(measured.overhead)
        console.print(
            f"world-invariant mode, {len(measured.overhead)} pairs of blocks: {usual:.3f} s a step in the default, "
            f"{invariant:.3f} s in this; overhead {median(measured.overhead):+.1f} % of a step (from {low:+.1f} to "
            f"{high:+.1f} %), {measured.memory / 1e6:+.0f} MB of memory a rank",
            highlight=False,
        )
    for world, ratio in _ratios(measured).items():
        console.print(f"throughput of {world} replicas over that of 1: {ratio:.2f}", highlight=False)
    for stuck in measured.stuck:
        console.print(f"[bold]did not come about:[/bold] {stuck}", highlight=False)


def _table(measured: Measured) -> Table:
    table = Table(title="Pause of those who stay, in seconds")
    for column in ("side", "change", "times", "min", "median", "max", "redone", "step"):
        table.add_column(column, justify="left" if column in ("side", "change") else "right", no_wrap=True)
    told = lambda change: change.told  # noqa: E731
    seen = lambda change: change.pause  # noqa: E731
    rows: list[tuple[str, list[Change], Callable[[Change], float]]] = [
        ("regrow", measured.ours, told),
        ("regrow, rank 0", measured.ours, seen),
        ("torchrun", measured.theirs, seen),
    ]
    for side, changes, value in rows:
        for grows, words in ((True, "2 to 4"), (False, "4 to 2")):
            some = [each for each in changes if (each.after > each.before) == grows]
            if some:
                values = [value(each) for each in some]
                numbers = [f"{pick(values):.2f}" for pick in (min, median, max)]
                redone, step = sum(each.redone for each in some), median(each.step for each in some)
                table.add_row(side, words, str(len(some)), *numbers, str(redone), f"{step:.3f}")
    return table


def _show_stages(measured: Measured, console: Console) -> None:
    for grow, name in ((True, "grow"), (False, "shrink")):
        changes = measured.pauses(grow=grow)
        if not changes:
            continue
        nbytes, seconds = hydration(changes) if grow else (0.0, 0.0)
        moved = f", {nbytes / 1e6:.0f} MB at {nbytes / seconds / 1e9:.2f} GB/s" if seconds else ""
        pause = median(each.told for each in changes)
        beside = (
            f"; the same bytes over plain sockets {median(measured.copied):.2f} s" if grow and measured.copied else ""
        )
        console.print(f"{name}: median {pause:.2f} s{moved}{beside}", highlight=False)
        stages = ("detect", "abort", "regroup", "hydrate", "redo")
        records = [each.record for each in changes if each.record is not None]
        middle = ", ".join(f"{stage} {median(getattr(each, stage) for each in records):.2f} s" for stage in stages)
        console.print(f"  its stages, medians: {middle}; redo has a whole step", highlight=False)
        still, step = median(each.still for each in changes), median(each.step for each in changes)
        console.print(
            f"  rank 0 stood still for {still:.2f} s; the rest was in its next step (median one: {step:.2f} s)",
            highlight=False,
        )
    ours, theirs = [each.told for each in measured.ours], [each.pause for each in measured.theirs]
    if ours and theirs and median(ours) > 0:
        ratio = median(theirs) / median(ours)
        console.print(f"a change costs {ratio:.0f} times less than under torchrun", highlight=False)


def hydration(changes: Sequence[Change]) -> tuple[float, float]:
    """Median bytes that the newcomers of a change received together, and their median duration."""
    records = [each.record for each in changes if each.record is not None]
    return median(each.hydrated_bytes for each in records), median(each.hydrate for each in records)


def _ratios(measured: Measured) -> dict[int, float]:
    alone = measured.rates.get(1)
    return {world: rate / alone for world, rate in sorted(measured.rates.items()) if world > 1} if alone else {}


def figures(measured: Measured) -> Iterator[tuple[str, float]]:
    """The numbers for `--json`; what could not be measured is absent."""
    for grow, name in ((True, "grow"), (False, "shrink")):
        if changes := measured.pauses(grow=grow):
            yield f"{name}_pause_s", median(each.told for each in changes)
            yield f"{name}_pause_by_rank_0_s", median(each.pause for each in changes)
            yield f"{name}_still_s", median(each.still for each in changes)
    if changes := measured.pauses(grow=True):
        nbytes, seconds = hydration(changes)
        yield "hydrated_bytes", nbytes
        yield "grow_target_s", GROWN_WITHIN_S + seconds
    if measured.copied:
        yield "copied_beside_s", median(measured.copied)
    if measured.theirs:
        yield "torchrun_resize_s", median(each.pause for each in measured.theirs)
        yield "torchrun_steps_redone", float(sum(each.redone for each in measured.theirs))
    if measured.overhead:
        yield "invariant_overhead_percent", median(measured.overhead)
        yield "invariant_memory_bytes", measured.memory
    for world, ratio in _ratios(measured).items():
        yield f"throughput_ratio_{world}", ratio
    yield "not_done", float(len(measured.stuck))


def details(measured: Measured) -> dict[str, list[dict[str, float]]]:
    """The figures of each change."""
    sides = {"regrow": measured.ours, "torchrun": measured.theirs}
    return {side: [_detail(each) for each in changes] for side, changes in sides.items()}


def _detail(change: Change) -> dict[str, float]:
    told = {"before": change.before, "after": change.after, "pause": change.pause, "step": change.step}
    told |= {"redone": change.redone}
    if change.record is not None:
        stages = ("total", "detect", "abort", "regroup", "hydrate", "redo", "hydrated_bytes")
        told |= {"still": change.still} | {stage: getattr(change.record, stage) for stage in stages}
    return told


# --- the program ---------------------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="there and back, a side")
    parser.add_argument("--pairs", type=int, default=24, help="blocks of each mode")
    parser.add_argument("--quick", action="store_true", help="2 rounds, 9 pairs")
    parser.add_argument("--only", choices=PARTS, action="append", help="not all of it; repeatable")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args()


def run(args: argparse.Namespace, folder: Path) -> Measured:
    """Run the requested measurements."""
    measured = Measured()
    rounds, pairs, steps = (2, 9, 12) if args.quick else (args.rounds, args.pairs, 30)
    parts: dict[str, Callable[[], None]] = {
        "changes": lambda: measure_changes(folder, measured, rounds=rounds),
        "invariant": lambda: measure_invariant(folder, measured, pairs=pairs),
        "throughput": lambda: measure_throughput(folder, measured, steps=steps),
    }
    for part in args.only or PARTS:
        print(part, flush=True)
        try:
            parts[part]()
        except (JobStuck, RegrowError) as stuck:
            measured.stuck.append(f"{part}: {stuck}")
    return measured


def main() -> int:
    """Measure, print, write; returns the exit code."""
    args = parse()
    warn_if_busy()
    folder = Path(tempfile.mkdtemp(prefix="regrow-elastic-"))
    measured = run(args, folder)
    show(measured, Console())
    tell("elastic", dict(figures(measured)), args.json, details=details(measured))
    if measured.stuck:
        print(f"records and output are kept in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
