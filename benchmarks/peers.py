"""One job, one plan of faults, side by side: torchrun, torchft, NVIDIA's resiliency extension, Ray Train, regrow.

    python benchmarks/peers.py --sides torchrun regrow-standby   # 40 minutes on two idle cores; nothing else is needed
    python benchmarks/peers.py --quick --sides torchrun regrow   # 80 steps: 6 minutes, and faults 10 s apart
    make peers                                                   # the environment of all, with torch 2.14
    build/peers/venv/bin/python benchmarks/peers.py              # all sides: 2 hours

A decoder of 25 million parameters (300 MB of state) by DDP on four ranks of one machine, a thread each. Each side
trains the same number of steps twice: undisturbed, and under the plan: a rank gets SIGKILL, two at once do, a rank is
stopped for good by SIGSTOP. Between two faults are `--every` steps, and as many before the first and after the last:
300 unless asked otherwise, which is a fault each 2 to 3 minutes at the 0.4 to 0.6 s of a step on two cores. A run is
then 8 to 12 minutes, and a side has two. `SIDES` has each side's settings and where they come from. Columns:

- *without a step*: seconds from a fault to the first step beyond all finished ones, on any rank, less a median step;
- *whole again*: seconds until all four ranks finish a new step; never, where the tool goes on with fewer;
- *again*: steps that some rank ran more than once; *dropped*: batches of a rank and step that no finished step has;
- *difference*: the largest of a final parameter to the side's own undisturbed ones; 0 is the same bits;
- *time*: first to last step under the plan, over the undisturbed side's own; *step*: median without faults.

Not in the plan, for want of a second machine in CI: a lost host, a cut link, capacity that comes and goes.
"""

import argparse
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from statistics import median

import peer_training
import psutil
import torch
from peer_sides import HERE, SIDES, Side
from rich.console import Console
from rich.table import Table
from targets import tell, warn_if_busy
from workload import WORLD

LONGEST = 300.0
"""Seconds without a new step after which a side has not survived."""


@dataclass(frozen=True)
class Fault:
    """A signal to ranks while they compute the step after `step`."""

    step: int
    ranks: tuple[int, ...]
    sign: signal.Signals


@dataclass
class Outcome:
    """A run of a side.

    Attributes:
        lines: time and process of each step that a rank has finished, in order, by rank and step.
        struck: time and faults that have struck.
        code: 0 where it has come to its last step.
        processes, mebibytes: most that were there at once.
    """

    lines: dict[int, dict[int, list[tuple[float, int]]]] = field(default_factory=lambda: defaultdict(dict))
    struck: list[tuple[float, Fault]] = field(default_factory=list)
    code: int = 1
    processes: int = 0
    mebibytes: float = 0.0

    def newest(self, rank: int) -> tuple[int, int]:
        """Step and process of a rank's newest line; -1 and 0 before there is one."""
        found = [(lines[-1][0], step, lines[-1][1]) for step, lines in self.lines[rank].items()]
        return max(found)[1:] if found else (-1, 0)

    def moments(self) -> list[tuple[float, int, int]]:
        """Each line as time, step and rank, in order of time."""
        return sorted(
            (at, step, rank) for rank, steps in self.lines.items() for step, seen in steps.items() for at, _ in seen
        )

    def step_median(self) -> float:
        """Median time between two first lines of following steps."""
        first: dict[int, float] = {}
        for at, step, _ in self.moments():
            first.setdefault(step, at)
        return median(first[b] - first[a] for a, b in pairwise(sorted(first)))

    def lost(self, at: float, step: float) -> tuple[float, float]:
        """Seconds without a step and until all ranks finish one again, after a fault at a time; inf: never."""
        moments = self.moments()
        highest = max((number for when, number, _ in moments if when <= at), default=-1)
        beyond = [(when, number, rank) for when, number, rank in moments if when > at and number > highest]
        news = {rank: min(when for when, _, each in beyond if each == rank) for _, _, rank in beyond}
        first = min(news.values(), default=math.inf)
        whole = max(news.values()) if len(news) == WORLD else math.inf
        return max(0.0, first - at - step), max(0.0, whole - at - step)

    def again(self) -> int:
        """Steps that some rank ran more than once."""
        return len({step for steps in self.lines.values() for step, seen in steps.items() if len(seen) > 1})

    def dropped(self, steps: int) -> int:
        """Batches of a rank and step that no finished step has."""
        return sum(step not in self.lines[rank] for rank in range(WORLD) for step in range(steps))

    def duration(self) -> float:
        """Seconds between the first and the last line."""
        moments = self.moments()
        return moments[-1][0] - moments[0][0] if moments else math.inf


def plan(every: int, seed: int) -> tuple[int, list[Fault]]:
    """Draw the faults: a kill, two at once, a stop for good; returns the steps of a run with them.

    They are `every` steps apart, less or more up to a fourth of that. Rank 0 is spared, as NVRx's in-process restart
    ends with it by its own documentation.
    """
    draw = random.Random(seed)
    ranks = draw.sample(range(1, WORLD), WORLD - 1)
    victims = [(ranks[0],), (ranks[1], ranks[2]), (ranks[0],)]
    signs = [signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]
    faults = [
        Fault(number * every + draw.randrange(max(1, every // 4)), struck, sign)
        for number, (struck, sign) in enumerate(zip(victims, signs, strict=True), start=1)
    ]
    return (len(faults) + 1) * every, faults


def chosen(words: list[str]) -> list[str]:
    """Sides that begin with one of the words, in the order of `SIDES`; all where there is none."""
    return [name for name in SIDES if not words or any(name.startswith(word) for word in words)]


def versions() -> str:
    """Versions of what is installed of the sides; not all of them need all."""
    told = []
    for name in ("torch", "torchft", "nvidia-resiliency-ext", "ray"):
        with suppress(PackageNotFoundError):
            told.append(f"{name} {version(name)}")
    return ", ".join(told)


@contextmanager
def started(name: str, side: Side, folder: Path, steps: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes of a side; none of them, nor of their children, is there after it."""
    words = [f"--steps={steps}", f"--folder={folder}"]
    processes: list[subprocess.Popen[bytes]] = []
    common = {**os.environ, "OMP_NUM_THREADS": "1", "REGROW_HOME": str(folder / "home"), "PYTHONPATH": str(HERE)}
    try:
        for number, command in enumerate(side.commands(folder, words)):
            log = (folder / f"out.{number}.log").open("wb")
            environment = common | side.environment(number)
            processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment))
        yield processes
    finally:
        below = [each for process in processes for each in _below(process.pid)]
        for process in processes:
            process.kill()
            process.wait(20)
        for each in (*below, *_named(folder)):
            with suppress(psutil.NoSuchProcess):
                each.kill()


def _below(process: int) -> list[psutil.Process]:
    """The children of a process, and theirs: some call themselves otherwise, and outlive it."""
    with suppress(psutil.NoSuchProcess):
        return [*psutil.Process(process).children(recursive=True)]
    return []


def _named(folder: Path) -> Iterator[psutil.Process]:
    """Processes that have this folder on their command lines, whoever their parent is by now."""
    for each in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if any(str(folder) in word for word in each.cmdline()):
                yield each


def read(folder: Path, outcome: Outcome, read_to: Counter[str]) -> None:
    """Take in the lines that have come."""
    for path in folder.glob("steps.*.jsonl"):
        with path.open("rb") as file:
            file.seek(read_to[path.name])
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        read_to[path.name] += len(whole)
        for line in whole.splitlines():
            told = json.loads(line)
            outcome.lines[told["rank"]].setdefault(told["step"], []).append((told["at"], told["pid"]))


def run(name: str, side: Side, folder: Path, steps: int, faults: list[Fault]) -> Outcome:
    """Run a side to its end, and strike it as planned."""
    folder.mkdir(parents=True)
    outcome, read_to, pending, last = Outcome(), Counter[str](), list(faults), time.monotonic()
    with started(name, side, folder, steps) as processes:
        looked = 0.0
        while time.monotonic() - last < LONGEST:
            before = sum(read_to.values())
            read(folder, outcome, read_to)
            last = time.monotonic() if sum(read_to.values()) > before else last
            if (folder / peer_training.FINAL).exists():
                outcome.code = 0
                break
            if name != "torchft" and all(each.poll() is not None for each in processes):
                break
            if pending and _strike(outcome, pending[0]):
                pending.pop(0)
            if time.monotonic() - looked > 1.0:
                looked = time.monotonic()
                _weigh(outcome, processes)
            time.sleep(0.01)
        read(folder, outcome, read_to)
    return outcome


def _strike(outcome: Outcome, fault: Fault) -> bool:
    newest = [outcome.newest(rank) for rank in range(WORLD)]
    if any(newest[rank][0] < fault.step for rank in fault.ranks):
        return False
    time.sleep(0.1)
    outcome.struck.append((time.monotonic(), fault))
    for rank in fault.ranks:
        with suppress(ProcessLookupError):
            os.kill(newest[rank][1], fault.sign)
    return True


def _weigh(outcome: Outcome, processes: list[subprocess.Popen[bytes]]) -> None:
    count, size = 0, 0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            for each in (psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)):
                with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    memory = each.memory_info()
                    count, size = count + 1, size + memory.rss - memory.shared
    outcome.processes = max(outcome.processes, count)
    outcome.mebibytes = max(outcome.mebibytes, size / 2**20)


def difference(folder: Path, reference: Path) -> float:
    """The largest difference of a final parameter, 0 only for the same bits; inf: there are none, or no numbers."""
    paths = [each / peer_training.FINAL for each in (folder, reference)]
    if not all(path.exists() for path in paths):
        return math.inf
    ours, theirs = (torch.load(path, weights_only=True) for path in paths)
    if all(torch.equal(ours[name].view(torch.uint8), theirs[name].view(torch.uint8)) for name in ours):
        return 0.0
    apart = [float((ours[name] - theirs[name]).abs().max()) for name in ours]
    return math.inf if any(map(math.isnan, apart)) else max(sys.float_info.min, *apart)


def lines_changed(script: str) -> int:
    """Lines of a side's script that plain torchrun's has not, without blanks, imports and docstrings."""

    def lines(name: str) -> Counter[str]:
        text = [line.strip() for line in (HERE / name).read_text(encoding="utf-8").splitlines()]
        return Counter(line for line in text if line and not line.startswith(("import ", "from ", '"""')))

    return sum((lines(script) - lines("peer_torchrun.py")).values())


def seconds(value: float) -> str:
    """Two digits behind the point, or a dash for never."""
    return f"{value:.2f}" if math.isfinite(value) else "never"


def main() -> int:
    """Run all sides in turns, print the table, write the figures; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=300, help="steps between two faults; a run has four times as many")
    parser.add_argument("--quick", action="store_true", help="20 steps between two faults, which are then 10 s apart")
    parser.add_argument("--sides", nargs="+", default=[], metavar="SIDE", help=f"of {', '.join(SIDES)}, or a beginning")
    parser.add_argument("--seed", type=int, default=1, help="of the plan")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    steps, faults = plan(20 if args.quick else args.every, args.seed)
    names = chosen(args.sides)
    if not names:
        parser.error(f"none of {', '.join(SIDES)} begins with {' or '.join(args.sides)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    warn_if_busy()
    folder = Path(tempfile.mkdtemp(prefix="regrow-peers-"))
    print("plan: " + "; ".join(f"{each.sign.name} to ranks {each.ranks} after step {each.step}" for each in faults))
    table = Table(title=f"{steps} steps, {len(faults)} faults")
    for column in ("side", "survived", "without a step", "most", "whole again", "again", "dropped", "difference"):
        table.add_column(column, justify="left" if column == "side" else "right")
    for column in ("time", "step", "processes", "MiB"):
        table.add_column(column, justify="right")
    figures: dict[str, float] = {}
    for name in names:
        calm = run(name, SIDES[name], folder / name / "calm", steps, [])
        print(f"{name}: undisturbed {seconds(calm.duration())} s, code {calm.code}", flush=True)
        struck = run(name, SIDES[name], folder / name / "struck", steps, faults)
        print(f"{name}: under the plan {seconds(struck.duration())} s, code {struck.code}", flush=True)
        step = calm.step_median()
        lost = [struck.lost(at, step) for at, _ in struck.struck]
        survived = len(lost) if struck.code == 0 else max(0, len(lost) - 1)
        ratio = struck.duration() / calm.duration() if struck.code == 0 else math.inf
        far = difference(folder / name / "struck", folder / name / "calm")
        without = median(first for first, _ in lost) if lost else math.inf
        row = [f"{survived} of {len(faults)}", seconds(without)]
        row += [seconds(max((first for first, _ in lost), default=math.inf))]
        row += [seconds(max((whole for _, whole in lost), default=math.inf))]
        row += [str(struck.again()), str(struck.dropped(steps)), f"{far:.1e}" if far else "0"]
        table.add_row(name, *row, seconds(ratio), f"{step:.3f}", str(struck.processes), f"{struck.mebibytes:,.0f}")
        key = name.replace("-", "_")
        for figure, value in (("time", ratio), ("without_step_s", without), ("step_s", step)):
            if math.isfinite(value):
                figures[f"{figure}_{key}"] = value
        for (_, fault), (first, whole) in zip(struck.struck, lost, strict=True):
            print(
                f"  {fault.sign.name} {fault.ranks}: {seconds(first)} s without a step, whole after {seconds(whole)} s"
            )
        figures |= {f"survived_{key}": float(survived), f"difference_{key}": far if math.isfinite(far) else -1.0}
    Console(width=180).print(table)
    for name in names:
        print(f"{name}: {SIDES[name].settings}; {lines_changed(SIDES[name].script)} lines of its own")
    print(f"versions: {versions()}")
    tell("peers", figures, args.json)
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
