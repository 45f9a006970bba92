"""Scripts that leave their loop before its end, unguarded, and a fault in the step after which they do."""

import json

import pytest
from tests.process.launching import Site
from tests.process.training import Fault

SCRIPT = """
import atexit, json, os, sys
from pathlib import Path
import torch
import regrow
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

how, out = sys.argv[1:]
torch.set_num_threads(1)
session = regrow.init(seed=3)
net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1))
model = DistributedDataParallel(net, bucket_cap_mb=0.0001)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
session.protect(model, optimizer)


def batch(step):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(97 * step + session.rank))


def keep():
    told = {"digest": session.digest(), "turns": turns, "behind": behind}
    Path(f"{out}.{session.rank}.json").write_text(json.dumps(told))


def train_step(step):
    with step as x:
        loss = model(x).square().mean()
        step.log(loss=loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss


def train():
    global turns, behind
    for step in session.steps(batch, until=40):
        turns += 1
        loss = train_step(step)
        behind += 1
        if how == "raises" and turns == 6:
            raise StopIteration
        if behind == 6:
            return


turns = behind = 0
if how == "breaks":
    for step in tqdm(session.steps(batch, until=40), disable=True):
        turns += 1
        with step as x:
            loss = model(x).square().mean()
            step.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        behind += 1
        if step.number == 5:
            break
elif how == "exits":
    for step in session.steps(batch, until=40):
        turns += 1
        atexit.unregister(keep)
        atexit.register(keep)
        train_step(step)
        behind += 1
        if turns >= 6:
            sys.exit(0)
else:
    try:
        train()
    except StopIteration:
        pass
keep()
"""
FAULTS = [Fault(1, 2, "reduce"), Fault(0, 5, "forward"), Fault(2, 5, "reduce")]


@pytest.mark.parametrize("how", ["breaks", "returns", "raises", "exits"])
def test_a_loop_is_left_after_a_step_that_has_happened_and_not_before(here: Site, how: str) -> None:
    script = here.script(SCRIPT)
    run = ("run", "--nproc-per-node", "3", "--standby", "1")
    calm = here.regrow(*run, "--job", "calm", script, how, "calm")
    assert calm.returncode == 0, calm.stderr
    (here.folder / "plan.toml").write_text("\n".join(fault.toml() for fault in FAULTS))
    struck = here.regrow(*run, "--job", "struck", "--fault-plan", "plan.toml", script, how, "struck")
    assert struck.returncode == 0, struck.stdout + struck.stderr
    for rank in range(3):
        found, expected = (json.loads((here.folder / f"{name}.{rank}.json").read_text()) for name in ("struck", "calm"))
        assert found == expected | {"turns": 6, "behind": 6}, f"rank {rank}"
