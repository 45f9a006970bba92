"""The surroundings of a check: its folder, ranks and nodes, and its jobs of `regrow run`, each with a deadline."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from regrow.core.ids import Seconds
from regrow.drill.judging import Blow, JobRun, judge_alone
from regrow.drill.verdict import CheckStatus, Judgement
from regrow.launch.processes import end
from regrow.observe.ledger import Ledger, read_records

SCRIPTS: Final = Path(__file__).parent / "scripts"
MARGIN: Final[Seconds] = 10.0
"""Part of a check's time that is reserved for ending a job."""
GLANCE: Final[Seconds] = 0.02
_LAST_BYTES = 2000


class DrillSettings(msgspec.Struct, frozen=True):
    """Settings of a session, for its checks.

    Attributes:
        folder: folder of this session on this node; checks write only to it.
        scripts: folder of the training scripts.
        ranks: ranks per node.
        endpoint: address of node 0, `HOST:PORT`, with several nodes; each job uses a port of its own.
        bind: address on which this node listens, with several nodes, and measures the network; empty: loopback.
        state_gb: size of a node's training state, in 10^9 bytes.
    """

    folder: str
    scripts: str = str(SCRIPTS)
    ranks: int = 4
    nodes: int = 1
    node_rank: int = 0
    endpoint: str = ""
    bind: str = ""
    state_gb: float = 10.0

    @property
    def leads(self) -> bool:
        """True on the node that has the coordinator's records."""
        return self.node_rank == 0

    @property
    def world(self) -> int:
        """Number of ranks on all nodes."""
        return self.ranks * self.nodes


class Ground:
    """The surroundings of one check.

    Args:
        settings: settings of the session.
        check: name of the check.
        first_port: offset of its first job's port from the endpoint's.
        until: deadline of the check, by the monotonic clock.
        jobs_home: parent folder of the jobs' records.
    """

    def __init__(
        self, settings: DrillSettings, check: str, *, first_port: int, until: Seconds, jobs_home: Path
    ) -> None:
        self.settings = settings
        self.until = until
        self._check, self._port, self._jobs_home = check, first_port, jobs_home
        self.folder = Path(settings.folder) / check
        self.folder.mkdir(parents=True, exist_ok=True)
        self.output = ""
        """The last output of the newest job, or of a plain training beside it."""

    def script(self, name: str) -> str:
        """Path of a training script."""
        return str(Path(self.settings.scripts) / name)

    def left(self) -> Seconds:
        """Seconds left for this check."""
        return self.until - time.monotonic()

    @contextmanager
    def job(
        self, name: str, flags: Sequence[str], script: Sequence[str], *, here: bool = False
    ) -> Iterator["subprocess.Popen[bytes]"]:
        """Context in which a job runs in this check's folder; it is ended afterwards. `here`: on this node only."""
        command = [sys.executable, "-m", "regrow", "run", f"--job={name}", "--quiet", "--redirects=3", "--no-health"]
        command += [*([] if here else self._where()), *flags, *script]
        with self._log(name).open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=self.folder
            )
        try:
            yield process
        finally:
            end(process)
            self.keep_output(self._log(name))

    def keep_output(self, log: Path) -> None:
        """Keep the end of a log file as `output`."""
        self.output = log.read_text(encoding="utf-8", errors="replace")[-_LAST_BYTES:]

    def run(
        self,
        name: str,
        flags: Sequence[str],
        script: Sequence[str],
        *,
        meanwhile: Callable[[Callable[[], bool]], None] | None = None,
    ) -> JobRun:
        """Run a job to its end, or to the end of this check's time.

        Args:
            name: name of the job.
            flags: flags of `regrow run`.
            script: the script and its arguments.
            meanwhile: called while the job runs, with a function that returns True while the job runs and time is left.
        """
        began = time.monotonic()
        until = self.until - MARGIN

        def runs() -> bool:
            return process.poll() is None and time.monotonic() < until

        with self.job(name, flags, script) as process:
            if meanwhile is not None:
                meanwhile(runs)
            try:
                code: int | None = process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = None
        return JobRun(code, self.ledger(name), self.output, time.monotonic() - began)

    def ledger(self, name: str) -> Ledger:
        """Records of a job on this node."""
        return Ledger(read_records(self._jobs_home / name))

    def train(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        steps: int,
        flags: Sequence[str] = (),
        blows: Sequence[Blow] = (),
        meanwhile: Callable[[Callable[[], bool]], None] | None = None,
    ) -> JobRun:
        """Run `training.py` with these arguments and these planned faults.

        Each step logs the digest of the state with which it begins, as in a trial.
        """
        more = [f"--nproc-per-node={self.settings.ranks}", *flags]  # if a flag is given twice, the last one counts
        if blows:
            plan = self.folder / f"{name}.toml"
            plan.write_text("\n".join(blow.toml() for blow in blows), encoding="utf-8")
            more.append(f"--fault-plan={plan}")
        more.append(f"--trial-steps={steps + 1}")
        script = [self.script("training.py"), f"--steps={steps}", *arguments]
        return self.run(name, more, script, meanwhile=meanwhile)

    def alone(self, mode: str, *, steps: int) -> tuple[JobRun, Judgement]:
        """The undisturbed training of a mode, and its judgement; checks with the same mode and steps share one run."""
        name = f"alone-{mode}-{steps}"
        done = self._jobs_home / name / "drill-ended"
        if done.exists():
            self._port += 1
            return (run := JobRun(0, self.ledger(name), "", 0.0)), judge_alone(run, steps=steps)
        run = self.train(name, [f"--mode={mode}"], steps=steps)
        judged = judge_alone(run, steps=steps)
        if judged.status is CheckStatus.OK:
            done.touch()
        else:
            shutil.rmtree(self._jobs_home / name, ignore_errors=True)
        return run, judged

    def _where(self) -> list[str]:
        if self.settings.nodes == 1:
            return []
        host, _, port = self.settings.endpoint.rpartition(":")
        here = f"--rdzv-endpoint={host}:{int(port) + self._port}"
        self._port += 1
        bind = [f"--bind={self.settings.bind}"] if self.settings.bind else []
        return [f"--nnodes={self.settings.nodes}", f"--node-rank={self.settings.node_rank}", here, *bind]

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"
