"""Time lost to a SIGKILL, and the cost of fault tolerance without faults: torchrun against regrow.

    python benchmarks/recovery.py            # about 10 minutes
    python benchmarks/recovery.py --quick    # at most 4 minutes
    python benchmarks/recovery.py --soak 50  # fifty kills in a row, with a standby
    python benchmarks/recovery.py --audit 200 # only the cost of looking for replicas that differ, of 200 looks
    python benchmarks/recovery.py --proof 30 # only the cost of 30 shadow proofs, and kills with and without them
    python benchmarks/recovery.py --device cuda # on a GPU, which the ranks share if it is alone; see docs/cuda.md

One model of 25 million parameters with AdamW (300 MB of state), four ranks with a thread each, on one machine in one
run. *Time lost* is the time from a SIGKILL until the first step after the last committed one is committed on every
rank, minus a median step. Sides: torchrun with a checkpoint on local disk every 10 steps; regrow with a standby that
has built and rehearsed; regrow that forks a worker when one is lost. The overhead is measured between two jobs that
train in turns, one paused while the other runs, without any checkpoint. The cost of the audit is measured within one
job, between the steps with a comparison and their neighbours (`auditing.py`), and so is that of shadow proofs
(`proving.py`).

Exits with 1 if the job did not recover from a kill.
"""

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

import auditing
import proving
from contest import Job, JobStuck, Kill, lost_seconds, redone_steps, strike
from rich.console import Console
from rich.table import Table
from targets import tell, warn_if_busy

from regrow.core.process.stage_times import STAGES
from regrow.observe.scene import WorkerState

HERE = Path(__file__).resolve().parent
WORLD = 4
ENDLESS = 1_000_000
CHECKPOINT_EVERY = 10
BLOCK = 12
"""Steps of one side before the other's turn; the first is left out."""
START_DEADLINE = 120.0
PROVE_EVERY = 5.0
"""Seconds between two measured shadow proofs, with undisturbed steps in between."""


@dataclass
class Result:
    """Results of the kills of one side."""

    side: str
    kills: list[Kill] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    redone: int = 0
    step: float = 0.0
    stuck: str = ""
    stages: dict[str, float] = field(default_factory=dict)
    """Median of each stage of the replacements, in seconds."""

    @property
    def not_recovered(self) -> int:
        """Kills from which the job did not recover; a job that failed before its first kill counts as one."""
        return sum(not kill.recovered for kill in self.kills) + bool(self.stuck)


def torchrun(folder: Path, name: str, *, checkpoint_every: int) -> Job:
    """Plain DDP under torchrun."""
    records = folder / name
    records.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}"]
    command += ["--max-restarts=1000", str(HERE / "ddp_torchrun.py"), f"--steps={ENDLESS}", f"--dir={records}"]
    command += [f"--checkpoint-every={checkpoint_every}"]
    # Without this variable torchrun's restarts sometimes hang or die, which would count against it.
    environment = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return Job(name, command, records=records, log=folder / f"{name}.log", world=WORLD, environment=environment)


def regrow(folder: Path, name: str, *, standbys: int, script: tuple[str, ...] = (), proof: str = "auto") -> Job:
    """DDP under regrow."""
    command = [sys.executable, "-m", "regrow", "run", "--standalone", f"--nproc-per-node={WORLD}"]
    command += [f"--standby={standbys}", "--warmth=built", "--max-faults=1000", f"--job={name}", "--quiet"]
    command += [f"--proof={proof}", str(HERE / "ddp_regrow.py"), f"--steps={ENDLESS}", *script]
    environment = {"OMP_NUM_THREADS": "1", "REGROW_HOME": str(folder)}
    records = folder / "jobs" / name
    return Job(name, command, records=records, log=folder / f"{name}.log", world=WORLD, environment=environment)


def measure_kills(job: Job, *, kills: int, seed: int, standbys: int) -> Result:
    """Start a job, kill its ranks repeatedly, and summarize the recoveries."""
    result = Result(job.name)
    print(f"{job.name}: {kills} kills", flush=True)
    try:
        with job:
            job.wait(lambda: job.world_step >= 3, deadline=START_DEADLINE, what="fourth step")
            warm = _warm(job, standbys)
            result.kills = strike(job, random.Random(seed), kills=kills, warm=warm)
    except JobStuck as stuck:
        result.stuck = str(stuck)
        print(f"  {stuck}", flush=True)
    for kill in result.kills:
        lost = lost_seconds(job.ledger, kill)
        if kill.recovered and lost is not None:
            result.lost.append(lost)
            result.redone += redone_steps(job.ledger, kill)
    result.step = job.ledger.step_median or 0.0
    for stage in STAGES:
        if took := [each.stages[stage] for each in job.ledger.incidents if stage in each.stages]:
            result.stages[stage] = median(took)
    return result


def _warm(job: Job, standbys: int) -> Callable[[], bool]:
    return lambda: sum(each.state is WorkerState.WARM for each in job.scene.standbys) >= standbys


def measure_overhead(folder: Path, *, pairs: int) -> list[tuple[float, float]]:
    """Median step of plain DDP under torchrun and of DDP under regrow, for each pair of turns. Raises `JobStuck`."""
    with ExitStack() as stack:
        plain = stack.enter_context(torchrun(folder, "torchrun-plain", checkpoint_every=0))
        plain.wait(lambda: plain.world_step >= 5, deadline=START_DEADLINE, what="sixth step")
        plain.pause()
        ours = stack.enter_context(regrow(folder, "regrow-plain", standbys=1))
        ours.wait(lambda: ours.world_step >= 5, deadline=START_DEADLINE, what="sixth step")
        ours.wait(_warm(ours, 1), deadline=START_DEADLINE, what="standby")
        ours.pause()
        steps: list[tuple[float, float]] = []
        for number in range(pairs):
            first, second = (plain, ours) if number % 2 == 0 else (ours, plain)
            times = {first.name: _turn(first), second.name: _turn(second)}
            steps.append((times[plain.name], times[ours.name]))
            print(f"  pair {number + 1} of {pairs}: {steps[-1][0]:.3f} s and {steps[-1][1]:.3f} s", flush=True)
        return steps


def _turn(job: Job) -> float:
    """Let a paused job run for some steps; the median time between two commits of the whole world."""
    start = time.monotonic()
    job.go_on()
    job.wait_steps(BLOCK)
    job.pause()
    commits = [at for _, at in job.ledger.world_commits() if at > start]
    return median(after - before for before, after in pairwise(commits))


def show(results: list[Result], overhead: list[tuple[float, float]], console: Console) -> None:
    """Print the results."""
    table = Table(title=f"SIGKILL of one of {WORLD} ranks: time lost in seconds")
    for column in ("side", "kills", "failed", "min", "median", "max", "redone", "step"):
        table.add_column(column, justify="left" if column == "side" else "right", no_wrap=True)
    for result in results:
        lost = [f"{pick(result.lost):.2f}" for pick in (min, median, max)] if result.lost else ["–"] * 3
        counts = [str(len(result.kills)), str(result.not_recovered)]
        table.add_row(result.side, *counts, *lost, str(result.redone), f"{result.step:.3f}")
    console.print(table)
    console.print("failed: kills not recovered. redone: committed steps that ran again. step: median in seconds.")
    for result in results:
        if result.stages:
            told = ", ".join(f"{stage} {took:.3f}" for stage, took in result.stages.items())
            console.print(f"{result.side}, medians of the replacements' stages: {told}", highlight=False)
    by_side = {result.side: median(result.lost) for result in results if result.lost}
    if base := by_side.get("torchrun"):
        for side, typical in by_side.items():
            if side != "torchrun" and typical > 0:
                console.print(f"{side}: {base / typical:.0f} times less than torchrun", highlight=False)
    if overhead:
        plain, ours = (median(column) for column in zip(*overhead, strict=True))
        ratios = [100 * (b / a - 1) for a, b in overhead]
        console.print(
            f"steady state, {len(overhead)} pairs: {plain:.3f} s a step under torchrun, {ours:.3f} s under regrow; "
            f"overhead {median(ratios):+.1f} % (from {min(ratios):+.1f} to {max(ratios):+.1f} %)",
            highlight=False,
        )


def figures(results: list[Result], overhead: list[tuple[float, float]]) -> Iterator[tuple[str, float]]:
    """The numbers for `--json`; what could not be measured is absent."""
    names = {"regrow-standby": "lost_standby_s", "regrow-fork": "lost_fork_s", "torchrun": "lost_torchrun_s"}
    names["regrow-unproven"] = "lost_unproven_s"
    for result in results:
        if result.lost:
            yield names[result.side], median(result.lost)
        for stage, took in result.stages.items():
            yield names[result.side].removesuffix("_s") + f"_{stage.replace(' ', '_')}_s", took
    yield "steps_redone", float(sum(result.redone for result in results if result.side != "torchrun"))
    if overhead:
        yield "overhead_percent", median(100 * (ours / plain - 1) for plain, ours in overhead)
    yield "not_recovered", float(sum(result.not_recovered for result in results))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=7, help="a side")
    parser.add_argument("--pairs", type=int, default=8, help="turns of each side for the overhead")
    parser.add_argument("--quick", action="store_true", help="3 or 5 kills a side, 3 pairs")
    parser.add_argument("--soak", type=int, default=0, metavar="N", help="only N kills in a row, with a standby")
    parser.add_argument("--audit", type=int, default=0, metavar="N", help="only the audit's cost, of N looks")
    parser.add_argument(
        "--proof", type=int, default=0, metavar="N", help="only the cost of N shadow proofs, and --kills"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="what the ranks compute on")
    parser.add_argument("--model", choices=["25m", "300m", "1b"], default="25m", help="parameters")
    parser.add_argument("--seed", type=int, default=0, help="of ranks and moments")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args()


def run(args: argparse.Namespace, folder: Path) -> tuple[list[Result], list[tuple[float, float]]]:
    """Run the requested measurements."""
    kills = dict.fromkeys(("torchrun", "standby", "fork"), args.kills)
    if args.quick:
        kills = {"torchrun": 3, "standby": 5, "fork": 3}
    if args.soak:
        job = regrow(folder, "regrow-standby", standbys=1)
        return [measure_kills(job, kills=args.soak, seed=args.seed, standbys=1)], []
    standby = (regrow(folder, "regrow-standby", standbys=1), kills["standby"], 1)
    if args.proof and not args.kills:
        return [], []
    if args.proof:
        sides = [standby, (regrow(folder, "regrow-unproven", standbys=1, proof="off"), kills["standby"], 1)]
        return [measure_kills(job, kills=n, seed=args.seed, standbys=standbys) for job, n, standbys in sides], []
    sides = [
        (torchrun(folder, "torchrun", checkpoint_every=CHECKPOINT_EVERY), kills["torchrun"], 0),
        standby,
        (regrow(folder, "regrow-fork", standbys=0), kills["fork"], 0),
    ]
    results = [measure_kills(job, kills=count, seed=args.seed, standbys=standbys) for job, count, standbys in sides]
    print("steady state, in alternating turns", flush=True)
    return results, measure_overhead(folder, pairs=3 if args.quick else args.pairs)


def prove(folder: Path, *, proofs: int) -> dict[str, float]:
    """Cost of shadow proofs."""
    costs = folder / "costs"
    script = (f"--prove-every={PROVE_EVERY}", f"--costs={costs}")
    samples = proving.measure(regrow(folder, "proven", standbys=1, script=script), costs, samples=proofs)
    print(proving.describe(samples))
    return {"proof_percent": proving.percent(samples)}


def main() -> int:
    """Measure, print, write; returns the exit code."""
    args = parse()
    warn_if_busy()
    os.environ["REGROW_BENCH_DEVICE"] = args.device  # for the scripts of both sides
    os.environ["REGROW_BENCH_MODEL"] = args.model
    folder = Path(tempfile.mkdtemp(prefix="regrow-recovery-"))
    results, overhead = ([], []) if args.audit else run(args, folder)
    numbers: dict[str, float] = {}
    if results:
        show(results, overhead, Console())
        numbers |= figures(results, overhead)
    if not args.soak and not args.audit and args.device == "cpu":  # no shadow proofs run on an accelerator
        numbers |= prove(folder, proofs=args.proof or (4 if args.quick else 20))
    if not args.soak and not args.proof:
        looks = args.audit or (16 if args.quick else 200)
        samples = auditing.measure(regrow(folder, "audited", standbys=0, script=("--time-audit",)), samples=looks)
        numbers["audit_percent"] = auditing.percent(samples)
        print(auditing.describe(samples))
    tell("recovery", numbers, args.json)
    if numbers.get("not_recovered"):
        print(f"records and output are kept in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
