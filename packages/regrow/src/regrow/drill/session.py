"""A session of checks: each runs in its own process with a time limit, and its processes end with it."""

import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import msgspec
import psutil

from regrow.agent.workers.processes import adopt_orphans
from regrow.core.exit_codes import RUN_AGAIN
from regrow.core.ids import Seconds
from regrow.drill.checks import BUDGET, DrillCheck
from regrow.drill.ground import DrillSettings
from regrow.drill.verdict import CheckResult, CheckStatus, DrillReport, code_of, conclude

LEAST: Seconds = 20.0
"""Least time that must be left for a check to start."""
GRACE: Seconds = 5.0
"""Time that the processes of a check have to end after it, also after SIGTERM."""
END: Seconds = 10.0
_LAST_BYTES = 2000
_OF_TORCHRUN = ("PET_", "TORCHELASTIC_")
_OF_ANOTHER_JOB = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    | {"GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"}
    | {"REGROW_JOB", "REGROW_NODE", "REGROW_WORKER_ENV", "REGROW_PROOF", "REGROW_GIVEN_BACK_CODE"}
    | {"REGROW_HANG_FLOOR", "REGROW_NODE_METRICS", "REGROW_RECORD_PART", "REGROW_RECORD_PARTS"}
)
"""Variables that would change a check's jobs: their ranks, their kept records, or their addresses."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class DrillInterrupted(BaseException):
    """A signal has asked the session to end."""


def _ignore_signals() -> None:
    """Ignore signals that ask for an end, because the rest takes limited time and must complete."""
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise `DrillInterrupted` in the block on signals that ask for an end; an ignored signal (`nohup`) stays ignored.

    This process also adopts orphaned descendants.
    """

    def interrupt(number: int, _: FrameType | None) -> None:
        _ignore_signals()
        raise DrillInterrupted(signal.Signals(number).name)

    adopt_orphans()
    caught = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    former = {number: signal.signal(number, interrupt) for number in caught}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def of_checks(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without variables meant for another job: torchrun's, those of workers, and regrow's."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(_OF_TORCHRUN) and name not in _OF_ANOTHER_JOB
    }


def hold(
    checks: Sequence[DrillCheck],
    settings: DrillSettings,
    environment: Mapping[str, str],
    show: Callable[[str], None],
    *,
    budget: Seconds = BUDGET,
) -> DrillReport:
    """Run checks in order, and print a line as each ends.

    Args:
        checks: the checks to run.
        settings: settings without a folder, which is made here and removed at the end.
        environment: environment of this process; the checks get it without variables meant for another job.
        show: prints a line.
        budget: time for all checks.

    Returns:
        The report; after an interruption it has fewer results than there are checks, and code 75.
    """
    began = time.monotonic()
    results: list[CheckResult] = []
    versions: dict[str, str] = {}
    interrupted = False
    children = ChildProcesses()
    # The name is chosen before the folder is made, so that it is removed whenever a signal arrives.
    folder = Path(tempfile.gettempdir()) / f"regrow-doctor-{secrets.token_hex(8)}"
    with interruptible():
        try:
            try:
                folder.mkdir(mode=0o700)
                settings = msgspec.structs.replace(settings, folder=str(folder))
                (folder / "settings.json").write_bytes(msgspec.json.encode(settings))
                (folder / "run").mkdir(mode=0o700)
                # Temporary files of torch and others are removed with this folder.
                own = {
                    "REGROW_HOME": str(folder),
                    "XDG_RUNTIME_DIR": str(folder / "run"),
                    "TMPDIR": str(folder / "run"),
                }
                own["OMP_NUM_THREADS"] = "1"
                given = {**of_checks(environment), **own}
                for check in checks:
                    result = _carry_out(check, folder, given, began + budget - time.monotonic(), children)
                    results.append(result)
                    show(result.line)
                if (folder / "versions.json").exists():
                    versions = msgspec.json.decode((folder / "versions.json").read_bytes(), type=dict[str, str])
            finally:
                _ignore_signals()  # a signal that arrives before this is done is still caught below
        except DrillInterrupted:
            interrupted = True
            children.end(asked=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    verdict = conclude(results, begun=len(checks))
    code = RUN_AGAIN if interrupted else code_of(results)
    took = time.monotonic() - began
    return DrillReport(verdict, code, versions, settings.node_rank, settings.nodes, took, results)


class ChildProcesses:
    """All descendants of this process, including adopted orphans, except those that existed before."""

    def __init__(self) -> None:
        self._me = psutil.Process()
        self._others = {each.pid for each in self._me.children(recursive=True)}

    def end(self, *, asked: bool) -> int:
        """End all these processes; returns the number that had to be killed. `asked`: send SIGTERM first."""
        if asked:
            for each in self._living():
                with suppress(psutil.NoSuchProcess):
                    each.terminate()
        psutil.wait_procs(self._living(), timeout=GRACE)
        found = 0
        until = time.monotonic() + END
        while (living := self._living()) and time.monotonic() < until:
            found = max(found, len(living))
            for each in living:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            psutil.wait_procs(living, timeout=1.0)
        return found

    def _living(self) -> list[psutil.Process]:
        return [each for each in self._me.children(recursive=True) if each.pid not in self._others]


def _carry_out(
    check: DrillCheck, folder: Path, environment: Mapping[str, str], left: Seconds, children: ChildProcesses
) -> CheckResult:
    """Run one check to its end, or to its limit."""
    limit = min(check.limit, left)
    if limit < min(LEAST, check.limit):
        return CheckResult(check.name, CheckStatus.FAILED, "", 0.0, "not carried out: the time for all checks is over")
    began = time.monotonic()
    said = folder / f"{check.name}.said"
    command = [sys.executable, "-m", "regrow.drill", check.name, str(folder), str(began + limit)]
    with said.open("wb") as output:
        # A process session of its own: Ctrl-C reaches only this process, which then ends the check in order.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    late = False
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        late = True
    left_behind = children.end(asked=late)
    took = time.monotonic() - began
    text = said.read_text(encoding="utf-8", errors="replace")[-_LAST_BYTES:]
    if late:
        return CheckResult(check.name, CheckStatus.FAILED, "", took, f"it did not end within {limit:.0f} s", text)
    path = folder / f"{check.name}.json"
    if not path.exists():
        last = (text.strip().splitlines() or ["it said nothing"])[-1]
        return CheckResult(check.name, CheckStatus.FAILED, "", took, f"the check itself failed: {last}", text)
    result = msgspec.json.decode(path.read_bytes(), type=CheckResult)
    if left_behind and result.status is CheckStatus.OK:
        cause = f"{left_behind} processes were left running"
        return msgspec.structs.replace(result, status=CheckStatus.FAILED, cause=cause, seconds=took)
    return msgspec.structs.replace(result, seconds=took)
