"""Pauses are waited for, and true hangs are found: launcher, agent, ranks and the reader of the output."""

import os
import signal
import time

import psutil
from tests.process.launching import PATIENCE, Running, Site, agents_below
from tests.process.training import SCRIPTS, Fault

from regrow.core.records import WorkerForked
from regrow.observe.ledger import Ledger, read_records

LEASE = 10.0
"""Lease of agents on other machines; a pause must be longer to show that those of this one need none."""
TALKATIVE = """
import runpy, sys
sys.path.insert(0, {folder!r})
import torch
forward = torch.nn.Linear.forward
def talk(self, given):
    print("x" * 20_000, flush=True)
    return forward(self, given)
torch.nn.Linear.forward = talk
sys.argv[0] = {script!r}
runpy.run_path({script!r}, run_name="__main__")
"""
SLOW = """
import sys, time
import torch
import regrow

session = regrow.init(seed=3)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4), init_sync=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.protect(model, optimizer)
long = float(sys.argv[1])

@regrow.restartable
def evaluate():
    time.sleep(long)
    torch.distributed.barrier()

for step in session.steps([torch.full((1, 4), float(n)) for n in range(400)], until=370):
    with step as batch:
        if step.rehearsal or step.number == 120:
            time.sleep(long)
        if step.number == 180 and session.rank == 1:
            until = time.monotonic() + long
            while time.monotonic() < until:
                pass
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if not step.rehearsal and step.number in (60, 300) and session.rank == 0:
        time.sleep(long)
    if step.number == 360 and not step.rehearsal:
        evaluate()
print("done", session.digest())
"""
HANGS = """
import ctypes, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import regrow

session = regrow.init(seed=3)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4), init_sync=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.protect(model, optimizer)
ways = sys.argv[2].split(",")

def once(number, kind):
    way = ways[number // 3 - 1] if number % 3 == 0 and 0 < number // 3 <= len(ways) else ""
    mark = Path(sys.argv[1]) / f"hung-{number}"
    if way == kind and session.rank == 1 and not mark.exists():
        mark.touch()
        return True
    return False

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 600
    def __getitem__(self, index):
        if once(session_step[0], "loader"):
            time.sleep(1000)
        return torch.full((4,), float(index))

session_step = [-1]
class Loader:
    batch_size = None
    def __init__(self):
        self.data = Numbers()
    def __iter__(self):
        for index in range(600):
            session_step[0] = index
            yield self.data[index]

for step in session.steps(Loader(), until=3 * len(ways) + 3):
    with step as batch:
        if not step.rehearsal:
            if once(step.number, "python"):
                while True:
                    time.sleep(0.1)
            if once(step.number, "gil"):
                lock, libc = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
                libc.pthread_mutex_lock(lock)
                libc.pthread_mutex_lock(lock)  # unlike a sleep, it goes on when a signal asks for stacks
            if once(step.number, "collective"):
                dist.recv(torch.zeros(1), src=0)
        model(batch.reshape(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
print("done", session.digest())
"""


def of_job(here: Site, name: str) -> Ledger:
    return Ledger(read_records(here.home / "jobs" / name))


def agent_of(job: Running) -> int:
    (agent,) = agents_below(job)
    return agent


def ranks_of(here: Site, name: str) -> list[int]:
    forked = [line for line in read_records(here.home / "jobs" / name) if isinstance(line, WorkerForked)]
    return [line.pid for line in forked if psutil.pid_exists(line.pid)]


def test_launcher_and_agent_paused_while_nobody_reads_the_output_cost_nothing_but_the_pause(here: Site) -> None:
    script = here.script(TALKATIVE.format(folder=str(SCRIPTS), script=str(SCRIPTS / "train_small.py")))
    words = (
        "--nproc-per-node",
        "2",
        script,
        "--steps",
        "60",
        "--pace",
        "0.2",
        "--out",
        str(here.folder / "talk.out"),
    )
    with here.start("run", "--job", "paused", *words) as job:
        ledger, deadline = of_job(here, "paused"), time.monotonic() + PATIENCE
        while len(ledger.commits) < 5:
            assert time.monotonic() < deadline
            time.sleep(0.1)
            ledger = of_job(here, "paused") if (here.home / "jobs" / "paused").exists() else ledger
        agent = agent_of(job)
        for pid in (job.process.pid, agent):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(LEASE + 2.0)
        for pid in (agent, job.process.pid):
            os.kill(pid, signal.SIGCONT)
        for pid in ranks_of(here, "paused"):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(2.0)
        for pid in ranks_of(here, "paused"):
            os.kill(pid, signal.SIGCONT)
        assert len(of_job(here, "paused").commits) < 60, "nobody was there to be paused"
        (here.folder / "hurry").touch()
        deadline = time.monotonic() + PATIENCE
        while len(of_job(here, "paused").commits) < 60:
            assert time.monotonic() < deadline, "output that nobody reads has stopped a worker"
            time.sleep(0.2)
        assert job.wait() == 0, job.output[-2000:]
    assert of_job(here, "paused").incidents == []
    assert (here.home / "jobs" / "paused" / "logs" / "rank1.log").stat().st_size > 60 * 20_000


def test_who_truly_hangs_is_found_and_replaced_within_its_bound(here: Site) -> None:
    ways = "python,gil,collective,loader"
    script = here.script(HANGS)
    done = here.regrow(
        "run", "--job", "hangs", "--nproc-per-node", "3", "--hang-timeout", "3s", script, str(here.folder), ways
    )
    assert done.returncode == 0, done.stdout + done.stderr
    digests = {line.split("done ")[1] for line in done.stdout.splitlines() if "done " in line}
    assert len(digests) == 1, done.stdout
    incidents = of_job(here, "hangs").incidents
    assert [(incident.kind, incident.step, incident.ranks) for incident in incidents] == [
        ("hang", 3 * (at + 1), [1]) for at in range(4)
    ]
    assert all(incident.detect < 12.0 for incident in incidents), [incident.detect for incident in incidents]


def test_who_is_only_slow_is_waited_for_across_nodes(here: Site) -> None:
    """The rehearsal, a body, a busy body, a pause between steps, one during a fault, an evaluation: all too long.

    They lie further apart than steps are remembered, so that none of them is waited for because of the one before.
    """
    plan = here.folder / "plan.toml"
    plan.write_text(Fault(1, 301, "forward").toml())
    words = ["run", "--job", "slow", "--local-nodes", "2", "--nproc-per-node", "1", "--fault-plan", str(plan)]
    done = here.regrow(*words, here.script(SLOW), "3", REGROW_HANG_FLOOR="1500ms")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len({line.split("done ")[1] for line in done.stdout.splitlines() if "done " in line}) == 1, done.stdout
    (incident,) = of_job(here, "slow").incidents
    assert (incident.kind, incident.ranks, incident.faults, incident.rung) == ("exit", [1], 1, "fork"), done.stderr
