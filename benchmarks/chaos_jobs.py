"""The jobs of `chaos.py`: a job on hosts of its own, under regrow or torchrun, and its committed steps."""

import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.process.network import Network

from regrow.core.records import StepCommitted
from regrow.launch.folder import read_entry
from regrow.observe.tail import RecordTail

HERE = Path(__file__).resolve().parent
HOSTS, RANKS_A_HOST = 4, 2
WORLD = (HOSTS - 1) * RANKS_A_HOST
PACE = 0.15
"""Duration of a step's sleep, in seconds."""
HANG_S, LEASE_S = 1.0, 1.0
"""Regrow's time limits for such short steps: about five steps."""
PORT = 29400


def data_folders() -> set[str]:
    """The folders of data caches in shared memory, of all jobs on this machine."""
    return {str(folder) for folder in Path("/dev/shm").glob("regrow-data-*")}


class Stuck(Exception):
    """The job did not recover after a fault, or did not start."""


@dataclass
class Progress:
    """Committed steps of a job, from its records."""

    tail: RecordTail
    first: dict[int, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    """Time of a rank's first commit of a step, by step and rank."""
    losses: dict[tuple[int, int], set[float]] = field(default_factory=lambda: defaultdict(set))
    pids: dict[int, int] = field(default_factory=dict)
    newest: int = -1
    """The newest step that every rank has committed."""
    redone: set[int] = field(default_factory=set)
    """Steps that a rank computed again after it had committed them."""

    def look(self) -> None:
        """Read new records."""
        for line in self.tail.poll():
            if not isinstance(line, StepCommitted):
                continue
            if line.rank in self.first[line.step] and not line.adopted:
                self.redone.add(line.step)
            self.first[line.step].setdefault(line.rank, line.at)
            if not line.adopted:  # else the worker received the state of that step from a peer
                self.losses[line.step, line.rank].add(line.metrics["loss"])
                self.pids[line.rank] = int(line.metrics["pid"])
        # A host's last commit may not have been written: only its ranks' lines of that step are missing.
        whole = (step for step in range(max(self.first, default=-1), self.newest, -1) if self.whole(step))
        self.newest = next(whole, self.newest)

    def whole(self, step: int) -> bool:
        """True if every rank's commit is known."""
        return len(self.first.get(step, ())) == WORLD

    def at(self, step: int) -> float:
        """Time at which every rank had committed a whole step."""
        return max(self.first[step].values())


class Job:
    """A job on hosts of its own, which ends with the block."""

    def __init__(self, side: str, name: str, folder: Path, steps: int) -> None:
        self.side, self.name, self.steps = side, name, steps
        self.folder = folder / f"{side}-{name}"
        self.records = self.folder / "jobs" / name if side == "regrow" else self.folder
        self.progress = Progress(RecordTail(self.records))
        self.network = Network(HOSTS, far=True)
        self._launchers: dict[int, subprocess.Popen[bytes]] = {}
        self._log = folder / f"{side}-{name}.log"

    def __enter__(self) -> Self:
        self.folder.mkdir()
        self.network.open()
        # Without a spare: if a host returns while there is one, torchrun's agents restart all workers again and again.
        for host in range(HOSTS if self.side == "regrow" else HOSTS - 1):
            self.start(host)
        return self

    def __exit__(self, *exception: object) -> None:
        self.network.close()
        for process in self._launchers.values():
            process.wait(30)

    def start(self, host: int) -> None:
        """Start the launcher of a host."""
        address, endpoint = self.network.address(host), f"{self.network.address(0)}:{PORT}"
        if self.side == "regrow":
            words = ["regrow", "run", f"--job={self.name}", f"--nnodes={HOSTS}", "--spares=1", f"--node-rank={host}"]
            words += [f"--rdzv-endpoint={endpoint}", f"--bind={address}"]
            words += ["--standby=1", "--warmth=built", "--max-faults=100000", f"--hang-timeout={HANG_S:g}"]
            words += [f"--node-lease={LEASE_S:g}"]
        else:
            words = ["torch.distributed.run", f"--nnodes={HOSTS - 1}", f"--rdzv-id={self.name}", "--rdzv-backend=c10d"]
            words += [f"--rdzv-endpoint={endpoint}", f"--rdzv-conf=is_host={host == 0}"]
            words += ["--max-restarts=100000", f"--local-addr={address}"]
        words += [f"--nproc-per-node={RANKS_A_HOST}", str(HERE / "chaos_training.py"), f"--side={self.side}"]
        self._launch(host, *words, f"--steps={self.steps}", f"--pace={PACE}", f"--records={self.folder}")

    def _launch(self, host: int, *words: str) -> None:
        around = {"REGROW_HOME": str(self.folder), "REGROW_TOKEN": self.name, "OMP_NUM_THREADS": "1"}
        around |= {"GLOO_SOCKET_IFNAME": "eth0", "XDG_RUNTIME_DIR": str(self.folder), "REGROW_NO_HEALTH": "1"}
        # Without this variable torchrun's restarts sometimes hang or die, which would count against it.
        around |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        command = ["ip", "netns", "exec", self.network.name(host), sys.executable, "-m", *words]
        with self._log.open("ab") as log:
            self._launchers[host] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **around}
            )

    def restart(self) -> None:
        """Restart the ended launchers."""
        if self.ended:
            return
        for host, launcher in self._launchers.items():
            if launcher.poll() is None:
                continue
            if self.side == "regrow" and (self.elected or host == 0):
                address = f"{self.network.address(self.coordinator)}:{self._office()[1]}"
                words = [f"--join={address}", f"--slots={RANKS_A_HOST}", "--wait=60s"]
                self._launch(host, "regrow", "agent", *words, f"--bind={self.network.address(host)}")
            else:
                self.start(host)

    def _office(self) -> tuple[str, str]:
        """Address of the coordinator: host and port."""
        entry = read_entry(self.records)
        host, _, port = (entry.address if entry else f"{self.network.address(0)}:{PORT}").rpartition(":")
        return host, port

    @property
    def coordinator(self) -> int:
        """The host of the job's coordinator, or of torchrun's store."""
        at = self._office()[0] if self.side == "regrow" else self.network.address(0)
        return next(host for host in range(HOSTS) if self.network.address(host) == at)

    @property
    def elected(self) -> bool:
        """True if the coordinator has been replaced."""
        return self.side == "regrow" and self._office() != (self.network.address(0), str(PORT))

    @property
    def ended(self) -> bool:
        """True if the digest is written."""
        return (self.folder / "digest").exists()

    @property
    def digest(self) -> str:
        """Digest of the final state."""
        return (self.folder / "digest").read_text()

    def left_behind(self, within: float) -> list[str]:
        """Processes of the job that still run `within` seconds after its last step."""
        deadline = time.monotonic() + within
        while (alive := [pid for host in range(HOSTS) for pid in self.network.processes(host)]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.2)
        return [f"process {pid} of {self.name}" for pid in alive]

    def wait(self, step: int, seconds: float, *beside: Callable[[], object]) -> None:
        """Wait until every rank has committed a step. Raises `Stuck`."""
        deadline = time.monotonic() + seconds
        while self.progress.newest < step:
            self.progress.look()
            for each in beside:
                each()
            if time.monotonic() > deadline:
                raise Stuck(f"{self.side} {self.name}: step {step} was not reached in {seconds:.0f} s; see {self._log}")
            time.sleep(0.05)

    def host_of(self, rank: int) -> int:
        """Present host of a rank."""
        pid = self.progress.pids[rank]
        return next(host for host in range(HOSTS) if pid in self.network.processes(host))

    def launcher(self, host: int) -> int:
        """Process id of a host's launcher."""
        return self._launchers[host].pid

    def agent(self, host: int) -> int:
        """Process id of a host's agent; torchrun's launcher is its own agent."""
        if self.side == "torchrun":
            return self.launcher(host)
        children = psutil.Process(self.launcher(host)).children()
        return next(int(child.pid) for child in children if "regrow.agent" in child.cmdline())
