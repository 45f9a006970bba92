"""Jobs whose world size changes, and the cost of a change from their records: the parts of `elastic.py`.

*Pause* has one definition for all sides: the time from the last step committed before a change to the first one after
it, minus a median step of the new world: the time that the remaining ranks have lost.
"""

import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import IO

import psutil
from contest import START_DEADLINE, STOP_DEADLINE, Job, JobStuck

from regrow.core.ids import Generation, Rank, Seconds, StepNo
from regrow.core.records import IncidentClosed, StepCommitted
from regrow.launch.folder import read_entry
from regrow.launch.remote import CoordinatorClient
from regrow.membership.server.requests import ScaleRequest
from regrow.observe.ledger import Ledger

HERE = Path(__file__).resolve().parent
ENDLESS = 1_000_000
CHANGE_DEADLINE: Seconds = 120.0
_UNSETTLED, _SETTLED = 2, 8
"""Range of steps of a world for its median step: later ones may run beside newcomers that build."""


class Resizable(Job):
    """A job in which only rank 0 exists throughout."""

    @property
    def world_step(self) -> int:
        """The newest step that rank 0 has committed."""
        return max((step for step, ranks in self.ledger.commits.items() if Rank(0) in ranks), default=-1)

    @property
    def ranks(self) -> Sequence[int]:
        """Ranks with a recent commit; all of them still exist, since each change is waited for."""
        newest = self.world_step
        recent = (self.ledger.commits.get(StepNo(step), {}) for step in (newest, newest - 1))
        return sorted(set().union(*recent))


class RegrowJob(Resizable):
    """`elastic_regrow.py` under `regrow run`.

    Args:
        folder: for records and output.
        name: of the job.
        words: arguments of the script.
        start: initial replicas.
        most: maximum of replicas.
    """

    def __init__(self, folder: Path, name: str, words: Sequence[str], *, start: int, most: int) -> None:
        command = [sys.executable, "-m", "regrow", "run", "--standalone", f"--nproc-per-node={start}"]
        command += ["--hang-timeout=10min", f"--job={name}", "--quiet"]
        command += [f"--replicas=1:{most}"] if most > start else []
        command += [str(HERE / "elastic_regrow.py"), *words, f"--steps={ENDLESS}"]
        environment = {"OMP_NUM_THREADS": "1", "REGROW_HOME": str(folder)}
        self._folder = folder / "jobs" / name
        log = folder / f"{name}.log"
        super().__init__(name, command, records=self._folder, log=log, world=start, environment=environment)

    def resize(self, replicas: int) -> IncidentClosed:
        """Change the world size and wait until every rank has continued in it. Raises `JobStuck`."""
        entry = read_entry(self._folder)
        if entry is None:
            raise JobStuck(f"{self.name}: {self._folder} has no description of the job")
        self.look()
        before = len(self.ledger.incidents)
        scaling = ScaleRequest(replicas=replicas, reason="the benchmark asks for it")
        CoordinatorClient(entry.address, entry.token).scale(scaling)

        def closed() -> bool:
            return any(incident.after == replicas for incident in self.ledger.incidents[before:])

        self.wait(closed, deadline=CHANGE_DEADLINE, what=f"world of {replicas} replicas")
        return next(each for each in self.ledger.incidents[before:] if each.after == replicas)


class TorchrunJob(Resizable):
    """`elastic_torchrun.py` under `torchrun --nnodes 1:2`, two workers an agent; the second one comes and goes."""

    def __init__(self, folder: Path, name: str, *, port: int, checkpoint_every: int, microbatches: int) -> None:
        records = folder / name
        records.mkdir()
        # The last option limits the wait of a rendezvous for more nodes than it needs: by default 30 s.
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=2"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", f"--rdzv-id={name}"]
        command += ["--rdzv-conf=last_call_timeout=1", "--max-restarts=1000", "--monitor-interval=0.1"]
        command += [str(HERE / "elastic_torchrun.py"), f"--steps={ENDLESS}", f"--dir={records}"]
        command += [f"--checkpoint-every={checkpoint_every}", f"--microbatches={microbatches}"]
        environment = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        log = folder / f"{name}.log"
        super().__init__(name, command, records=records, log=log, world=2, environment=environment)
        self._second: subprocess.Popen[bytes] | None = None
        self._second_log = folder / f"{name}-second.log"

    def __exit__(self, *exception: object) -> None:
        if self._second is not None:
            self._end_second()
        super().__exit__(*exception)

    def join(self) -> None:
        """Start the second agent and wait until all four workers have passed the last step. Raises `JobStuck`."""
        with self._second_log.open("wb") as log:
            self._second = self._start_second(log)
        self._wait_change(4)

    def leave(self) -> None:
        """End the second agent as a scheduler does, by SIGTERM, and wait for the other two. Raises `JobStuck`."""
        self._end_second()
        self._wait_change(2)

    def _start_second(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=self._environment
        )

    def _end_second(self) -> None:
        agent, self._second = self._second, None
        if agent is None:
            return
        workers: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            workers = psutil.Process(agent.pid).children(recursive=True)
        for sign in (signal.SIGTERM, signal.SIGKILL):
            if agent.poll() is None:
                agent.send_signal(sign)
                with suppress(subprocess.TimeoutExpired):
                    agent.wait(STOP_DEADLINE)
        for worker in workers:
            with suppress(psutil.NoSuchProcess):
                worker.kill()

    def _wait_change(self, world: int) -> None:
        changes = len(changes_of(self.ledger))

        def changed() -> bool:
            found = changes_of(self.ledger)
            return len(found) > changes and found[-1].after == world

        self.wait(changed, deadline=CHANGE_DEADLINE, what=f"world of {world} workers")


@dataclass(frozen=True)
class Change:
    """One change of the world size, in seconds. `pause`: see above; `step`: a median step after it.

    `redone`: steps that had been committed and were computed again.
    """

    before: int
    after: int
    pause: Seconds
    step: Seconds
    redone: int = 0
    record: IncidentClosed | None = None
    """The job's own account, where it has one."""
    still: Seconds = 0.0
    """Time in which rank 0 had no step under way."""

    @property
    def told(self) -> Seconds:
        """The pause by the job's own record, which ends with the first step, less a median step."""
        return self.record.total - self.step if self.record is not None else self.pause


def changes_of(ledger: Ledger) -> list[Change]:
    """Changes of a job whose generations are sizes, after which every rank has passed the last step."""
    worlds: list[tuple[int, dict[StepNo, list[float]]]] = []
    for commit in _commits(ledger):
        if not worlds or worlds[-1][0] != commit.generation:
            worlds.append((commit.generation, {}))
        worlds[-1][1].setdefault(commit.step, []).append(commit.at)
    found = []
    for (before, old), (after, new) in pairwise(worlds):
        done = {step: max(times) for step, times in old.items() if len(times) == before}
        again = {step: max(times) for step, times in new.items() if len(times) == after}
        last = max(done, default=StepNo(-1))
        beyond = [at for step, at in again.items() if step > last]
        if done and beyond:
            step = _median_gap(sorted(again.values()))
            redone = sum(step <= last for step in again)
            found.append(Change(before, after, min(beyond) - done[last] - step, step, redone))
    return found


def changes_told(ledger: Ledger) -> list[Change]:
    """Changes of a job that records them: each incident that changed the size, with the commits of rank 0."""
    own = [commit for commit in _commits(ledger) if commit.rank == 0]
    found = []
    for incident in ledger.incidents:
        earlier = [commit.at for commit in own if commit.generation < incident.generation]
        later = [commit for commit in own if commit.generation == incident.generation]
        if incident.before != incident.after and earlier and later:
            step = _median_gap([commit.at for commit in later])
            gap = later[0].at - earlier[-1]
            still = max(0.0, gap - later[0].seconds)
            sizes = (incident.before, incident.after)
            found.append(Change(*sizes, gap - step, step, incident.steps_lost, incident, still))
    return found


def _commits(ledger: Ledger) -> list[StepCommitted]:
    computed = [commit for history in ledger.history.values() for commit in history if not commit.adopted]
    return sorted(computed, key=lambda commit: commit.at)


def _median_gap(times: Sequence[float]) -> Seconds:
    gaps = [after - before for before, after in pairwise(times)]
    return median(gaps[_UNSETTLED:_SETTLED] or gaps or [0.0])


def rates_by_world(ledger: Ledger) -> dict[int, float]:
    """Median tokens a second of all ranks together, for each world size that lasted long enough."""
    tokens: dict[tuple[Generation, StepNo], list[float]] = {}
    times: dict[Generation, list[float]] = {}
    for commit in _commits(ledger):
        tokens.setdefault((commit.generation, commit.step), []).append(commit.metrics["tokens"])
        if commit.rank == 0:
            times.setdefault(commit.generation, []).append(commit.at)
    rates: dict[int, float] = {}
    for generation, each in times.items():
        counts = [per_rank for (of, _), per_rank in tokens.items() if of == generation]
        world = max(map(len, counts))
        whole = [sum(per_rank) for per_rank in counts if len(per_rank) == world]
        if len(each) > _UNSETTLED + 3:
            rates[world] = median(whole) / _median_gap(each)
    return rates


def turns(ledger: Ledger, block: int) -> tuple[list[float], list[float]]:
    """Median step of each block in the default and in world-invariant mode; a block's first step is left out."""
    own = [commit for commit in _commits(ledger) if commit.rank == 0]
    gaps: dict[int, list[float]] = {}
    for before, commit in pairwise(own):
        if commit.step == before.step + 1 and commit.step % block:
            gaps.setdefault(commit.step // block, []).append(commit.at - before.at)
    whole = [median(gaps[at]) for at in sorted(gaps) if len(gaps[at]) == block - 1]
    return whole[0::2], whole[1::2]


def extra_memory(ledger: Ledger, block: int) -> float:
    """Largest increase of a rank's peak memory, in bytes, by the first block in world-invariant mode."""
    at_start, at_end = StepNo(block), StepNo(2 * block)
    ranks = ledger.commits[at_end].keys() & ledger.commits[at_start].keys()
    peaks = [[ledger.commits[step][rank].metrics["peak"] for step in (at_start, at_end)] for rank in ranks]
    return max(after - before for before, after in peaks)


def wait_warm(job: Resizable, *, step: int = 5) -> None:
    """Wait until the job trains at its usual speed. Raises `JobStuck`."""
    job.wait(lambda: job.world_step >= step, deadline=START_DEADLINE, what=f"step {step}")


def free_port() -> int:
    """A free port."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])
