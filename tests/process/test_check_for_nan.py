"""`--check-for-nan`: a number that is not finite once costs a run of its step; one that repeats ends the job."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.process.launching import Site, site
from tests.process.training import Fault, assert_equal, train


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path) as made:
        yield made
        made.assert_nothing_left()


def test_a_nan_that_comes_once_changes_nothing_and_makes_its_node_suspect(here: Site) -> None:
    undisturbed = train(here, "calm", steps=12)
    for name, how in (("forward", "1:5:once"), ("backward", "2:7:backward")):
        (here.folder / "struck").unlink(missing_ok=True)
        ran = train(here, name, "--check-for-nan", steps=12, extra=("--nan", how))
        rank, step, _ = how.split(":")
        assert_equal(ran, undisturbed, faults=0)
        assert (here.folder / "struck").exists(), "no number was spoilt"
        assert [(each.ranks, each.rung, each.steps_lost) for each in ran.ledger.incidents] == [
            ([int(rank)], "retry", 0)
        ]
        what = "loss is nan" if name == "forward" else "its gradient is not finite as it gives it to allreduce"
        told = f"node0 is suspect: nan slot{rank}: rank {rank}, step {step}: {what}; run again it was finite"
        assert ran.output.count(told) == 1, ran.output


def test_a_nan_that_repeats_ends_the_job_with_rank_step_number_and_samples(here: Site) -> None:
    ran = train(here, "again", "--check-for-nan", steps=12, extra=("--nan", "1:5:always"))
    assert ran.code == 1, ran.output
    assert "rank 1 failed at step 5, the same error twice" in ran.output
    assert ran.output.count("NotFinite: rank 1, step 5: loss is nan") == 1, "told once"
    assert "it read share 1 of 3 of step 5: samples (epoch, index) (0, " in ran.output
    assert max(step for step, _ in ran.losses) == 4
    assert "suspect" not in ran.output


@pytest.mark.full
def test_without_the_flag_it_goes_on_as_under_torchrun(here: Site) -> None:
    ran = train(here, "goes-on", steps=12, extra=("--nan", "1:5:always"))
    assert ran.code == 0, ran.output
    assert ran.ledger.incidents == []
    assert max(step for step, _ in ran.losses) == 11


SHARDED = """
from pathlib import Path
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
import regrow

torch.set_num_threads(1)
session = regrow.init()
model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
for layer in (*model, model):
    fully_shard(layer)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session.protect(model, optimizer)
for step in session.steps([torch.ones(4, 4)] * 8, until=8):
    with step as x:
        loss = model(x).sum()
        if session.rank == 1 and step.number == 3 and not step.rehearsal and not Path("struck").exists():
            Path("struck").touch()
            loss.register_hook(lambda gradient: gradient * torch.nan)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
print("the last loss is", float(loss), flush=True)
"""


@pytest.mark.full
def test_where_the_weights_are_sharded_the_rank_that_gave_the_gradient_is_named(here: Site) -> None:
    done = here.regrow("run", "--job", "shards", "--nproc-per-node", "2", "--check-for-nan", here.script(SHARDED))
    assert done.returncode == 0, done.stderr
    told = "nan slot1: rank 1, step 3: its gradient is not finite as it gives it to"
    assert done.stderr.count(told) == 1, done.stderr
    assert done.stdout.count("the last loss is") == 2 and "nan" not in done.stdout, done.stdout


MICRO = """
from pathlib import Path
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import regrow

torch.set_num_threads(1)
session = regrow.init()
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session.protect(model, optimizer)
data = torch.utils.data.DataLoader(torch.ones(64, 4), batch_size=2)
for step in session.steps(data, until=8, microbatches=4):
    with step as micros:
        for micro in micros:
            loss = model(micro.batch).sum()
            if micro.index == 3 and step.number == 3 and not step.rehearsal and not Path("struck").exists():
                Path("struck").touch()
                loss = loss * torch.nan
            micro.log(loss=loss)
            micro.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.full
def test_of_micro_batches_the_one_is_named(here: Site) -> None:
    done = here.regrow("run", "--job", "micro", "--nproc-per-node", "2", "--check-for-nan", here.script(MICRO))
    assert done.returncode == 0, done.stderr
    told = "nan slot1: rank 1, step 3: loss of micro-batch 3 is nan; run again it was finite"
    assert done.stderr.count(told) == 1, done.stderr


@pytest.mark.full
def test_kills_are_mended_as_without_it(here: Site) -> None:
    undisturbed = train(here, "calm", steps=16)
    stages = ("forward", "backward", "reduce", "update", "commit")
    faults = [Fault(at % 3, 3 + 2 * at, stage) for at, stage in enumerate(stages)]
    ran = train(here, "struck", "--check-for-nan", "--standby", "1", steps=16, faults=faults)
    assert_equal(ran, undisturbed, faults=len(faults))
    assert {each.kind for each in ran.ledger.incidents} == {"exit"}


SCALED = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import regrow

torch.set_num_threads(1)
session = regrow.init()
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
session.protect(model, optimizer, scaler)
skipped = 0
for step in session.steps([torch.ones(4, 4)] * 12, until=12):
    with step as x:
        loss = model(x).square().sum() + 7.0
        step.log(loss=loss)
        before = scaler.get_scale()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        less = scaler.get_scale() < before
    skipped += less
print("skipped", skipped, "of 12", flush=True)
"""


@pytest.mark.full
def test_overflows_of_a_gradient_scaler_are_no_faults(here: Site) -> None:
    done = here.regrow("run", "--job", "scaled", "--nproc-per-node", "2", "--check-for-nan", here.script(SCALED))
    assert done.returncode == 0, done.stderr
    assert "skipped" in done.stdout and "skipped 0 of 12" not in done.stdout, done.stdout
    assert "NotFinite" not in done.stderr and "suspect" not in done.stderr
