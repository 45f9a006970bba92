"""A signal that reaches every process of a job at once ends it as one to its launcher does: with the state on disk."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.process.batch import until
from tests.process.launching import Site, agents_below, named, site, still_running

from regrow.core.records import WorkerForked
from regrow.observe.ledger import Ledger, read_records

TRAINED = """
import signal, sys, time
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
import regrow

torch.set_num_threads(1)
if "own" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: print("saves what it has", flush=True))
session = regrow.init()
print("default" if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else "own", flush=True)
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session.protect(model, optimizer)
loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4, shuffle=True, num_workers=0)
for step in session.steps(loader, until=100000):
    with step as (x,):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
    if step.number == 5 and session.is_main:
        print("trains", flush=True)
"""


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path) as made:
        yield made
        made.assert_nothing_left()


@pytest.mark.parametrize(
    ("number", "own", "nodes"),
    [(signal.SIGTERM, "", 1), (signal.SIGTERM, "own", 2), (signal.SIGINT, "", 1), (signal.SIGHUP, "", 1)],
)
def test_every_process_is_told_to_end_and_the_state_is_saved_first(
    here: Site, number: int, own: str, nodes: int
) -> None:
    words = ["--job", "all", "--nproc-per-node", "2", "--local-nodes", str(nodes), "--standby", "1"]
    words += ["--checkpoint-dir", str(here.folder / "disk"), "--shutdown-timeout", "1s"]
    with here.start("run", *words, here.script(TRAINED), *([own] if own else [])) as job:
        job.wait_for("trains\n")
        # Those that the tests' server keeps ready for later have another name.
        for pid in [job.process.pid, *(each for each in here.processes() if named(each).startswith("regrow-"))]:
            os.kill(pid, number)
        assert job.wait() == 75, job.output
    ledger = Ledger(read_records(here.home / "jobs" / "all"))
    assert ("own\n" if own else "default\n") in job.output
    assert bool(own) == ("saves what it has" in job.output)
    assert "started again" not in job.output and "starts from step 0" not in job.output, job.output
    assert ledger.incidents == [] and not ledger.open_incidents, job.output
    saved = [int(folder.name.removeprefix("step-")) for folder in (here.folder / "disk").glob("step-*")]
    assert saved and max(saved) > 5, job.output


def test_a_job_whose_agent_is_stopped_meanwhile_is_saved_as_any_other(here: Site) -> None:
    words = ["--job", "stopped", "--nproc-per-node", "2", "--checkpoint-dir", str(here.folder / "disk")]
    with here.start("run", *words, here.script(TRAINED)) as job:
        job.wait_for("trains\n")
        (agent,) = agents_below(job)
        forked = [each.pid for each in read_records(here.home / "jobs" / "stopped") if isinstance(each, WorkerForked)]
        os.kill(agent, signal.SIGSTOP)
        until(lambda: psutil.Process(agent).status() == psutil.STATUS_STOPPED)
        try:
            for pid in [job.process.pid, agent, *forked]:
                os.kill(pid, signal.SIGTERM)
            assert still_running(forked, seconds=3.0) == forked, "they take it for one to themselves"
        finally:
            os.kill(agent, signal.SIGCONT)
        assert job.wait() == 75, job.output
    saved = [int(folder.name.removeprefix("step-")) for folder in (here.folder / "disk").glob("step-*")]
    assert saved and max(saved) > 5, job.output


def test_a_signal_to_one_worker_alone_does_what_it_always_does(here: Site) -> None:
    with here.start("run", "--job", "one", "--nproc-per-node", "2", here.script(TRAINED)) as job:
        job.wait_for("trains\n")
        forked = [each for each in read_records(here.home / "jobs" / "one") if isinstance(each, WorkerForked)]
        os.kill(next(each.pid for each in forked if each.worker.endswith("w1")), signal.SIGTERM)
        job.wait_for("rank 1 was ended by SIGTERM")
        job.signal(signal.SIGTERM)
        assert job.wait() == 75, job.output
