"""`regrow demo`: a training whose workers are killed, the same training undisturbed, and a comparison of both."""

import json
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from regrow.core.config import jobs_home
from regrow.core.errors import DeadlineExceeded, RegrowError, UsageError
from regrow.core.ids import Seconds
from regrow.core.messages.vocabulary import STEP_STAGES
from regrow.launch.processes import end
from regrow.observe.ledger import Ledger, read_records
from regrow.observe.live import follow, open_view
from regrow.observe.receipt import Receipt
from regrow.observe.story import seconds

WORLD = 4
KILLS = 3
STEPS = 120
TOKENS_PER_STEP = WORLD * 4 * 64
"""Product of the number of ranks, the windows of text per rank and step, and the bytes per window of the example."""
RUN_DEADLINE: Seconds = 600.0
_LEAST_STEPS = 20


@dataclass(frozen=True)
class DemoRun:
    """Results of one run of the demo's training. `digest`: of its final state; None if the run did not complete."""

    code: int
    ledger: Ledger
    digest: str | None
    seconds: Seconds


def run_demo(*, steps: int = STEPS, seed: int = 0, json_path: Path | None = None, plain: bool = False) -> int:
    """Train a small GPT in four workers while three of them are killed, then once more undisturbed; compare both.

    Args:
        steps: optimizer updates of each run.
        seed: of the model, the data and the faults.
        json_path: where to write the figures, as `{"figures": {name: number}}`.
        plain: print lines instead of the live view, as always if the output is not a terminal.

    Returns:
        0 when both runs are bitwise equal and every fault was mended, else 1.

    Raises:
        UsageError: there is no training script to run, or too few steps for the faults.
        DeadlineExceeded: a run did not end.
    """
    if steps < _LEAST_STEPS:
        raise UsageError(f"--steps {steps} leaves no room for {KILLS} faults", hint=f"give at least {_LEAST_STEPS}")
    demo = _Demo(Console(), find_script(), steps=steps, seed=seed, plain=plain)
    with tempfile.TemporaryDirectory(prefix="regrow-demo-") as folder:
        plan = Path(folder) / "faults.toml"
        plan.write_text(fault_plan(steps=steps, seed=seed), encoding="utf-8")
        demo.say(f"1 of 2: {WORLD} workers and a standby; {KILLS} of the workers are killed on the way")
        disturbed = demo.run(Path(folder), "disturbed", ["--standby=1", "--warmth=built", f"--fault-plan={plan}"])
        demo.say(f"   took {seconds(disturbed.seconds)}")
        demo.say("2 of 2: the same training, left alone")
        alone = demo.run(Path(folder), "alone", [])
        demo.say(f"   took {seconds(alone.seconds)}")
    receipt = Receipt(disturbed.ledger, alone.ledger, disturbed.digest, alone.digest, planned=KILLS)
    receipt.print(demo.console)
    if json_path is not None:
        json_path.write_text(json.dumps({"figures": receipt.figures()}, indent=2) + "\n", encoding="utf-8")
    return 0 if receipt.bitwise_equal and receipt.recovered and disturbed.code == alone.code == 0 else 1


def find_script() -> Path:
    """The example script that the demo trains: in the installed package, or in the repository.

    Raises `UsageError` if it is in neither.
    """
    package = Path(__file__).resolve().parents[1]
    candidates = [package / "_examples" / "02-ddp.py", package.parents[3] / "examples" / "02-ddp.py"]
    for path in candidates:
        if path.is_file():
            return path
    raise UsageError(
        f"the demo's training script is in neither {candidates[0].parent} nor {candidates[1].parent}",
        hint="install regrow from its repository or from a complete wheel",
    )


def fault_plan(*, steps: int, seed: int) -> str:
    """A plan in TOML that kills three different ranks, each at a random stage of a random step.

    Each of the three middle fifths of the run has one fault, in its first half, so that a standby can be built in
    between.
    """
    draw = random.Random(seed)
    fifth = steps // (KILLS + 2)
    entries = []
    for number, rank in enumerate(draw.sample(range(WORLD), KILLS), 1):
        step = number * fifth + draw.randrange(max(1, fifth // 2))
        stage = draw.choice(STEP_STAGES)
        entries.append(f'[[fault]]\nrank = {rank}\nstep = {step}\nat = "{stage}"\nhow = "sigkill"\n')
    return "\n".join(entries)


class _Demo:
    """The runs of one demo, which differ only in their flags."""

    def __init__(self, console: Console, script: Path, *, steps: int, seed: int, plain: bool) -> None:
        self.console = console
        self._script = script
        self._steps = steps
        self._seed = seed
        self._plain = plain
        self._name = f"demo-{secrets.token_hex(3)}"

    def say(self, line: str) -> None:
        """Print a line."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def run(self, folder: Path, kind: str, flags: Sequence[str]) -> DemoRun:
        """Run one training and show it live."""
        job, out, log = f"{self._name}-{kind}", folder / f"{kind}.json", folder / f"{kind}.log"
        job_dir = jobs_home() / job
        command = [sys.executable, "-m", "regrow", "run", "--standalone", f"--nproc-per-node={WORLD}", "--quiet"]
        command += ["--redirects=3", f"--job={job}", *flags, str(self._script)]
        command += [f"--steps={self._steps}", f"--seed={self._seed}", f"--out={out}"]
        start = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            self._show(process, job_dir, kind, deadline=start + RUN_DEADLINE)
        finally:
            code = end(process)
        if code != 0:
            self.say(f"the {kind} run ended with code {code}; its records are in {job_dir}")
            self.say(log.read_text(encoding="utf-8", errors="replace"))
        return DemoRun(code, Ledger(read_records(job_dir)), _read_digest(out), time.monotonic() - start)

    def _show(self, process: subprocess.Popen[bytes], job_dir: Path, kind: str, *, deadline: Seconds) -> None:
        def running() -> bool:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"the {kind} run did not end within {RUN_DEADLINE:g} s", hint=f"see {job_dir}")
            return process.poll() is None

        view = open_view(
            self.console,
            plain=self._plain,
            title="a small GPT",
            until=self._steps,
            unit="tokens",
            per_step=TOKENS_PER_STEP,
        )
        with view:
            follow(job_dir, view, running=running)


def _read_digest(out: Path) -> str | None:
    """The script's digest of its final state; None if it wrote none. Raises `RegrowError` if the file is malformed."""
    if not out.exists():
        return None
    try:
        return str(json.loads(out.read_text(encoding="utf-8"))["state"])
    except (ValueError, KeyError) as error:
        raise RegrowError(f"{out} is not what the training script writes: {error}") from error
