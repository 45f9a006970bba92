"""A policy by the number of replicas: applied on every rank from the first step in the new world on."""

import pytest
from tests.process.elastic import Elastic
from tests.process.launching import Site

from regrow.core.ids import StepNo

STEPS, RATE = 100, 0.01
SCRIPT = f"""
import time
from pathlib import Path
import torch
import regrow
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

torch.set_num_threads(1)
session = regrow.init(seed=3)
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr={RATE})
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters={STEPS})
session.protect(model, optimizer, schedule)
session.policy(regrow.Policy(learning_rate="linear", settings={{1: {{"beta": 0.1}}, 3: {{"beta": 0.3}}}}))
rates = []
optimizer.register_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
data = TensorDataset(torch.arange(400.0).view(100, 4))
loader = regrow.DataLoader(data, global_batch_size=24, shuffle=True, remainder="wrap")

for step in session.steps(loader, until={STEPS}, microbatches={{1: 6, 2: 12}}):
    with step:
        samples = 0
        for micro in step.microbatches:
            loss = model(micro.batch[0]).square().mean() * 1e-6
            samples += len(micro.batch[0])
            micro.log(loss=loss)
            micro.backward(loss)
        count = step.microbatches.count
        optimizer.step()
        step.log(rate=rates[-1], beta=session.setting("beta"), count=count, samples=samples)
        schedule.step()
        if not step.rehearsal and not Path("hurry").exists():
            time.sleep(min(2.0, 0.12 * {STEPS} / ({STEPS} - step.number)))  # until the test has seen enough
"""


def test_rates_settings_and_micro_batches_follow_the_world_from_its_first_step_on(here: Site) -> None:
    script = here.script(SCRIPT)
    with here.start("run", "--job", "job", "--nproc-per-node", "1", "--replicas", "1:4", script) as started:
        job = Elastic(here, "job", started)
        job.settled(1)
        for size in (2, 3, 1):
            job.reach(size)
        ledger = job.finish()
    worlds = {int(formed.step): len(formed.workers) for formed in ledger.generations}
    assert list(worlds.values()) == [1, 2, 3, 1]
    world = 0
    for number in range(STEPS):
        world = worlds.get(number, world)
        commits = ledger.commits[StepNo(number)]
        assert sorted(commits) == list(range(world)), number
        assert sum(commit.metrics["samples"] for commit in commits.values()) == 24
        scheduled = RATE * (1 - 0.5 * number / STEPS)
        for commit in commits.values():
            assert commit.metrics["rate"] == pytest.approx(scheduled * world, rel=1e-6), number
            assert commit.metrics["beta"] == (0.3 if world >= 3 else 0.1), number
            assert commit.metrics["count"] == (6 if world == 1 else 12), number
    proven = here.regrow("data", "verify", "job")
    assert proven.returncode == 0, proven.stdout + proven.stderr


GROUPS = """
import sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import regrow
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
session = regrow.init(seed=3)
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session.protect(model, optimizer)
own = dist.new_group()

for step in session.steps(lambda step, share: torch.ones(2, 4), until=200, microbatches=4):
    with step:
        ranks = torch.ones(1)
        dist.all_reduce(ranks, group=own)
        for micro in step.microbatches:
            micro.backward(model(micro.batch).square().mean())
        optimizer.step()
        step.log(ranks=ranks)
        if not step.rehearsal and not Path("hurry").exists():
            time.sleep(min(2.0, 0.05 * 200 / (200 - step.number)))  # until the test has seen enough
"""


def test_a_group_of_the_scripts_own_follows_the_world_also_through_a_single_replica(here: Site) -> None:
    script = here.script(GROUPS)
    with here.start("run", "--job", "job", "--nproc-per-node", "2", "--replicas", "1:4", script) as started:
        job = Elastic(here, "job", started)
        job.settled(2)
        for size in (1, 2, 3):
            job.reach(size)
        ledger = job.finish()
    found = {len(commits): {each.metrics["ranks"] for each in commits.values()} for commits in ledger.commits.values()}
    assert found == {1: {1.0}, 2: {2.0}, 3: {3.0}}


def test_a_group_that_cannot_follow_fixes_the_world(here: Site) -> None:
    script = here.script(GROUPS)
    words = ("--nproc-per-node", "1", "--replicas", "1:4", script)
    with here.start("run", "--job", "job", *words) as started:
        job = Elastic(here, "job", started)
        job.settled(1)
        answer = job.scale(2)
        assert not answer.accepted and "could be one of all replicas or one inside a replica" in answer.reason
        assert job.finish().incidents == []
