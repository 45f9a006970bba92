"""Changes of the world at random with kills between them: nothing leaks, and the data comes in its order."""

import contextlib
import random
import time
from pathlib import Path

import psutil
import pytest
from tests.process.elastic import Elastic
from tests.process.launching import PATIENCE, SHARED, Site, agents_below
from tests.process.test_leaks import settled
from tests.process.training import SCRIPTS, redone

from regrow.membership.view import JobView
from regrow.observe.ledger import Ledger, read_records

CALM = 2
"""Number of replicas whenever something is measured."""
STEPS_A_CHANGE, PACE = 9, "0.3"
SEED = 20


def _words(name: str, nproc: int, steps: int, *flags: str, pace: str = "0") -> list[str]:
    script = [str(SCRIPTS / "train_micro.py"), f"--steps={steps}", f"--pace={pace}", "--invariant", f"--out={name}.out"]
    return ["run", "--job", name, "--nproc-per-node", str(nproc), *flags, *script]


def _losses(here: Site, name: str) -> dict[int, set[float]]:
    commits = Ledger(read_records(here.home / "jobs" / name)).commits
    return {int(step): {commit.metrics["loss"] for commit in ranks.values()} for step, ranks in commits.items()}


def _shared() -> set[Path]:
    """Files in shared memory, without the caches of data, of which each site knows its own."""
    return {path for path in SHARED.iterdir() if not path.name.startswith("regrow-data-")}


def _left_in_memory(seen: set[Path]) -> set[Path]:
    """Files among these that stay unused: tests that run beside this one have files there too."""
    deadline = time.monotonic() + PATIENCE
    while (left := _unused(seen)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _unused(seen: set[Path]) -> set[Path]:
    """Files that no living process has mapped; the job's are all gone by then."""
    inodes: dict[str, Path] = {}
    for path in seen:
        with contextlib.suppress(OSError):
            inodes[str(path.stat().st_ino)] = path
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            for line in maps.read_text(errors="replace").splitlines():
                # A semaphore is mapped under another name than it has now.
                if "/dev/shm/" in line:
                    inodes.pop(line.split()[4], None)
    return set(inodes.values())


def _sizes(draw: random.Random, changes: int, warm: int) -> list[int]:
    """No size twice in a row; `CALM` where something is measured."""
    sizes = [CALM]
    for at in range(1, changes + 1):
        measured, next_measured = at in (warm, changes), at + 1 in (warm, changes)
        choices = [CALM] if measured else [1, 2, 3, 4]
        sizes.append(
            draw.choice([size for size in choices if size != sizes[-1] and not (next_measured and size == CALM)])
        )
    return sizes[1:]


def _strike(job: Elastic, draw: random.Random) -> bool:
    """SIGKILL to a worker of any kind but rank 0, which lives through all of it, some time after a change was asked."""
    time.sleep(draw.uniform(0.0, 0.8))
    now: JobView = job.view()
    targets = [worker for worker in [*now.ranks[1:], *now.candidates] if worker.pid]
    if not targets:
        return False
    job.kill(draw.choice(targets))
    return True


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [20, pytest.param(60, marks=pytest.mark.soak)])
def test_changes_with_kills_between_them_leave_no_trace_and_no_drift(here: Site, count: int) -> None:
    draw = random.Random(SEED)
    shared_before = _shared()
    steps, warm = count * STEPS_A_CHANGE, count // 4
    words = _words("job", CALM, steps, "--replicas", "1:4", "--max-faults", "1000", pace=PACE)
    kills, samples, processes = 0, [], []
    with here.start(*words) as started:
        job = Elastic(here, "job", started)
        first = job.settled(CALM)
        launcher = psutil.Process(started.process.pid)
        (agent,) = agents_below(started)
        pids = {"survivor": first.ranks[0].pid, "agent": agent, "launcher": launcher.pid}
        for at, size in enumerate(_sizes(draw, count, warm), start=1):
            answer = job.scale(size)
            assert answer.accepted, answer.reason
            kills += draw.random() < 0.4 and _strike(job, draw)
            job.settled(size)
            if at in (warm, count):
                job.alone(CALM)
                samples.append(settled(pids))
                processes.append(len(launcher.children(recursive=True)))
        ledger = job.finish(patience=240.0)
    assert kills >= count // 6, "too few kills to tell anything"
    assert redone(ledger) == []
    assert ledger.open_incidents == {}
    assert _left_in_memory(_shared() - shared_before) == set()
    assert processes[1] <= processes[0]
    for name in pids:
        before, after = samples[0][name], samples[1][name]
        assert after.descriptors <= before.descriptors, (name, before, after)
        assert after.threads <= before.threads, (name, before, after)
        assert after.resident <= before.resident * 1.05, (name, before, after)

    proven = here.regrow("data", "verify", "job")
    assert proven.returncode == 0, proven.stdout + proven.stderr
    assert here.regrow(*_words("fixed", 1, steps)).returncode == 0
    assert _losses(here, "job") == _losses(here, "fixed")
