"""A rank that takes longer than the others for its own part of the steps: it is named, and nobody is ended."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.process.launching import Site, site

from regrow.observe.ledger import Ledger, read_records

SCRIPT = """
import time
from pathlib import Path
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import regrow

torch.set_num_threads(1)
session = regrow.init()
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session.protect(model, optimizer)
for step in session.steps([torch.ones(4, 4)] * 150, until=150):
    with step as x:
        if not step.rehearsal and not Path("done").exists():
            time.sleep(0.35 if session.rank == 1 and not Path("hurry").exists() else 0.08)
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path) as made:
        yield made
        made.assert_nothing_left()


def test_the_rank_that_sleeps_in_its_body_is_the_one_named_once_until_it_recovers(here: Site) -> None:
    words = ("run", "--job", "slow", "--nproc-per-node", "3", "--straggler-steps", "5", here.script(SCRIPT))
    with here.start(*words) as job:
        job.wait_for("node0 is suspect: straggler slot1: rank 1 has taken ")
        (here.folder / "hurry").touch()
        over = "node0 is ok: straggler slot1: rank 1: it is as fast as the others again"
        job.wait_for(over)
        (here.folder / "done").touch()
        assert job.wait() == 0, job.output
    ledger = Ledger(read_records(here.home / "jobs" / "slow"))
    # Steps that do not sleep are so short that a busy machine makes any rank a straggler: what it says then is true.
    assert job.output.partition(over)[0].count("straggler") == 1, job.output
    assert ledger.incidents == [] and ledger.open_incidents == {}


@pytest.mark.full
def test_its_node_is_replaced_at_a_boundary_where_that_was_asked_for(here: Site) -> None:
    nodes = ("--local-nodes", "4", "--spares", "1", "--nproc-per-node", "1")
    words = ("--straggler-steps", "5", "--replace-stragglers", here.script(SCRIPT))
    with here.start("run", "--job", "moved", *nodes, *words) as job:
        job.wait_for("node1 is given back within 30 s: rank 1 is a straggler (--replace-stragglers)")
        (here.folder / "hurry").touch()
        job.wait_for("moved at step")
        (here.folder / "done").touch()
        assert job.wait() == 0, job.output
    ledger = Ledger(read_records(here.home / "jobs" / "moved"))
    assert [(each.kind, each.rung, each.faults, each.steps_lost) for each in ledger.incidents] == [
        ("preempt", "node", 0, 0)
    ]
