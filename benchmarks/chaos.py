"""Seeded faults of all kinds, for minutes, against hosts connected by a network: regrow and torchrun side by side.

    python benchmarks/chaos.py              # 30 minutes of faults a side, one every 20 s: over an hour
    python benchmarks/chaos.py --quick      # at most 8 minutes

Needs root and `ip` (iproute2): each host is a network namespace with its own launcher, and a process of the benchmark
forwards the frames between them, so that links can be slow and lossy on any kernel. Three hosts have two ranks each, a
fourth is the spare. Each side runs two jobs of the same steps side by side: one undisturbed, and one with the faults
of the seed's plan. *Goodput*: the undisturbed job's time for the steps that the disturbed one made during the faults,
as a share of the time of the faults (time after the last one is excluded); for a job that stops for good, the share of
all steps that it made. Torchrun's side has the same plan, a checkpoint every 50 steps on a local disk, no spare (with
one its agents restart all workers again and again once a host has come back) and collectives that time out after 20 s;
ended processes are restarted as on regrow's side.

Of 40 faults, 24 kill a rank (SIGKILL), 2 kill two ranks within 0.3 s, 2 make a rank hang (SIGSTOP for good; regrow
has `--hang-timeout 1`, 90 s otherwise), 1 kills an agent, 2 pause one for 5 s, 1 pauses the coordinator's launcher
for 5 s and 1 kills it, 2 kill all processes of a host and 1 those of the coordinator's host, 2 cut a host's link, in
both directions or outgoing only, until the job continues without it, 20 s at most (regrow has `--node-lease 1`, 10 s
otherwise); for 3 s, 1 delays all frames by 200 ms and 1 loses 5 of 100. Ended launchers are restarted a second later.
Under torchrun the agent is its launcher, and the coordinator is the launcher on the host of its store. After the end of
regrow's jobs, their remaining processes and shared memory are counted.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

import psutil
from chaos_faults import DECK, RECOVERY_S, plan, strike
from chaos_jobs import Job, Progress, Stuck, data_folders
from rich.console import Console
from rich.table import Table
from targets import tell, warn_if_busy

from regrow.observe.ledger import Ledger, read_records

STEP_GUESS = 0.19
"""Estimated seconds of a step, from which the number of steps is derived."""
CALM_STEPS = 20
"""Steps without faults at the start and at the end."""
START_S = 120.0
AGAIN_S = 1.0
"""Time after a fault at which a cluster restarts ended launchers."""
END_S = 30.0
"""Time after its last step by which all processes of a job must have ended."""


@dataclass
class Struck:
    """One fault and its cost: the longest time between two commits of the world around it, less a median step."""

    kind: str
    cost: float


def disturb(job: Job, kinds: list[str], every: float, seed: int, calm: Job) -> Iterator[Struck]:
    """Inject faults until the plan is done, the job nears its end, or the plan's time is far exceeded."""
    draw = random.Random(seed)
    deadline = time.monotonic() + 1.2 * every * len(kinds)
    for number, kind in enumerate(kinds):
        job.progress.look()
        if job.progress.newest > job.steps - CALM_STEPS or time.monotonic() > deadline:
            why = "its time is over" if time.monotonic() > deadline else "the training is nearly over"
            print(f"  {job.side}: {len(kinds) - number} faults are left out: {why}")
            return
        began, before = time.monotonic(), job.progress.newest
        strike(job, kind, draw)
        time.sleep(AGAIN_S)
        job.restart()
        job.wait(before + 10, RECOVERY_S, calm.progress.look, job.restart)
        while time.monotonic() < began + every * draw.uniform(0.8, 1.2):
            job.progress.look()
            calm.progress.look()
            time.sleep(0.1)
        around = range(max(before, 1) - 1, job.progress.newest + 1)
        times = [job.progress.at(step) for step in around if job.progress.whole(step)]
        gaps = [after - earlier for earlier, after in pairwise(times)]
        cost = max(gaps) - median(gaps)
        print(f"  {job.side}: fault {number + 1} of {len(kinds)}, {kind}, at step {before}: {cost:.1f} s", flush=True)
        yield Struck(kind, cost)


@dataclass
class Result:
    """Result of a side."""

    goodput: float
    struck: list[Struck]
    redone: int
    equal: bool
    stuck: str = ""
    incidents: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    left: list[str] = field(default_factory=list)
    """Processes and folders in shared memory that remain after the jobs."""


def measure(side: str, folder: Path, *, minutes: float, every: float, seed: int, quick: bool) -> Result:
    """Run both jobs of a side to their end."""
    steps = int(minutes * 60 / STEP_GUESS) + 2 * CALM_STEPS
    kinds = plan(seed, int(minutes * 60 / every), quick=quick)
    print(f"{side}: {steps} steps, {len(kinds)} faults, one about every {every:.0f} s", flush=True)
    stuck, struck, over, folders = "", [], None, data_folders()
    with ExitStack() as stack:
        calm, job = (stack.enter_context(Job(side, name, folder, steps)) for name in ("calm", "disturbed"))
        for each in (calm, job):
            each.wait(CALM_STEPS, START_S)
        try:
            for fault in disturb(job, kinds, every, seed, calm):
                struck.append(fault)
            over = time.monotonic()
            if job.progress.newest >= job.steps / 2:  # else it is so far behind that it would take hours
                job.wait(steps - 1, steps * STEP_GUESS + RECOVERY_S, calm.progress.look)
        except (Stuck, StopIteration, KeyError, psutil.Error) as error:
            stuck = f"{type(error).__name__}: {error}"
            print(f"  {side} does not go on: {stuck}", flush=True)
        calm.wait(steps - 1, steps * STEP_GUESS * 2, job.progress.look)
        at_end = job.progress.newest == steps - 1
        deadline = time.monotonic() + 60.0
        while not (calm.ended and (job.ended or not at_end)) and time.monotonic() < deadline:
            time.sleep(0.1)
        equal = not stuck and job.ended and job.digest == calm.digest and same_losses(job.progress, calm.progress)
        result = Result(goodput(job, calm, over), struck, len(job.progress.redone), equal, stuck)
        if side == "regrow":
            ledger = Ledger(read_records(job.records))
            result.incidents = Counter(f"{incident.kind} → {incident.rung}" for incident in ledger.incidents)
            result.lost = ledger.steps_lost
            result.left = [*job.left_behind(END_S), *calm.left_behind(END_S), *sorted(data_folders() - folders)]
        return result


def goodput(job: Job, calm: Job, over: float | None) -> float:
    """Goodput: the undisturbed job's time, over the other's, for the steps made until the faults were `over`.

    For a job that did not continue (None): the share of all steps that it made.
    """
    ours, theirs, began = job.progress, calm.progress, CALM_STEPS
    if over is None:
        return sum(ours.whole(step) for step in range(began + 1, ours.newest + 1)) / (job.steps - 1 - began)
    last = max(step for step in range(began, ours.newest + 1) if ours.whole(step) and ours.at(step) <= over)
    return (theirs.at(last) - theirs.at(began)) / (over - ours.at(began))


def same_losses(one: Progress, other: Progress) -> bool:
    """True if all losses that either job committed are bitwise equal."""
    both = one.losses.keys() & other.losses.keys()
    return len(both) >= 0.9 * len(other.losses) and all(one.losses[at] == other.losses[at] for at in both)


def show(results: dict[str, Result], console: Console) -> None:
    """Print the results."""
    table = Table(title="Seconds without a step: median (most)")
    table.add_column("fault")
    for side in results:
        table.add_column(side, justify="right")
    for kind in DECK:
        cells = []
        for result in results.values():
            costs = [fault.cost for fault in result.struck if fault.kind == kind]
            cells.append(f"{median(costs):.1f} ({max(costs):.1f}) of {len(costs)}" if costs else "–")
        table.add_row(kind, *cells)
    console.print(table)
    for side, result in results.items():
        console.print(
            f"{side}: goodput {100 * result.goodput:.1f} %, {len(result.struck)} faults, {result.lost} steps lost, "
            f"{result.redone} done again, ends {'bitwise equal' if result.equal else 'NOT EQUAL'} {result.stuck}",
            highlight=False,
        )
        for each in result.left:
            console.print(f"  left behind: {each}", highlight=False)
        for rung, count in result.incidents.most_common():
            console.print(f"  {count} × {rung}", highlight=False)


def main() -> int:
    """Measure, print, write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="of faults, a side")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--side", choices=["regrow", "torchrun"], help="only this one")
    parser.add_argument(
        "--quick", action="store_true", help="2.7 minutes of faults a side; each kind once, kills of ranks four times"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the network namespaces are removed
    if shutil.which("ip") is None or os.geteuid() != 0:
        print("chaos.py makes network namespaces: it needs root and the command ip (iproute2)", file=sys.stderr)
        return 1
    warn_if_busy()
    folder = Path(tempfile.mkdtemp(prefix="regrow-chaos-", dir="/tmp"))
    minutes, every = (2.7, 10.0) if args.quick else (args.minutes, args.every)
    sides = [args.side] if args.side else ["regrow", "torchrun"]
    results = {
        side: measure(side, folder, minutes=minutes, every=every, seed=args.seed, quick=args.quick) for side in sides
    }
    show(results, Console())
    figures: dict[str, float] = {}
    if ours := results.get("regrow"):
        figures |= {"goodput": ours.goodput, "steps_lost": ours.lost, "faults": len(ours.struck)}
        figures |= {"bitwise_equal": float(ours.equal), "stuck": float(bool(ours.stuck))}
        figures |= {"left_behind": len(ours.left)}
    if theirs := results.get("torchrun"):
        figures |= {"torchrun_goodput": theirs.goodput, "torchrun_steps_redone": theirs.redone}
        figures |= {"torchrun_stuck": float(bool(theirs.stuck))}
    tell("chaos", figures, args.json, seed=args.seed, minutes=minutes)
    if ours and (ours.stuck or not ours.equal):
        print(f"records and output are kept in {folder}")
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
