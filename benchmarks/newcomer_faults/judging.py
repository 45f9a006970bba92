"""Runs one job after another, and reads its verdict on newcomers."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regrow.core.ids import Seconds, StepNo
from regrow.core.records import ReplacementJudged
from regrow.observe.ledger import Ledger, read_records

DEADLINE: Seconds = 480.0
KILLED_AT = StepNo(60)


@dataclass(frozen=True)
class Case:
    """One script.

    Attributes:
        path: of the script.
        kind: `fault` or `honest`.
        fault: the object behind it.
        named: words of which a message that names the object has one.
        kill: the rank that is killed to show that the fault is one.
    """

    path: Path
    kind: str
    fault: str = ""
    named: tuple[str, ...] = ()
    kill: int = 1

    @property
    def name(self) -> str:
        """Name of the script and of its job."""
        return self.path.stem


@dataclass(frozen=True)
class Outcome:
    """Outcome of one case.

    Attributes:
        case: the case.
        ran: the job ended in a way that gives a verdict.
        found: `refused`, `refuted`, or empty.
        step: at which it was refuted.
        message: the job's; the reason why nothing was proven, if it was not found for that.
        named: the message names the object.
        differs: committed losses that differ after a kill, if nothing is proven; None: not measured.
    """

    case: Case
    ran: bool
    found: str = ""
    step: int | None = None
    message: str = ""
    named: bool = False
    differs: int | None = None

    def line(self) -> str:
        """The outcome as a line for people."""
        if not self.ran:
            return f"DID NOT RUN: {self.message}"
        sane = "" if self.differs is None else f" [{self.differs} losses differ after a kill]"
        if not self.found:
            return f"{'not found' if self.case.kind == 'fault' else 'no alarm'}{sane} {self.message}".rstrip()
        at = "" if self.step is None else f" at step {self.step}"
        named = "" if self.case.kind == "honest" else ", named" if self.named else ", NOT NAMED"
        return f"{self.found}{at}{named}{sane}: {self.message}"

    def told(self) -> dict[str, object]:
        """The outcome for JSON."""
        case = self.case
        told = {"name": case.name, "kind": case.kind, "fault": case.fault, "ran": self.ran, "found": self.found}
        return {**told, "step": self.step, "named": self.named, "differs": self.differs, "message": self.message}


def cases(folder: Path) -> Iterator[Case]:
    """All scripts, faults first."""
    for path in sorted((folder / "faults").glob("*.py")):
        said = dict(_constants(path))
        yield Case(path, "fault", said["FAULT"], said["NAMED"], said.get("KILL", 1))
    for path in sorted((folder / "honest").glob("*.py")):
        yield Case(path, "honest")


def judge(case: Case, folder: Path, *, sanity: bool, forks: bool = False) -> Outcome:
    """Run it undisturbed, and for `sanity` with a kill too. `forks`: newcomers are made for proofs; no standby is."""
    run = _Run(case, folder / "proven", ("--proof", "fork") if forks else ("--standby=1",))
    found_of = [record for record in run.records if isinstance(record, ReplacementJudged)]
    judged = next((record for record in found_of if record.reason), next(iter(found_of), None))
    message, found, step = "", "", None
    if not run.ledger.commits and run.code == 1:
        message, found = run.said(), "refused"
    elif judged is not None and judged.reason:
        message, found, step = judged.reason, "refuted", int(judged.step)
    if not found and run.code != 0:
        return Outcome(case, False, message=run.why())
    if judged is None and not found:
        message = f"nothing was proven: {run.said()}"
    differs = _differing(case, folder, run) if sanity and found != "refused" else None
    named = bool(found) and any(word in message for word in case.named)
    return Outcome(case, True, found, step, message, named, differs)


def _differing(case: Case, folder: Path, calm: "_Run") -> int:
    """Number of committed losses that differ after a kill without a proof."""
    plan = folder / "plan.toml"
    plan.write_text(f'[[fault]]\nrank = {case.kill}\nstep = {KILLED_AT}\nat = "forward"\nhow = "sigkill"\n')
    struck = _Run(case, folder / "struck", ("--standby=1", "--proof", "off", "--fault-plan", str(plan)))
    before, after = calm.losses(), struck.losses()
    return sum(before.get(key) != after.get(key) for key in before.keys() | after.keys())


class _Run:
    """One job to its end, and its records."""

    def __init__(self, case: Case, folder: Path, flags: tuple[str, ...]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "regrow",
            "run",
            "--nproc-per-node=2",
            "--no-health",
            f"--job={case.name}",
        ]
        environment = {**os.environ, "REGROW_HOME": str(folder), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
        with (folder / "told.log").open("w") as log:
            try:
                done = subprocess.run(
                    [*command, *flags, str(case.path)], stdout=log, stderr=log, env=environment, timeout=DEADLINE
                )
                self.code: int | None = done.returncode
            except subprocess.TimeoutExpired:
                self.code = None
        self.log = (folder / "told.log").read_text()
        records = folder / "jobs" / case.name
        self.records = list(read_records(records)) if records.is_dir() else []
        self.ledger = Ledger(self.records)

    def losses(self) -> dict[tuple[int, int], float]:
        """All committed losses, by step and rank."""
        return {
            (int(step), int(rank)): numbers["loss"]
            for (step, rank), numbers in self.ledger.numbers.items()
            if "loss" in numbers
        }

    def said(self) -> str:
        """The last sentence before the end: the error's."""
        lines = [line for line in self.log.splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line or "regrow:" in line]
        return (errors or lines or [""])[-1]

    def why(self) -> str:
        """Reason why the job gave no verdict."""
        return f"exit code {self.code}, {len(self.ledger.commits)} steps: {self.said()}"


def _constants(path: Path) -> Iterator[tuple[str, Any]]:
    """Constants that the script declares about itself."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name in ("FAULT", "NAMED", "KILL"):
                yield name, ast.literal_eval(node.value)
