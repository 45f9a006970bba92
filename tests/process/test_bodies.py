"""Bodies that are not "compute, then update" go straight through faults too, bitwise as if nothing had happened."""

import pytest
from tests.process.launching import Site
from tests.process.training import Fault, Outcome, assert_equal, outcome_of, train

SCRIPT = "train_bodies.py"


def run(here: Site, name: str, mode: str, *extra: str, faults: list[Fault] | None = None) -> Outcome:
    return train(here, name, world=2, steps=8, faults=faults, script=SCRIPT, extra=("--mode", mode, *extra))


def mishaps(here: Site) -> tuple[str, str]:
    folder = here.folder / "mishaps"
    folder.mkdir()
    return "--mishaps", str(folder)


# In the closure of the first update; in the second backward, after it; while rank 0 evaluates between `for` and `with`;
# and before the commit.
ENTWINED = [Fault(1, 2, "reduce"), Fault(0, 3, "backward"), Fault(1, 4, "forward"), Fault(0, 6, "update")]


@pytest.mark.parametrize(
    ("mode", "faults"),
    [
        ("entwined", ENTWINED),
        pytest.param("late", [Fault(1, 3, "backward"), Fault(0, 5, "reduce")], marks=pytest.mark.full),
        pytest.param("trainer", [Fault(1, 2, "reduce"), Fault(0, 5, "reduce")], marks=pytest.mark.full),
    ],
)
def test_a_body_whose_collectives_cannot_be_parted_from_its_updates_is_undone_as_a_whole(
    here: Site, mode: str, faults: list[Fault]
) -> None:
    calm = run(here, "calm", mode)
    assert calm.code == 0, calm.output
    assert calm.output.count("a fault undoes the whole body") == 1
    assert_equal(run(here, "struck", mode, *mishaps(here), faults=faults), calm, faults=len(faults))


def test_a_sharded_world_survives_an_error_after_unscaling_in_a_skipped_update_and_after_the_update(here: Site) -> None:
    calm = run(here, "calm", "sharded")
    assert calm.code == 0, calm.output
    flags = mishaps(here)
    struck = run(here, "struck", "sharded", *flags)
    assert_equal(struck, calm, faults=0)
    assert len(list((here.folder / "mishaps").iterdir())) == 3
    # One that comes before the coordinator knows that the one before is mended belongs to the same incident.
    kinds = [incident.kind for incident in struck.ledger.incidents]
    assert set(kinds) == {"exception"} and len(kinds) <= 3


FUNCTION = """
import sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import regrow

session = regrow.init(seed=1)
torch.set_num_threads(1)
model = DistributedDataParallel(nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session.protect(model, optimizer)

def batch_of(step):
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + session.rank))
    return x, x.sum(1, keepdim=True)

def train_step(step):
    with step as (x, y):
        share = torch.ones(1)
        dist.all_reduce(share)
        loss = nn.functional.mse_loss(model(x), y) * share / session.world_size
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()

for step in session.steps(batch_of, until=12):
    shown = train_step(step)
    step.log(loss=shown)
sys.stdout.write(f"digest {session.digest()}\\n")
"""


def test_a_function_that_returns_what_its_body_computes_goes_on_where_that_was_cut_off_before(here: Site) -> None:
    """The others wait in the first collective of the body, before the variable is bound."""
    script = here.script(FUNCTION)
    faults = [Fault(1, 3, "begin"), Fault(0, 6, "begin"), Fault(2, 9, "begin")]
    (here.folder / "plan.toml").write_text("\n".join(fault.toml() for fault in faults))
    digests, losses = [], []
    for name, flags in (("calm", ()), ("struck", ("--fault-plan", "plan.toml"))):
        done = here.regrow("run", "--job", name, "--nproc-per-node", "3", *flags, script)
        outcome = outcome_of(here, name, 3, done.returncode, done.stdout + done.stderr)
        assert outcome.code == 0, outcome.output
        digests.append({line.partition("digest ")[2] for line in outcome.output.splitlines() if "digest " in line})
        losses.append(outcome.losses)
    assert len(digests[0]) == 1
    assert digests[0] == digests[1]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3 * 12
    assert len(outcome.ledger.injected) == 3
    # One that comes before the coordinator has heard that the one before is mended belongs to the same incident.
    assert sum(incident.faults for incident in outcome.ledger.incidents) == 3
