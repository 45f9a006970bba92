"""Driving a job whose world changes while it trains: ask for a size, wait for it, kill on the way."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
from tests.process.launching import PATIENCE, Running, Site, site
from tests.process.training import SCRIPTS, redone

from regrow.core.ids import NodeId
from regrow.core.records import IncidentClosed, Record, WorldChanged
from regrow.launch.folder import find_job
from regrow.launch.remote import CoordinatorClient
from regrow.membership.orders import AnswerScale
from regrow.membership.server.requests import DrainRequest, ScaleRequest
from regrow.membership.view import JobView, WorkerView
from regrow.observe.ledger import Ledger, read_records

HURRY = "hurry"
Found = TypeVar("Found")
_LOOK_EVERY = 0.01
"""Seconds, for what may pass."""
_LOOK_AGAIN = 0.05
"""Seconds, for what stays once it is there: to ask a job how it is takes it and this process some of a processor."""


@dataclass
class Elastic:
    """A job that runs, as its operator sees it."""

    site: Site
    name: str
    job: Running

    def __post_init__(self) -> None:
        self._client: CoordinatorClient | None = None

    @property
    def client(self) -> CoordinatorClient:
        """The coordinator, as soon as there is one."""
        if self._client is None:
            entry = self._until(self._entry, "the job is there", _LOOK_AGAIN)
            self._client = CoordinatorClient(entry[0], entry[1])
        return self._client

    def view(self) -> JobView:
        """The job now."""
        return self.client.status()

    def scale(self, replicas: int) -> AnswerScale:
        """Ask for this number of replicas."""
        return self.client.scale(ScaleRequest(replicas=replicas, reason="a test"))

    def drain(self, node: str, grace: float = 20.0) -> None:
        """Give a node back."""
        self.client.drain(DrainRequest(NodeId(node), grace, "a test"))

    def reach(self, replicas: int) -> JobView:
        """Ask for this number of replicas, and wait until they train."""
        answer = self.scale(replicas)
        assert answer.accepted, answer.reason
        return self.settled(replicas)

    def through_changes(self) -> Ledger:
        """From two replicas to four, one and three, of which one is killed; then to the end of the training."""
        self.settled(2)
        for size in (4, 1, 3):
            self.reach(size)
        self.kill(self.worker("member", 2))
        self.settled(3)
        return self.finish()

    def settled(self, replicas: int) -> JobView:
        """Wait until this number of replicas train, a step further, and nothing is open."""
        self._until(lambda: self._trains(replicas), f"{replicas} replicas train", _LOOK_AGAIN)
        step = self.view().step
        settled = self._until(lambda: self._trains(replicas, after=step), f"{replicas} replicas train on", _LOOK_AGAIN)
        # A fault before the last rank has said that it trains on would be the same incident as the change.
        self._until(lambda: self._records().open_incidents == {} or None, "its last incident is closed", _LOOK_AGAIN)
        return settled

    def _records(self) -> Ledger:
        return Ledger(read_records(self.site.home / "jobs" / self.name))

    def _trains(self, replicas: int, after: int = -1) -> JobView | None:
        now = self.view()
        stand = [worker for worker in now.ranks if worker.stage == "member"]
        calm = (
            now.replicas == replicas
            and len(stand) == replicas * now.unit
            and now.phase == "training"
            and now.step > after
        )
        return now if calm else None

    def alone(self, replicas: int) -> None:
        """Wait until nobody is left but the ranks of this number of replicas: leavers and candidates have ended."""
        launcher = psutil.Process(self.job.process.pid)

        def look() -> bool | None:
            pids = {worker.pid for worker in self.view().ranks}
            others = [each for each in launcher.children(recursive=True) if each.pid not in pids]
            return True if len(others) == 2 and len(pids) == replicas else None

        self._until(look, "all but the agent and its zygote have ended", _LOOK_AGAIN)

    def until(self, holds: Callable[[JobView], bool], what: str) -> JobView:
        """Wait for the job to be like this from then on."""

        def look() -> JobView | None:
            return now if holds(now := self.view()) else None

        return self._until(look, what, _LOOK_AGAIN)

    def phase(self, phase: str) -> JobView:
        """Wait for the job to be at this."""

        def look() -> JobView | None:
            return now if (now := self.view()).phase == phase else None

        return self._until(look, f"the job is {phase}")

    def worker(self, stage: str, rank: int | None = None) -> WorkerView:
        """Wait for a worker at a stage of its life."""

        def look() -> WorkerView | None:
            now = self.view()
            found = [
                each for each in [*now.ranks, *now.candidates] if each.stage == stage and rank in (None, each.rank)
            ]
            found = [each for each in found if each.pid]
            return found[0] if found else None

        return self._until(look, f"a worker is {stage}")

    def standby(self, stage: str) -> WorkerView:
        """Wait for a standby that is warm."""

        def look() -> WorkerView | None:
            return next((each for each in self.view().standbys if each.stage == stage), None)

        return self._until(look, f"a standby is {stage}")

    def kill(self, worker: WorkerView) -> None:
        """SIGKILL."""
        with contextlib.suppress(ProcessLookupError):  # it was on its way out
            os.kill(worker.pid, signal.SIGKILL)

    def hurry(self) -> None:
        """Train on without any pause."""
        (self.site.folder / HURRY).touch()

    def finish(self, patience: float = 2 * PATIENCE) -> Ledger:
        """Let it train to its end."""
        self.hurry()
        code = self.job.wait(patience)
        assert code == 0, self.job.output
        return self.ledger()

    def ledger(self) -> Ledger:
        """Ledger of the records until now."""
        return Ledger(read_records(self.folder))

    @property
    def folder(self) -> Path:
        """The job's records."""
        return self.site.home / "jobs" / self.name

    def _entry(self) -> tuple[str, str] | None:
        try:
            entry = find_job(self.site.home / "jobs", self.name)
        except Exception:  # noqa: BLE001 - it is not there yet
            return None
        return entry.address, entry.token

    def _until(self, look: Callable[[], Found | None], what: str, every: float = _LOOK_EVERY) -> Found:
        deadline = time.monotonic() + PATIENCE
        while True:
            self.job.drain()
            found = look()
            if found is not None:
                return found
            assert self.job.process.poll() is None, f"the job ended before {what}: {self.job.output}"
            assert time.monotonic() < deadline, f"not within {PATIENCE} s: {what}; {self.view()}; {self.job.output}"
            time.sleep(every)


def changes(records: list[Record]) -> list[WorldChanged]:
    """Changes of the world."""
    return [each for each in records if isinstance(each, WorldChanged)]


def incidents(ledger: Ledger, kind: str) -> list[IncidentClosed]:
    """Those of a kind."""
    return [each for each in ledger.incidents if each.kind == kind]


def losses(ledger: Ledger) -> dict[int, float]:
    """Step to loss: all ranks that committed it say the same."""
    told = {step: {commit.metrics["loss"] for commit in ranks.values()} for step, ranks in ledger.commits.items()}
    assert {step: each for step, each in told.items() if len(each) != 1} == {}
    return {int(step): each.pop() for step, each in told.items()}


def final(path: Path) -> dict[str, Any]:
    """The state at the end, of one rank."""
    told = json.loads(path.read_text())
    return {"digest": told["digest"], "parameters": told["parameters"]}


def assert_same(here: Site, ledger: Ledger, fixed: dict[str, Any], ranks: int) -> None:
    """Every committed loss, and the final state of every rank, bit by bit; no step was committed twice."""
    assert losses(ledger) == fixed["losses"]
    finals = [final(here.folder / f"job.{rank}.json") for rank in range(ranks)]
    assert finals == [{"digest": fixed["digest"], "parameters": fixed["parameters"]}] * ranks
    assert redone(ledger) == []
    assert ledger.open_incidents == {}
    assert all(incident.steps_lost == 0 for incident in ledger.incidents)


def small(name: str, *flags: str, steps: int, extra: tuple[str, ...] = ("--invariant",)) -> list[str]:
    """`regrow run` of the small training in micro-batches. `extra`: what the script is told."""
    script = [str(SCRIPTS / "train_micro.py"), "--steps", str(steps), "--out", f"{name}.out"]
    return ["run", "--job", name, *flags, *script, *extra]


def fixed_run(folder: Path, steps: int) -> dict[str, Any]:
    """Result of the small training in a world of one replica, in world-invariant mode."""
    with site(folder) as made:
        done = made.regrow(*small("fixed", steps=steps))
        assert done.returncode == 0, done.stdout + done.stderr
        told = losses(Ledger(read_records(made.home / "jobs" / "fixed")))
        return {"losses": told, **final(folder / "fixed.0.json")}
