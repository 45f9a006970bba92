"""`regrow try`: runs a script undisturbed, then kills each rank in each phase, and compares the results."""

import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from regrow.core.config import Script, jobs_home
from regrow.core.errors import UsageError
from regrow.core.ids import Rank, Seconds, StepNo
from regrow.launch.processes import end
from regrow.launch.script import check_script
from regrow.observe.ledger import Ledger, read_records
from regrow.observe.story import count, seconds
from regrow.observe.trial import PHASES, Kill, Outcome, Result, advice, complaint, first_difference, judge, table

PILOT_STEPS = 6
FIRST_KILL, APART, TAIL = 2, 3, 2
"""Step of the first kill, steps from one kill to the next, and steps after the last kill."""
RUN_DEADLINE: Seconds = 1800.0
MOST_RUNS = 4
"""Most runs for each way to replace a rank. After a kill that fails, another run makes the remaining kills."""
WAYS = {"fork": ("--standby=0",), "standby": ("--standby=1", "--warmth=built")}
_LAST_LINES, _LAST_OF_RANK = 12, 10
_IN_ITS_LOG = re.compile(r"rank (\d+) .*; its output is in its log")


@dataclass(frozen=True)
class TrialFlags:
    """Flags of `regrow try`. `steps`, `kills`: None: as many as it takes to kill each rank in each phase."""

    script: str
    args: tuple[str, ...] = ()
    module: bool = False
    nproc: int = 2
    steps: int | None = None
    kills: int | None = None
    buddy_every: int = 0


@dataclass(frozen=True)
class TrialRun:
    """Results of one run of the script. `output`: the last lines that it printed."""

    code: int
    ledger: Ledger
    output: str
    seconds: Seconds


def plan_kills(*, ranks: int, steps: int | None = None, kills: int | None = None) -> list[Kill]:
    """Plan a kill of each rank in each phase, a few steps apart; if only fewer fit, the first ones cover every phase.

    Raises:
        UsageError: the steps do not suffice for a single kill.
    """
    places = [(Rank((at + turn) % ranks), phase) for turn in range(ranks) for at, phase in enumerate(PHASES)]
    room = len(places) if steps is None else (steps - FIRST_KILL - TAIL) // APART + 1
    count = min(len(places), room, kills if kills is not None else len(places))
    if count < 1:
        least = FIRST_KILL + TAIL
        raise UsageError(f"--steps {steps} leaves no room for a kill", hint=f"give at least {least}, and --kills 1")
    return again([Kill("", rank, StepNo(0), phase) for rank, phase in places[:count]])


def again(kills: Sequence[Kill]) -> list[Kill]:
    """The same kills, renumbered and moved forward so that they begin at the first allowed step."""
    return [
        replace(kill, fault=f"plan-{at + 1}", step=StepNo(FIRST_KILL + APART * at)) for at, kill in enumerate(kills)
    ]


def run_trial(flags: TrialFlags, console: Console | None = None) -> int:
    """Run the trial and print its results.

    Returns:
        0 when every kill was mended and nothing differs, else 1.

    Raises:
        UsageError: there is no such script, or too few steps for a kill.
    """
    check_script(Script(target=flags.script, args=[], module=flags.module))
    kills = plan_kills(ranks=flags.nproc, steps=flags.steps, kills=flags.kills)
    steps = flags.steps if flags.steps is not None else kills[-1].step + TAIL
    with tempfile.TemporaryDirectory(prefix="regrow-try-") as folder:
        return _Trial(flags, Path(folder), console or Console(), steps).run(kills)


class _Trial:
    """The runs of one trial, which differ only in their flags."""

    def __init__(self, flags: TrialFlags, folder: Path, console: Console, steps: int) -> None:
        self._flags, self._folder, self._console, self._steps = flags, folder, console, steps
        self._name = f"try-{secrets.token_hex(3)}"
        self._runs = 0

    def run(self, kills: list[Kill]) -> int:
        """Make two undisturbed runs, then the runs with kills; returns the exit code."""
        ways, ranks = " and ".join(WAYS), self._flags.nproc
        self._say(f"at most {count(len(kills), 'kill')} in {self._steps} steps with {ranks} ranks, by {ways} each")
        few = min(PILOT_STEPS, self._steps)
        pilot = self._start("undisturbed, a few steps", few)
        alone = self._start("undisturbed", self._steps) if pilot.code == 0 else pilot
        if alone.code != 0:
            self._say(f"the script fails without any kill (exit code {alone.code}):\n{alone.output}")
            return 1
        reached = alone.ledger.last_step
        if reached is None:
            self._say("no step was committed: the script has no `for step in session.steps(...)`, or it ends before")
            return 1
        if difference := first_difference(pilot.ledger, alone.ledger, until=StepNo(few)):
            self._say(f"two undisturbed runs differ: {difference[1]}. The script does not repeat itself; seed it.")
            return 1
        fitting = [kill for kill in kills if kill.step + TAIL <= reached + 1]
        if len(fitting) < len(kills):
            self._say(f"the script has {reached + 1} steps only: {len(fitting)} of {len(kills)} kills fit in")
        results: dict[str, list[Result]] = {}
        for way in WAYS:
            absent = [each for each in next(iter(results.values()), []) if each.outcome is Outcome.ABSENT]
            places = {(each.kill.rank, each.kill.phase) for each in absent}
            left = [kill for kill in fitting if (kill.rank, kill.phase) not in places]
            struck = list(self._inject(way, left, alone.ledger))
            if nowhere := sum(each.outcome is Outcome.ABSENT for each in struck):
                self._say(f"   {nowhere} of them found no such place in this script, and are not tried again")
            results[way] = [*struck, *absent]
        return self._report(results, kills=len(kills))

    def _inject(self, way: str, kills: list[Kill], alone: Ledger) -> Iterator[Result]:
        """Make runs until every kill was tried; each run ends with the first kill that fails."""
        for _ in range(MOST_RUNS):
            if not kills:
                return
            kills = again(
                kills
            )  # The plan file names its faults by their order, so that leaving one out renames those after it.
            plan = self._folder / f"{way}-{self._runs}.toml"
            plan.write_text("\n".join(_toml(kill) for kill in kills), encoding="utf-8")
            run = self._start(f"{count(len(kills), 'kill')}, {way}", self._steps, f"--fault-plan={plan}", *WAYS[way])
            results = judge(kills, run.ledger, alone, code=run.code, output=run.output)
            yield from (result for result in results if result.outcome is not Outcome.UNTRIED)
            kills = [result.kill for result in results if result.outcome is Outcome.UNTRIED]
        yield from (Result(kill, Outcome.UNTRIED) for kill in kills)

    def _report(self, results: dict[str, list[Result]], *, kills: int) -> int:
        tried = [result for each in results.values() for result in each]
        for way, each in results.items():
            self._console.print(table(f"replaced by {way}", each))
            self._say("")
        failed = [result for result in tried if result.outcome in (Outcome.DIFFERS, Outcome.ENDED)]
        for result in failed:
            self._say(complaint(result))
        for line in advice(results):
            self._say(line)
        equal = sum(result.outcome is Outcome.EQUAL for result in tried)
        untried = sum(result.outcome is Outcome.UNTRIED for result in tried)
        rest = f", {untried} untried" if untried else ""
        self._say(f"{equal} of {equal + len(failed) + untried} kills mended, bitwise equal{rest}")
        return 0 if equal and not failed and not untried else 1

    def _start(self, what: str, steps: int, *more: str) -> TrialRun:
        """Run the script to its end; returns the results."""
        self._runs += 1
        job = f"{self._name}-{self._runs}"
        log = self._folder / f"{job}.log"
        flags = self._flags
        command = [sys.executable, "-m", "regrow", "run", "--standalone", "--quiet", "--redirects=3", f"--job={job}"]
        # One step more than needed: each step records the digest of the state that it begins with.
        command += [f"--nproc-per-node={flags.nproc}", f"--trial-steps={steps + 1}", *more]
        command += [f"--buddy-every={flags.buddy_every}"] if flags.buddy_every else []
        command += [*(["-m"] if flags.module else []), flags.script, *flags.args]
        self._say(f"{self._runs}: {what} …")
        began = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = process.wait(RUN_DEADLINE)
        except subprocess.TimeoutExpired:
            code = 1
            self._say(f"it did not end within {seconds(RUN_DEADLINE)}")
        finally:
            end(process)
        took = time.monotonic() - began
        self._say(f"   {seconds(took)}, records in {jobs_home() / job}")
        said = _last_lines(log, _LAST_LINES)
        if code != 0 and (found := _IN_ITS_LOG.search(said)):
            said += f":\n{_last_lines(jobs_home() / job / 'logs' / f'rank{found[1]}.log', _LAST_OF_RANK)}"
        return TrialRun(code, Ledger(read_records(jobs_home() / job)), said, took)

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _last_lines(path: Path, most: int) -> str:
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return "\n".join(text.splitlines()[-most:])


def _toml(kill: Kill) -> str:
    return f'[[fault]]\nrank = {kill.rank}\nstep = {kill.step}\nat = "{kill.phase}"\nhow = "sigkill"\n'
