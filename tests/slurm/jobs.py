"""Jobs on the Slurm of a test: submitted as a user would, and looked at through Slurm and through their records."""

import json
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.process.elastic import HURRY
from tests.process.launching import Site, site
from tests.process.training import SCRIPTS
from tests.slurm.rig import SlurmCluster

from regrow.observe.ledger import Ledger, read_records

DEFAULTS: dict[str, Any] = {
    "name": "job",
    "replicaCount": 2,
    "scaleUpSnoozeTimeInSeconds": 0,
    "gracefulShutdownTimeoutInSeconds": 10,
    "pollInSeconds": 1,
    "leaseInSeconds": 8,
    "runFlags": ["--data-cache=off"],
}
ENDS = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"}
PARTITIONS = {"gang": "train", "elastic": "spot"}


class SubmittedJob:
    """One job of a test.

    Args:
        cluster: where it runs.
        here: its folder, which all nodes have.
    """

    def __init__(self, cluster: SlurmCluster, here: Site) -> None:
        self.cluster, self.here = cluster, here
        self.submitted_at = 0.0
        before = cluster.ask("squeue", "-h", "-t", "all", "-o", "%i").split()
        self._before = max((int(number) for number in before), default=0)
        self._options = ["--exclusive"]
        self.partitions = dict(PARTITIONS)

    def limit(self, minutes: str) -> None:
        """Limit the time of its Slurm jobs."""
        self._options.append(f"--time={minutes}")

    def regrow(self, *words: str) -> tuple[int, str]:
        """A command of a user on the login node: its exit code, and all it says."""
        around = {"REGROW_HOME": str(self.here.home), "XDG_RUNTIME_DIR": str(self.here.runtime)}
        done = self.cluster.run(sys.executable, "-m", "regrow", *words, cwd=self.here.folder, **around)
        return done.returncode, done.stdout + done.stderr

    def write(self, steps: int, pace: float, **keys: Any) -> None:
        """The job's file, of the small training in micro-batches."""
        script = [str(SCRIPTS / "train_micro.py"), "--steps", str(steps), "--pace", str(pace), "--invariant"]
        ours = {"script": [*script, "--out", "job.out"], "command": self.cluster.command()}
        table = DEFAULTS | ours | keys
        lines = [f"{key} = {json.dumps(value)}" for key, value in table.items()]
        for part, partition in self.partitions.items():
            lines += [f"[{part}]", f"partition = {json.dumps(partition)}", f"options = {json.dumps(self._options)}"]
        (self.here.folder / "job.toml").write_text("\n".join(lines) + "\n")

    def submit(self, *, steps: int, pace: float = 0.6, **keys: Any) -> int:
        """Submit it; the number of the gang's Slurm job. By its pace it lasts for minutes until it is let go."""
        self.write(steps, pace, **keys)
        self.submitted_at = time.monotonic()
        code, said = self.regrow("slurm", "submit", "job.toml")
        assert code == 0, said
        return int(re.findall(r"Slurm job (\d+)", said)[-1])

    def ledger(self, gang: int) -> Ledger:
        """Ledger of a gang's run."""
        folder = self.here.home / "jobs" / f"job-{gang}"
        return Ledger(read_records(folder)) if folder.is_dir() else Ledger([])

    def until_world(self, gang: int, ranks: int) -> int:
        """Wait until `ranks` ranks train; returns the step."""
        before = max(self.ledger(gang).commits, default=-1)

        def look() -> int | None:
            told = self.ledger(gang)
            if not told.generations or len(told.generations[-1].workers) != ranks:
                return None
            newest = [step for step, done in told.commits.items() if len(done) == ranks and step > before]
            return max(newest, default=None)

        return int(self.cluster.until(look, f"{ranks} ranks train; {self.output()}"))

    def finish(self, gang: int) -> Ledger:
        """Let it train to its end, which its Slurm job has said with 0; nothing of it is in the queue then."""
        (self.here.folder / HURRY).touch()
        self.ended(gang)
        assert self.exit_code(gang) == 0, self.output()
        self.nothing_queued()
        return self.ledger(gang)

    def ended(self, job: int) -> None:
        """Wait until a Slurm job is over."""
        self.cluster.until(lambda: self.state(job) in ENDS or None, f"{job} ends")

    def time_left(self, job: int, seconds: int) -> None:
        """Let Slurm end a running job `seconds` from now, as its time limit would later."""
        self.cluster.ask("scontrol", "update", f"JobId={job}", f"EndTime=now+{seconds}")

    def nothing_queued(self) -> None:
        """No Slurm job of it waits or runs."""
        self.cluster.until(lambda: self.cluster.queue() == {} or None, "the queue is empty")

    def on(self, node: str) -> str:
        """The name of the Slurm job that runs on a node."""
        return self.cluster.ask("squeue", "-h", "-t", "R", "-w", node, "-o", "%j")

    def state(self, job: int) -> str:
        """Of a Slurm job."""
        return self.cluster.ask("squeue", "-h", "-t", "all", "-j", str(job), "-o", "%T")

    def exit_code(self, job: int) -> int:
        """Of a Slurm job that is over."""
        match = re.search(r"\bExitCode=(\d+):", self.cluster.ask("scontrol", "show", "job", str(job)))
        return int(match.group(1)) if match else -1

    def numbers(self, name: str) -> list[int]:
        """Of this test's Slurm jobs of a name, the oldest first."""
        lines = self.cluster.ask("squeue", "-h", "-t", "all", "-o", "%i|%j").splitlines()
        found = sorted(int(line.partition("|")[0]) for line in lines if line.endswith(f"|{name}"))
        return [number for number in found if number > self._before]

    def output(self) -> str:
        """Output of all of its Slurm jobs."""
        files = sorted(self.here.folder.glob("slurm-*.out"))
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')}" for file in files)

    def clear(self) -> None:
        """Sockets and memory of nodes that were lost with all their processes."""
        for left in (*self.here.runtime.iterdir(), *self.here.caches()):
            shutil.rmtree(left, ignore_errors=True)


@contextmanager
def slurm_job(cluster: SlurmCluster, folder: Path) -> Iterator[SubmittedJob]:
    """A job that is gone from the cluster at the end, and a cluster whose nodes are idle again."""
    with site(folder) as here:
        made = SubmittedJob(cluster, here)
        try:
            yield made
        finally:
            cluster.run("scancel", "-u", "root")
            cluster.until(lambda: not cluster.queue() or None, "all Slurm jobs have ended")
            cluster.restore()
        here.assert_no_process_left()
