"""Cost of a short job in addition to its script: its start, its end, and twenty of them at once on one machine.

    python benchmarks/short_jobs.py            # about 4 minutes on two idle cores
    python benchmarks/short_jobs.py --quick    # about 2 minutes

*Start and end*: a linear layer under DDP on 4 ranks, in turns under `regrow run`, by itself (one process, the same
script), under torchrun, and by itself without regrow. *First step*: seconds from the command until the last rank has
made its first step; *exit*: from the end of the last rank's script to the exit of the command, which includes Python's
own exit from a process with torch; *processor*: CPU seconds of all its processes, which load on the machine changes
least. `start_s_beyond_script` is the median over the rounds of the first step under `regrow run`, less that of the
same script by itself; `start_s_beyond_plain`: less that of the script without regrow.

*At once*: 20 jobs of 2 ranks each. When all of them train, a rank of one is killed, and all are allowed to finish. A
job has failed if its exit code is not 0, its weights differ from the others', or it leaves something behind: a process,
a file for sockets or the data cache, shared memory. `jobs_disturbed` counts jobs with an incident but without a kill.

Exits with 1 if a side could not be measured.
"""

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil
from rich.console import Console
from rich.table import Table
from targets import tell, warn_if_busy

HERE = Path(__file__).resolve().parent
RANKS = 4
JOBS = 20
PATIENCE_S = 300.0
SETTLE_S = 5.0
REGROW = (sys.executable, "-m", "regrow", "run", "--quiet")
SIDES = {
    "regrow run": (*REGROW, "--nproc-per-node", str(RANKS)),
    "script by itself": (sys.executable,),
    "torchrun": (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)),
    "script without regrow": (sys.executable,),
}


@dataclass(frozen=True)
class Mark:
    """A line of the training."""

    rank: int
    pid: int
    word: str
    at: float


@dataclass(frozen=True)
class Round:
    """A run of a side: seconds to the first step of all ranks, from the last rank's end to the exit, of CPU time."""

    start: float
    end: float
    processor: float


def read_marks(path: Path) -> list[Mark]:
    """All complete lines so far."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = [line.split() for line in lines]
    return [Mark(int(each[0]), int(each[1]), each[2], float(each[3])) for each in found if len(each) == 4]


def environment(folder: Path) -> dict[str, str]:
    """Environment with this benchmark's own folders, and one thread a rank."""
    own = {"REGROW_HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "XDG_RUNTIME_DIR": str(folder / "run")}
    for path in own.values():
        Path(path).mkdir(mode=0o700, exist_ok=True)
    return os.environ | own | {"OMP_NUM_THREADS": "1"}


def words(side: str, marks: Path) -> list[str]:
    """The command line of a side."""
    plain = ["--plain"] if side in ("torchrun", "script without regrow") else []
    return [*SIDES[side], str(HERE / "short_jobs_training.py"), "--marks", str(marks), *plain]


def run_once(side: str, folder: Path, number: int) -> Round:
    """Run a side once. Exits with 1 if it fails."""
    marks = folder / f"{side.replace(' ', '-')}-{number}.marks"
    began, before = time.time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        words(side, marks), env=environment(folder), capture_output=True, text=True, timeout=PATIENCE_S
    )
    over, after, found = time.time(), resource.getrusage(resource.RUSAGE_CHILDREN), read_marks(marks)
    first = [mark.at for mark in found if mark.word == "step1"]
    if done.returncode != 0 or len(first) != (RANKS if "script" not in side else 1):
        raise SystemExit(f"{side} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Round(max(first) - began, over - max(mark.at for mark in found), spent)


# --- many at once ------------------------------------------------------------------------------------------------


@dataclass
class Crowd:
    """Outcome of the simultaneous jobs."""

    failed: int
    disturbed: int
    incidents_of_struck: int
    seconds: float
    left: list[str]


def at_once(folder: Path, jobs: int) -> Crowd:
    """Start all jobs, kill a rank of the first when all train, and wait for their ends."""
    hurry, around = folder / "hurry", environment(folder)
    shared = shared_memory()
    began = time.monotonic()
    running = []
    for number in range(jobs):
        name = f"crowd-{number}"
        command = [
            *(*REGROW, "--nproc-per-node", "2", "--job", name, "--tag", "crowd"),
            *(str(HERE / "short_jobs_training.py"), "--steps", "120", "--hurry", str(hurry)),
            *("--marks", str(folder / f"{name}.marks"), "--out", str(folder / f"{name}.out")),
        ]
        output = (folder / f"{name}.said").open("wb")
        running.append(subprocess.Popen(command, env=around, stdout=output, stderr=subprocess.STDOUT))
        output.close()
    struck = wait_training(folder, running)
    if struck:
        os.kill(struck, signal.SIGKILL)
    hurry.touch()
    codes = [ended(process, began + PATIENCE_S) for process in running]
    seconds = time.monotonic() - began
    results = [path.read_text() if path.exists() else "" for path in (folder / f"crowd-{n}.out" for n in range(jobs))]
    usual = max(set(results), key=results.count)
    bad = [n for n in range(jobs) if codes[n] != 0 or results[n] != usual or not results[n]]
    for number in bad:
        print(f"job {number}: {codes[number]}\n{(folder / f'crowd-{number}.said').read_text()[-1500:]}")
    rows = {row["job"]: row for row in listed(around)}
    incidents = [int(str(rows[f"crowd-{n}"]["incidents"] or 0)) if f"crowd-{n}" in rows else 0 for n in range(jobs)]
    left = left_behind(folder, shared)
    failed = len(bad) + bool(left) + (not struck)
    return Crowd(failed, sum(map(bool, incidents[1:])), incidents[0], seconds, left)


def wait_training(folder: Path, running: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait until all jobs have made a step on both ranks; returns the pid of the first job's rank 1, 0 on failure."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until and all(process.poll() is None for process in running):
        marks = [read_marks(folder / f"crowd-{number}.marks") for number in range(len(running))]
        if all({mark.rank for mark in each} == {0, 1} for each in marks):
            return next(mark.pid for mark in marks[0] if mark.rank == 1)
        time.sleep(0.2)
    return 0


def ended(process: subprocess.Popen[bytes], until: float) -> int:
    """Exit code; -9 for a process that does not end in time."""
    try:
        return process.wait(max(1.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def listed(around: dict[str, str]) -> list[dict[str, object]]:
    """Rows of `regrow jobs`."""
    command = [sys.executable, "-m", "regrow", "jobs", "--tag", "crowd", "--json"]
    done = subprocess.run(command, env=around, capture_output=True, check=True, timeout=PATIENCE_S)
    rows: list[dict[str, object]] = json.loads(done.stdout)
    return rows


def shared_memory() -> set[str]:
    """Names in the machine's shared memory."""
    return set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()


def left_behind(folder: Path, before: set[str]) -> list[str]:
    """Remaining processes and files of these jobs, after a short wait."""
    home = str(folder / "home")
    until = time.monotonic() + SETTLE_S
    while (left := _left(home, folder, before)) and time.monotonic() < until:
        time.sleep(0.2)
    return left


def _left(home: str, folder: Path, before: set[str]) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("REGROW_HOME") == home:
                found.append(f"process {process.pid}: {' '.join(process.cmdline())}")
        except psutil.Error:
            continue  # another user's, or just ended
    for name in shared_memory() - before:
        owner = Path("/dev/shm", name, "owner")
        if owner.exists() and home in owner.read_text():
            found.append(f"/dev/shm/{name}")
    files = [*(folder / "tmp").iterdir(), *(folder / "run").iterdir()]
    return [*found, *(str(path) for path in files if not path.name.startswith("torch"))]  # torch's own caches


# --- the table ---------------------------------------------------------------------------------------------------


def figures_of(rounds: dict[str, list[Round]]) -> dict[str, float]:
    """Medians, and differences between the sides of a round."""
    starts = {side: [each.start for each in found] for side, found in rounds.items()}
    beyond = {
        name: median(ours - own for ours, own in zip(starts["regrow run"], starts[side], strict=True))
        for name, side in (("script", "script by itself"), ("plain", "script without regrow"))
    }
    return {
        "start_s_beyond_script": beyond["script"],
        "start_s_beyond_plain": beyond["plain"],
        "teardown_s": median(each.end for each in rounds["regrow run"]),
        **{
            f"{name}_processor_s": median(each.processor for each in rounds[side])
            for name, side in (("regrow", "regrow run"), ("script", "script by itself"), ("torchrun", "torchrun"))
        },
        "torchrun_start_s": median(starts["torchrun"]),
        "torchrun_teardown_s": median(each.end for each in rounds["torchrun"]),
        "script_start_s": median(starts["script by itself"]),
        "script_teardown_s": median(each.end for each in rounds["script by itself"]),
        "start_s": median(starts["regrow run"]),
        "rounds": len(rounds["regrow run"]),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 8")
    parser.add_argument("--jobs", type=int, default=JOBS, help=f"at once; 0: none [{JOBS}]")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    warn_if_busy()
    rounds: dict[str, list[Round]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory(prefix="short-jobs-") as name:
        folder = Path(name)
        run_once("regrow run", folder, -1)  # fills the page cache
        for number in range(3 if args.quick else 8):
            for side in SIDES:
                rounds[side].append(run_once(side, folder, number))
        crowd = at_once(folder, args.jobs) if args.jobs else None
    figures = figures_of(rounds)
    table = Table("side", "ranks", "first step", "exit", "processor")
    for side, found in rounds.items():
        ranks = "1" if "script" in side else str(RANKS)
        middle = [median(each) for each in zip(*((r.start, r.end, r.processor) for r in found), strict=True)]
        table.add_row(side, ranks, *(f"{each:.2f} s" for each in middle))
    Console().print(table)
    if crowd is not None:
        figures |= {
            f"jobs_at_once_{args.jobs}_failed": crowd.failed,
            f"jobs_at_once_{args.jobs}_s": crowd.seconds,
            "jobs_disturbed": crowd.disturbed,
            "incidents_of_struck": crowd.incidents_of_struck,
        }
        print(
            f"{args.jobs} jobs at once: {crowd.failed} failed, {crowd.seconds:.0f} s; rank killed in one: "
            f"{crowd.incidents_of_struck} incident there, {crowd.disturbed} other jobs disturbed; "
            f"left behind: {', '.join(crowd.left) or 'nothing'}"
        )
    tell("short_jobs", figures, args.json)


if __name__ == "__main__":
    main()
