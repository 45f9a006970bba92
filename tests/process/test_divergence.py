"""Replicas that start or come to differ are told, with the names of what differs; the job trains on all the same."""

from tests.process.launching import Site
from tests.process.training import train

from regrow.observe.ledger import Ledger, read_records

SCRIPT = """
import torch
from torch.nn.parallel import DistributedDataParallel
import regrow

class Progress:
    def __init__(self): self.seen, self.is_main = 0, session.is_main
    def state_dict(self): return {"seen": self.seen, "is_main": self.is_main}
    def load_state_dict(self, state): self.seen, self.is_main = state["seen"], state["is_main"]

torch.set_num_threads(1)
session = regrow.init(seed=1)
torch.manual_seed(session.rank)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
other = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
progress = Progress()
session.protect(model, optimizer, other=other, progress=progress)
for step in session.steps(lambda number: torch.arange(8.0).add(number).sin(), until=5):
    with step as batch:
        model(batch).square().sum().backward()
        progress.seen += 1
        optimizer.step()
        optimizer.zero_grad()
"""


def test_ranks_that_start_with_other_values_are_named_before_the_first_step(here: Site) -> None:
    done = here.regrow("run", "--job", "unlike", "--nproc-per-node", "2", here.script(SCRIPT))
    assert done.returncode == 0, done.stdout + done.stderr
    ledger = Ledger(read_records(here.home / "jobs" / "unlike"))
    # DDP's parameters are rank 0's, as torch makes them; the other module's are not, and a field belongs to a rank.
    assert ledger.divergences[0].step == 0
    assert ledger.divergences[0].parts == ["other.bias", "other.weight", "progress.is_main"]
    assert done.stderr.count("rank 1 starts with other values than rank 0") == 1
    assert ledger.incidents == []


def test_replicas_that_drift_apart_are_told_while_they_train(here: Site) -> None:
    drifting = train(here, "drift", world=2, steps=40, extra=("--drift",))
    assert drifting.code == 76 and "the result is not proven" in drifting.output, drifting.output
    first = drifting.ledger.divergences[0]
    assert 0 < first.step <= 16 and first.alike == [[0], [1]]
    assert any("0.weight" in part for part in first.parts)
    assert "replicas are not the same any more" in drifting.output
    assert drifting.ledger.incidents == []


def test_who_does_not_want_to_know_is_not_told(here: Site) -> None:
    quiet = train(here, "quiet", "--no-audit", world=2, steps=20, extra=("--drift",))
    assert quiet.code == 0 and quiet.ledger.divergences == []
