"""Optimizers that shard themselves: what a rank has of their state, no other rank has, under names that all have."""

import pytest
from tests.process.launching import Site
from tests.process.training import Fault, Outcome, assert_equal, train

SCRIPT = "train_sharded_optimizer.py"
COPIES = ("--buddy-every", "1")
KILLS = [Fault(1, 2, "reduce"), Fault(0, 5, "update"), Fault(1, 8, "backward"), Fault(0, 10, "begin")]


def run(here: Site, name: str, protect: str, *, faults: list[Fault] | None = None, steps: int = 12) -> Outcome:
    extra = ("--protect", protect)
    return train(here, name, *COPIES, world=2, nodes=2, steps=steps, faults=faults, script=SCRIPT, extra=extra)


@pytest.mark.parametrize("protect", ["apart", pytest.param("part", marks=pytest.mark.full)])
def test_parts_that_are_called_so_come_back_from_copies_bitwise(here: Site, protect: str) -> None:
    calm = run(here, "calm", protect)
    assert calm.code == 0, calm.output
    assert_equal(run(here, "struck", protect, faults=KILLS), calm, faults=len(KILLS), lost=1)


def test_parts_that_are_not_called_so_end_the_job_at_its_first_steps_with_the_cure(here: Site) -> None:
    # Long enough for the coordinator to hear of it: nobody waits for that.
    refused = run(here, "plain", "plain", faults=[Fault(1, 300)], steps=3000)
    assert refused.code == 1, refused.output
    assert "each rank has a part of optim." in refused.output and "part=" in refused.output
    assert refused.ledger.injected == [] and refused.ledger.incidents == []
