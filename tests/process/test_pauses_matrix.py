"""Whatever is stopped and goes on again, at rest and while a fault is mended, costs its pause and nothing else."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pytest
from tests.process.elastic import Elastic
from tests.process.launching import PATIENCE, Site, agents_below
from tests.process.training import SCRIPTS, assert_equal, outcome_of

from regrow.core.records import WorkerForked
from regrow.observe.ledger import read_records

MODES: dict[str, tuple[int, int, tuple[str, ...], tuple[str, ...]]] = {
    "ddp": (3, 1, (), ("train_small.py",)),
    "fsdp2-copies": (4, 2, ("--buddy-every", "1"), ("train_parallel.py", "--mode", "fsdp2", "--layers", "1")),
    "hsdp": (4, 1, (), ("train_parallel.py", "--mode", "hsdp", "--layers", "1")),
}
"""Mode to ranks, nodes, flags, script."""
WHO = ("one rank", "all ranks but one", "agent", "launcher", "launcher and agent")


@dataclass(frozen=True)
class Stop:
    """One pause: of whom, for how long, and whether a rank is killed just before it."""

    who: str
    seconds: float
    fault: bool = False


def command(here: Site, name: str, mode: str, steps: int, pace: float = 0.0) -> list[str]:
    world, nodes, flags, (script, *more) = MODES[mode]
    words = ["run", "--job", name, "--nproc-per-node", str(world // nodes), "--max-faults", "1000", *flags]
    words += ["--local-nodes", str(nodes)] if nodes > 1 else []
    words += [str(SCRIPTS / script), "--steps", str(steps), "--out", str(here.folder / f"{name}.out"), *more]
    return [*words, "--pace", str(pace)]


@contextlib.contextmanager
def stopped(pids: Iterable[int]) -> Iterator[None]:
    """Not one of these does anything meanwhile."""
    held = list(pids)
    try:
        for pid in held:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in held:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def strike(job: Elastic, world: int, stop: Stop, draw: random.Random) -> int:
    """Stop and continue; who was killed before, or -1."""
    mended(job)
    now = job.settled(world)
    launcher, agents = job.job.process.pid, agents_below(job.job)
    pids = [worker.pid for worker in now.ranks]
    victim = draw.randrange(world)
    others = [pid for rank, pid in enumerate(pids) if rank != victim]
    held = {
        "one rank": [draw.choice(others)],
        "all ranks but one": others,
        "agent": [draw.choice(agents)],
        "launcher": [launcher],
        "launcher and agent": [launcher, *agents],
    }[stop.who]
    if stop.fault:
        os.kill(pids[victim], signal.SIGKILL)
        time.sleep(draw.choice((0.0, 0.0, 0.02, 0.1, 0.3, 0.8)))
    with stopped(held):
        time.sleep(stop.seconds)
    return victim if stop.fault else -1


def mended(job: Elastic) -> None:
    """Wait until no incident is open."""
    deadline = time.monotonic() + PATIENCE
    while job.folder.exists() and job.ledger().open_incidents:
        assert time.monotonic() < deadline, job.job.output
        job.job.drain()
        time.sleep(0.05)


def survives(here: Site, mode: str, stops: list[Stop], draw: random.Random, *, steps: int, pace: float) -> None:
    """One job goes through all of these, one after another."""
    world = MODES[mode][0]
    done = here.regrow(*command(here, "calm", mode, steps))
    calm = outcome_of(here, "calm", world, done.returncode, done.stdout + done.stderr)
    assert calm.code == 0, calm.output
    with here.start(*command(here, "paused", mode, steps, pace)) as started:
        job = Elastic(here, "paused", started)
        killed = [strike(job, world, stop, draw) for stop in stops]
        mended(job)
        job.hurry()
        code = started.wait()
    assert code == 0, started.output
    paused = outcome_of(here, "paused", world, code, started.output)
    victims = [[rank] for rank in killed if rank >= 0]
    assert [incident.ranks for incident in paused.ledger.incidents] == victims, started.output
    forked = [line for line in read_records(job.folder) if isinstance(line, WorkerForked)]
    assert len(forked) == world + len(victims), f"somebody was replaced who was not lost: {started.output}"
    assert_equal(paused, calm, faults=0, lost=1 if mode == "fsdp2-copies" else None)


def test_pauses_at_rest_and_in_a_fault_cost_nothing_but_the_pause(here: Site) -> None:
    stops = [Stop("launcher and agent", 5.0, fault=True), Stop("one rank", 5.0)]
    survives(here, "ddp", stops, random.Random(1), steps=40, pace=0.1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seconds", [5.0, 15.0, 60.0])
@pytest.mark.parametrize("mode", MODES)
def test_whoever_is_stopped_at_any_moment_goes_on(here: Site, mode: str, seconds: float) -> None:
    seed = os.environ.get("REGROW_SOAK_SEED", "1")
    draw = random.Random(f"{mode} {seconds} {seed}")
    stops = [Stop(who, seconds, fault) for who in WHO for fault in (False, True)]
    draw.shuffle(stops)
    survives(here, mode, stops, draw, steps=60 + int(2 * seconds), pace=seconds / 10)
