"""Workers are bound near their devices by `--numa-binding`: the first ones, forks, and standbys of each warmth."""

import json
import os

import pytest
from tests.process.launching import SOURCE, Site
from tests.process.training import Fault

from regrow.observe.ledger import Ledger, read_records

CPUS = sorted(os.sched_getaffinity(0))
pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="one processor has no parts")

NEAR = """
import os
from regrow.comm.torch_private import numa

def processors(mode, device):
    assert mode == "exclusive"
    return {sorted(os.sched_getaffinity(0))[device % 2]}

numa.processors = processors
"""
SCRIPT = """
import json, os, sys
bound = {"local_rank": int(os.environ["LOCAL_RANK"]), "cpus": sorted(os.sched_getaffinity(0))}
import torch, regrow
session = regrow.init(seed=1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.protect(model, optimizer)
for step in session.steps(lambda number: torch.full((2, 4), number / 9), until=8, data=(0, 1)):
    with step as batch:
        model(batch).mean().backward()
        torch.distributed.all_reduce(model.weight.grad)
        optimizer.step()
        optimizer.zero_grad()
with open(f"bound.{session.rank}", "w") as file:
    json.dump(bound, file)
"""


@pytest.mark.parametrize(
    "how",
    [
        pytest.param((), marks=pytest.mark.full),
        ("--standby=1", "--warmth=built"),
        pytest.param(("--standby=1", "--warmth=imports"), marks=pytest.mark.full),
    ],
    ids=["fork", "built", "imports"],
)
def test_whoever_takes_a_rank_is_bound_near_its_device(here: Site, how: tuple[str, ...]) -> None:
    (here.folder / "near.py").write_text(NEAR)
    (here.folder / "plan.toml").write_text(Fault(1, 3).toml())
    words = ("--job=near", "--nproc-per-node=2", "--numa-binding=exclusive", "--preload=near", *how)
    path = os.pathsep.join([str(here.folder), SOURCE])
    script = here.script(SCRIPT)
    done = here.regrow("run", *words, "--fault-plan", str(here.folder / "plan.toml"), script, PYTHONPATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    ledger = Ledger(read_records(here.home / "jobs" / "near"))
    assert len(ledger.injected) == 1
    found = [json.loads((here.folder / f"bound.{rank}").read_text()) for rank in range(2)]
    assert found[0]["local_rank"] == 0
    assert [each["cpus"] for each in found] == [[CPUS[each["local_rank"] % 2]] for each in found]
