"""Minutes of seeded faults of all kinds against hosts with a network between them: regrow, and torchrun beside it.

    python benchmarks/chaos.py              # 30 minutes of faults a side, one every 20 s: over an hour
    python benchmarks/chaos.py --quick      # at most 8 minutes

Needs root and `ip` (iproute2): each host is a network namespace with its own launcher. Three hosts have two ranks
each, a fourth is the spare. On each side two jobs of the same steps go on beside each other: one that nobody disturbs,
and one that has the faults of the seed's plan. *Goodput* is how long the undisturbed job took for its steps, as a share
of what the disturbed one took for them; of one that is not at its end by then, its share of the steps. Torchrun's side
has the same plan, a checkpoint every 50 steps on a local disk, a spare host, collectives that end after 20 s, and
whatever ends there is started again as it is for regrow.

Faults: a rank is killed (SIGKILL), a rank hangs (SIGSTOP for ever; regrow has `--hang-timeout 2`, 90 s otherwise),
an agent or the coordinator's launcher is paused for 5 s, all processes of a host are killed and its launcher started
again, a host's link is cut until the job goes on without it (regrow has `--node-lease 3`, 10 s otherwise). The host of
the first launcher is not lost here: `tests/process/test_succession.py` measures that.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Self

import psutil
from rich.console import Console
from rich.table import Table
from targets import tell, warn_if_busy

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.process.network import Network

from regrow.core.records import StepCommitted
from regrow.observe.ledger import Ledger, read_records
from regrow.observe.tail import RecordTail

HERE = Path(__file__).resolve().parent
HOSTS, RANKS_A_HOST = 4, 2
WORLD = (HOSTS - 1) * RANKS_A_HOST
PACE, STEP_GUESS = 0.15, 0.19
"""Seconds: what a step sleeps, and what it takes in all, to know how many steps fill the minutes."""
CALM_STEPS = 20
"""At the beginning and at the end, without faults."""
PAUSE_S, HANG_S, LEASE_S = 5.0, 2.0, 3.0
START_S, RECOVERY_S = 120.0, 90.0
DECK = {"rank killed": 13, "rank hangs": 1, "agent paused": 2, "coordinator paused": 1, "host killed": 2, "link cut": 1}
"""How many of 20 faults are of which kind."""
QUICK_DECK = {**dict.fromkeys(DECK, 1), "rank killed": 4}


class Stuck(Exception):
    """The job did not come back after a fault, or did not start."""


@dataclass
class Progress:
    """What a job has committed, from its records."""

    tail: RecordTail
    first: dict[int, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    """When a rank committed a step for the first time, by step and rank."""
    losses: dict[tuple[int, int], set[float]] = field(default_factory=lambda: defaultdict(set))
    pids: dict[int, int] = field(default_factory=dict)
    newest: int = -1
    """The newest step that every rank has committed."""
    redone: set[int] = field(default_factory=set)
    """Steps that a rank computed again after it had committed them."""

    def look(self) -> None:
        """Read what is new."""
        for line in self.tail.poll():
            if not isinstance(line, StepCommitted):
                continue
            if line.rank in self.first[line.step] and not line.adopted:
                self.redone.add(line.step)
            self.first[line.step].setdefault(line.rank, line.at)
            if not line.adopted:  # else the worker has the state of that step from another
                self.losses[line.step, line.rank].add(line.metrics["loss"])
                self.pids[line.rank] = int(line.metrics["pid"])
        # What a host had committed last may never have been written: only its ranks' lines of that step are missing.
        whole = (step for step in range(max(self.first, default=-1), self.newest, -1) if self.whole(step))
        self.newest = next(whole, self.newest)

    def whole(self, step: int) -> bool:
        """Whether every rank's commit is known."""
        return len(self.first.get(step, ())) == WORLD

    def at(self, step: int) -> float:
        """When every rank had committed a step, one that is whole."""
        return max(self.first[step].values())


class Job:
    """A job on hosts of its own. Left, nothing of it is running."""

    def __init__(self, side: str, name: str, folder: Path, steps: int) -> None:
        self.side, self.name, self.steps = side, name, steps
        self.folder = folder / f"{side}-{name}"
        self.records = self.folder / "jobs" / name if side == "regrow" else self.folder
        self.progress = Progress(RecordTail(self.records))
        self.network = Network(HOSTS)
        self._launchers: dict[int, subprocess.Popen[bytes]] = {}
        self._log = folder / f"{side}-{name}.log"

    def __enter__(self) -> Self:
        self.folder.mkdir()
        self.network.open()
        for host in range(HOSTS):
            self.start(host)
        return self

    def __exit__(self, *exception: object) -> None:
        self.network.close()
        for process in self._launchers.values():
            process.wait(30)

    def start(self, host: int) -> None:
        """The launcher of a host."""
        endpoint = f"{self.network.address(0)}:29400"
        if self.side == "regrow":
            words = ["regrow", "run", f"--job={self.name}", f"--nnodes={HOSTS}", "--spares=1", f"--node-rank={host}"]
            words += [f"--rdzv-endpoint={endpoint}", f"--bind={self.network.address(host)}"]
            words += ["--standby=1", "--warmth=built", "--max-faults=100000", f"--hang-timeout={HANG_S:g}"]
            words += [f"--node-lease={LEASE_S:g}"]
        else:
            words = ["torch.distributed.run", f"--nnodes={HOSTS - 1}", f"--rdzv-id={self.name}", "--rdzv-backend=c10d"]
            words += [
                f"--rdzv-endpoint={endpoint}",
                f"--rdzv-conf=is_host={host == 0}",
                "--max-restarts=100000",
                f"--local-addr={self.network.address(host)}",
            ]
        words += [f"--nproc-per-node={RANKS_A_HOST}", str(HERE / "chaos_training.py"), f"--side={self.side}"]
        words += [f"--steps={self.steps}", f"--pace={PACE}", f"--records={self.folder}"]
        around = {"REGROW_HOME": str(self.folder), "REGROW_TOKEN": self.name, "OMP_NUM_THREADS": "1"}
        around |= {"GLOO_SOCKET_IFNAME": "eth0", "XDG_RUNTIME_DIR": str(self.folder), "REGROW_NO_HEALTH": "1"}
        # Without this variable torchrun's restarts hang or die now and then: it would lose more than it has to.
        around |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        command = ["ip", "netns", "exec", self.network.name(host), sys.executable, "-m", *words]
        with self._log.open("ab") as log:
            self._launchers[host] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **around}
            )

    def restart(self, host: int) -> None:
        """The host is there again: its launcher as before."""
        self._launchers[host].wait(30)
        self.start(host)

    @property
    def ended(self) -> bool:
        """Whether the digest is written."""
        return (self.folder / "digest").exists()

    @property
    def digest(self) -> str:
        """Of the last state."""
        return (self.folder / "digest").read_text()

    def wait(self, step: int, seconds: float, beside: Callable[[], object] = lambda: None) -> None:
        """Until every rank has committed it. Raises `Stuck`."""
        deadline = time.monotonic() + seconds
        while self.progress.newest < step:
            self.progress.look()
            beside()
            if time.monotonic() > deadline:
                raise Stuck(f"{self.side} {self.name}: step {step} was not reached in {seconds:.0f} s; see {self._log}")
            time.sleep(0.05)

    def host_of(self, rank: int) -> int:
        """Where a rank is now."""
        pid = self.progress.pids[rank]
        return next(host for host in range(HOSTS) if pid in self.network.processes(host))

    def launcher(self, host: int) -> int:
        """Its process."""
        return self._launchers[host].pid

    def agent(self, host: int) -> int:
        """The process that looks after a host's workers: torchrun is its own."""
        if self.side == "torchrun":
            return self.launcher(host)
        children = psutil.Process(self.launcher(host)).children()
        return next(int(child.pid) for child in children if "regrow.agent" in child.cmdline())


@dataclass
class Struck:
    """One fault, and what it cost: the longest time between two commits of the world around it, less a usual step."""

    kind: str
    cost: float


def plan(seed: int, faults: int, *, quick: bool) -> list[str]:
    """So many kinds in an order drawn from the seed, each as often as the deck says."""
    draw, deck = random.Random(seed), QUICK_DECK if quick else DECK
    cards: list[str] = []
    while len(cards) < faults:
        fresh = [kind for kind, count in deck.items() for _ in range(count)]
        draw.shuffle(fresh)
        cards += fresh
    return cards[:faults]


def strike(job: Job, kind: str, draw: random.Random) -> None:
    """Let one fault happen, and mend what a cluster mends: hosts and links come back."""
    rank = draw.randrange(WORLD)
    away = draw.choice(sorted({job.host_of(rank) for rank in range(WORLD)} - {0}))
    match kind:
        case "rank killed":
            os.kill(job.progress.pids[rank], signal.SIGKILL)
        case "rank hangs":
            os.kill(job.progress.pids[rank], signal.SIGSTOP)
        case "agent paused" | "coordinator paused":
            pid = job.agent(away) if kind == "agent paused" else job.launcher(0)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(PAUSE_S)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        case "host killed":
            job.network.kill(away)
            time.sleep(1.0)
            job.restart(away)
        case "link cut":
            before = job.progress.newest
            job.network.cut(away)
            try:
                job.wait(before + 10, RECOVERY_S)
            finally:
                job.network.join(away)


def disturb(job: Job, kinds: list[str], every: float, seed: int, calm: Job) -> Iterator[Struck]:
    """Strike until the plan is done, the job nears its end, or the plan's time is over by far."""
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
        job.wait(before + 10, RECOVERY_S, calm.progress.look)
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
    """What a side came to."""

    goodput: float
    struck: list[Struck]
    redone: int
    equal: bool
    stuck: str = ""
    incidents: Counter[str] = field(default_factory=Counter)
    lost: int = 0


def measure(side: str, folder: Path, *, minutes: float, every: float, seed: int, quick: bool) -> Result:
    """Both jobs of a side to their end."""
    steps = int(minutes * 60 / STEP_GUESS) + 2 * CALM_STEPS
    kinds = plan(seed, int(minutes * 60 / every), quick=quick)
    print(f"{side}: {steps} steps, {len(kinds)} faults, one about every {every:.0f} s", flush=True)
    stuck, struck = "", []
    with ExitStack() as stack:
        calm, job = (stack.enter_context(Job(side, name, folder, steps)) for name in ("calm", "disturbed"))
        for each in (calm, job):
            each.wait(CALM_STEPS, START_S)
        try:
            for fault in disturb(job, kinds, every, seed, calm):
                struck.append(fault)
            if job.progress.newest >= job.steps / 2:  # else it is far behind, and would need hours to its end
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
        result = Result(goodput(job, calm), struck, len(job.progress.redone), equal, stuck)
        if side == "regrow":
            ledger = Ledger(read_records(job.records))
            result.incidents = Counter(f"{incident.kind} → {incident.rung}" for incident in ledger.incidents)
            result.lost = ledger.steps_lost
        return result


def goodput(job: Job, calm: Job) -> float:
    """The undisturbed job's time over the disturbed one's; where that is not at its end, its share of steps by then."""
    ours, theirs, last = job.progress, calm.progress, job.steps - 1
    usual = theirs.at(last) - theirs.at(CALM_STEPS)
    if ours.whole(last):
        return usual / (ours.at(last) - ours.at(CALM_STEPS))
    until = ours.at(CALM_STEPS) + usual
    made = sum(ours.whole(step) and ours.at(step) <= until for step in range(CALM_STEPS + 1, ours.newest + 1))
    return made / (last - CALM_STEPS)


def same_losses(one: Progress, other: Progress) -> bool:
    """Whether every loss that either has ever committed is the same, bit by bit."""
    both = one.losses.keys() & other.losses.keys()
    return len(both) >= 0.9 * len(other.losses) and all(one.losses[at] == other.losses[at] for at in both)


def show(results: dict[str, Result], console: Console) -> None:
    """Print what was measured."""
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
        "--quick", action="store_true", help="2.4 minutes a side; each kind once, kills of ranks four times"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # no host stays behind
    if shutil.which("ip") is None or os.geteuid() != 0:
        print("chaos.py makes network namespaces: it needs root and the command ip (iproute2)", file=sys.stderr)
        return 1
    warn_if_busy()
    folder = Path(tempfile.mkdtemp(prefix="regrow-chaos-", dir="/tmp"))
    minutes, every = (2.4, 16.0) if args.quick else (args.minutes, args.every)
    sides = [args.side] if args.side else ["regrow", "torchrun"]
    results = {
        side: measure(side, folder, minutes=minutes, every=every, seed=args.seed, quick=args.quick) for side in sides
    }
    show(results, Console())
    figures: dict[str, float] = {}
    if ours := results.get("regrow"):
        figures |= {"goodput": ours.goodput, "steps_lost": ours.lost, "faults": len(ours.struck)}
        figures |= {"bitwise_equal": float(ours.equal), "stuck": float(bool(ours.stuck))}
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
