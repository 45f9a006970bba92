"""Gain of reading a mapped corpus in place, and of a node's data cache, over torch's DataLoader and streaming.

    python benchmarks/data.py             # about 12 minutes
    python benchmarks/data.py --quick     # fewer rounds and a small corpus, about 4 minutes
    python benchmarks/data.py --streaming-python ~/streaming/bin/python    # where that is another environment

**First batch.** A new process, forked from one with torch imported, replaces a lost worker at step 10, 1,000 and
100,000: the time from its first instruction to its first batch of 8 samples of 128 tokens, shuffled. regrow slices the
batch out of the mapped corpus. A `DataLoader` with one loader worker and `persistent_workers` reads all earlier batches
and discards them; *skips indices* only draws their indices, as good skipping samplers do; mosaicml-streaming is resumed
by its `state_dict`, with the samples in its own format, forked after its imports like the others. Step 100,000 is
measured once if all batches are read, the rest several times.

**Memory.** 1, 2, 4 and 8 ranks read a corpus of 2 GB in batches of 16 windows of 1,024 tokens, a share each; every
eighth window, which loads every page. Counted at the end, each page once (Pss): all ranks and loader workers, and the
corpus in the page cache; less the memory of the same processes at their first batch without the corpus. Sides:
`DataLoader` over the corpus loaded into each rank, if it fits into half of the free memory, and over `numpy.memmap`. A
loaded corpus is not counted a second time in the page cache.

**Throughput.** Batches a second of ranks that compute nothing: 64 windows of 1,024 tokens, at 1, 2 and 4 ranks, and 16
with a transform of 1 ms of CPU time each, at 1 and 2. Ranks slice tokens out of the mapped corpus themselves.
Transformed samples come from the node's cache, which a producer fills with one loader worker a rank; it has room for 64
batches, which are read before the clock starts, so that no batch is made in advance. `DataLoader` has one loader worker
a rank and `persistent_workers`. The sides take turns, each after the other has become idle. The figure is the median
over the rounds of the ratio to `DataLoader` in the same round.

The targets are in `targets.py`; a missed one is printed as missed. Exits with 1 if a measurement failed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import torch
from forking import Child, Failed, forked
from loaders import Body, Place, Reading, first_by_reading, first_by_skipping, first_of_ours, make_corpus, mapped, ours
from resident import BUDGET, PATIENCE, SIDES, MemoryUsed, measure_memory, settle
from rich.console import Console
from rich.table import Table
from targets import tell, warn_if_busy

from regrow.core.ids import Seconds

HERE = Path(__file__).resolve().parent
STEPS = (10, 1000, 100_000)
FIRST = {"ours": "", "DataLoader": "dataloader_", "skips indices": "dataloader_skip_", "streaming": "streaming_"}

SMALL_TOKENS = 105_000_000
"""Tokens of the corpus for first batches and throughput: a bit over 100,000 batches of 8 samples of 128."""
AHEAD = 64
"""Batches for which the cache has room in the measurement of throughput."""
KINDS = {
    "tokens": "",
    "transform": "_transform",
    "tokens, 2 ranks": "_2_ranks",
    "tokens, 4 ranks": "_4_ranks",
    "transform, 2 ranks": "_transform_2_ranks",
}
"""Readings for the measurement of throughput, and the suffixes of their figures' names."""
ON_DISK = 4_000_000_000


# --- first batch ----------------------------------------------------------------------------------------------------


@dataclass
class FirstBatches:
    """Seconds by side and step. `work`: CPU seconds, for regrow; `copied`: True if a batch was no view of the cache."""

    seconds: dict[str, dict[int, list[Seconds]]]
    work: list[Seconds] = field(default_factory=list)
    copied: bool = False
    streaming_missing: str = ""

    def median(self, side: str, step: int) -> Seconds | None:
        """Median of the measured values; None: there is none."""
        told = self.seconds.get(side, {}).get(step)
        return median(told) if told else None


def measure_first(place: Place, streaming_python: str) -> FirstBatches:
    """Run all sides in turns; streaming afterwards, in processes of its own environment."""
    reading = Reading(str(place.tokens.parent), length=128, stride=128, batch_size=8)
    result = FirstBatches({side: {step: [] for step in STEPS} for side in list(FIRST)[:3]})
    for step in STEPS:
        others: dict[str, Callable[[Reading, int], Body]] = {
            "DataLoader": first_by_reading,
            "skips indices": first_by_skipping,
        }
        with place.node(reading, 4 << 20) as node:
            for turn in range(place.rounds):
                seconds, work, is_view = _ask(first_of_ours(node, step))
                result.seconds["ours"][step].append(seconds)
                result.work.append(work)
                result.copied |= not is_view
                for side, body in others.items():
                    if turn == 0 or step < STEPS[-1] or side != "DataLoader":
                        result.seconds[side][step].append(_ask(body(reading, step))[0])
    told = _streaming(place, streaming_python, reading)
    if isinstance(told, str):
        result.streaming_missing = told
    else:
        result.seconds["streaming"] = told
    return result


def _ask(body: Body) -> list[float]:
    with forked(body) as (child,):
        answer: list[float] = child.hear(PATIENCE)
        return answer


def _streaming(place: Place, python: str, reading: Reading) -> dict[int, list[Seconds]] | str:
    """Measurements of `streaming_resume.py`, or the reason for having none."""
    try:
        found = subprocess.run([python, "-c", "import streaming"], capture_output=True, text=True, timeout=PATIENCE)
    except OSError as error:
        return f"{python}: {error.strerror}"
    if found.returncode:
        return f"`import streaming` fails in {python}: {found.stderr.strip().splitlines()[-1]}"
    folder = place.folder / "streaming"
    words = [reading.length, reading.batch_size, place.rounds, *STEPS]
    command = [python, str(HERE / "streaming_resume.py"), str(place.tokens), str(folder), *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if done.returncode:
        raise Failed(f"streaming_resume.py failed:\n{done.stderr}")
    return {int(step): told for step, told in json.loads(done.stdout.splitlines()[-1]).items()}


# --- throughput -----------------------------------------------------------------------------------------------------


@dataclass
class Rates:
    """Batches a second of all ranks, by round; `work`: CPU seconds of all processes for a batch."""

    ours: list[float] = field(default_factory=list)
    dataloader: list[float] = field(default_factory=list)
    our_work: list[Seconds] = field(default_factory=list)
    dataloader_work: list[Seconds] = field(default_factory=list)
    copied: bool = False

    @property
    def ratio(self) -> float:
        """The rate of regrow over DataLoader's: the median of the rounds' ratios."""
        return median(mine / its for mine, its in zip(self.ours, self.dataloader, strict=True))


def measure_rates(place: Place, reading: Reading, ranks: int, number: int) -> Rates:
    """Run both sides in turns, in alternating order; each rank reads `number` batches a turn."""
    result = Rates()
    budget = (AHEAD * ranks + 2) * (reading.batch_bytes + 4096)
    with (
        place.node(reading, budget) as node,
        node.producing() as producer,
        forked(*(ours(node, rank, ranks) for rank in range(ranks))) as mine,
        forked(*(mapped(reading, rank, ranks) for rank in range(ranks))) as its,
    ):
        for child in (*mine, *its):
            child.hear()
        everybody = [child.pid for child in (*producer, *mine, *its)]
        for turn in range(1 + place.rounds):
            sides = [(result.ours, result.our_work, mine), (result.dataloader, result.dataloader_work, its)]
            for rates, works, children in sides[:: 1 if turn % 2 else -1]:
                before = settle(everybody)
                rate, are_views = _rate(children, AHEAD + 8, number)
                result.copied |= children is mine and not are_views
                if turn:
                    rates.append(rate)
                    works.append((settle(everybody) - before) / (AHEAD + 8 + number) / ranks)
    return result


def _rate(ranks: list[Child], aside: int, number: int) -> tuple[float, bool]:
    for child in ranks:
        child.tell([aside, number])
    told = [child.hear(PATIENCE) for child in ranks]
    seconds = max(ended for _, ended, _ in told) - min(began for began, _, _ in told)
    return len(ranks) * number / seconds, all(is_view for _, _, is_view in told)


# --- the report -----------------------------------------------------------------------------------------------------


def show_first(first: FirstBatches, console: Console) -> None:
    """A row for each side."""
    table = Table(title="first batch of a new process, ms, median")
    for column in ("", *(f"step {step:,}" for step in STEPS)):
        table.add_column(column, justify="right" if column else "left")
    for side in FIRST:
        told = [first.median(side, step) for step in STEPS]
        table.add_row(side, *("–" if each is None else f"{1000 * each:,.1f}" for each in told))
    console.print(table)
    console.print(f"of ours, the processor's: {1000 * median(first.work):.1f} ms; the rest is waiting for a free one")
    if first.streaming_missing:
        console.print(f"mosaicml-streaming was not measured: {first.streaming_missing}", markup=False)


def show_memory(used: MemoryUsed, console: Console) -> None:
    """A row for each side and number of ranks."""
    table = Table(title=f"memory of a node beyond its processes, corpus of {used.gigabytes:g} GB")
    for column in ("", "ranks", "GB", "corpus", "cache", "rest", "processes", "over 1 rank"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for side, by_ranks in used.beyond.items():
        for ranks, each in by_ranks.items():
            cells = [f"{nbytes / 1e9:.2f}" for nbytes in (sum(each), *each, used.base[side][ranks])]
            over = f"{sum(each) / sum(by_ranks[1]):.2f}"
            table.add_row(side, str(ranks), *cells, over, end_section=ranks == max(by_ranks))
    console.print(table)
    console.print("memmap, loaded: DataLoader over numpy.memmap, and over a copy in each rank's memory")
    console.print("processes: of the same at their first batch, without corpus and cache; not in GB")
    for what in used.missing:
        console.print(f"not measured: {what}")


def show_rates(rates: dict[str, Rates], console: Console) -> None:
    """A row for each kind."""
    table = Table(title="batches a second, median")
    for column in ("", "ours", "DataLoader", "ratio", "from – to", "work, ms", "its"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for kind, each in rates.items():
        ratios = [mine / its for mine, its in zip(each.ours, each.dataloader, strict=True)]
        spread = [f"{median(ratios):.2f}", f"{min(ratios):.2f} – {max(ratios):.2f}"]
        work = [f"{1000 * median(seconds):.2f}" for seconds in (each.our_work, each.dataloader_work)]
        table.add_row(kind, f"{median(each.ours):.4g}", f"{median(each.dataloader):.4g}", *spread, *work)
    console.print(table)
    console.print("work: of all processors together for a batch, ours and DataLoader's")


def figures(
    first: FirstBatches | None, used: MemoryUsed | None, rates: dict[str, Rates]
) -> Iterator[tuple[str, float]]:
    """The numbers for `--json`."""
    for side, prefix in FIRST.items() if first else ():
        for step in STEPS:
            if first and (seconds := first.median(side, step)) is not None:
                yield f"{prefix}first_batch_s_{step}", seconds
    if first:
        yield "first_batch_work_s", median(first.work)
    for side, prefix in SIDES.items() if used else ():
        if used:
            for ranks, beyond in used.beyond[side].items():
                yield f"{prefix}_bytes_{ranks}_ranks", sum(beyond)
            if (over := used.over_one(side)) is not None:
                yield f"{prefix}_bytes_8_ranks_over_1", over
    for kind, each in rates.items():
        yield f"throughput_over_dataloader{KINDS[kind]}", each.ratio
        yield f"batches_per_s{KINDS[kind]}", median(each.ours)
        yield f"dataloader_batches_per_s{KINDS[kind]}", median(each.dataloader)
        yield f"work_s_per_batch{KINDS[kind]}", median(each.our_work)
        yield f"dataloader_work_s_per_batch{KINDS[kind]}", median(each.dataloader_work)
    if rates:
        yield "copied_batches", sum(each.copied for each in rates.values())


def measure(place: Place, args: argparse.Namespace) -> tuple[FirstBatches | None, MemoryUsed | None, dict[str, Rates]]:
    """Run the requested measurements, and print each when it is done. Raises `Failed`."""
    console = Console()
    first, used, rates = None, None, dict[str, Rates]()
    if "first" in args.only:
        first = measure_first(place, args.streaming_python)
        show_first(first, console)
    if "throughput" in args.only:
        tokens = Reading(str(place.tokens.parent), length=1024, stride=128, batch_size=64)
        working = replace(tokens, batch_size=16, work_s=0.001)
        for kind in KINDS:
            reading, number = (working, 60) if "transform" in kind else (tokens, 500)
            ranks = int(kind.split()[1]) if "," in kind else 1
            rates[kind] = measure_rates(place, reading, ranks, number)
        show_rates(rates, console)
    if "memory" in args.only:
        used = measure_memory(place, 250_000_000 if args.quick else 2_000_000_000)
        show_memory(used, console)
    return first, used, rates


def main() -> int:
    """Measure, print, write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("first", "throughput", "memory")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts, metavar="PART", help=", ".join(parts))
    parser.add_argument("--quick", action="store_true", help="3 rounds, and a corpus of 0.25 GB for memory")
    parser.add_argument("--rounds", type=int, default=7, help="of each side")
    parser.add_argument("--streaming-python", default=sys.executable, metavar="PATH", help="python that has streaming")
    parser.add_argument("--cache", type=Path, metavar="FOLDER", help="where caches are made (default: /dev/shm)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warn_if_busy()
    folder = Path(tempfile.mkdtemp(prefix="regrow-benchmark-"))
    shared = Path("/dev/shm")
    cache = Path(tempfile.mkdtemp(prefix="regrow-benchmark-", dir=args.cache or (shared if shared.is_dir() else None)))
    try:
        for path, needed in ((folder, ON_DISK), (cache, 2 * BUDGET)):
            if (free := shutil.disk_usage(path).free) < needed:
                raise Failed(f"{path} has {free / 1e9:.1f} GB free, {needed / 1e9:.1f} are needed")
        tokens = make_corpus(folder / "corpus", SMALL_TOKENS)
        place = Place(folder, tokens, cache, 3 if args.quick else args.rounds)
        measured = measure(place, args)
    except Failed as failed:
        print(f"data.py: {failed}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(cache)
    tell("data", dict(figures(*measured)), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
