"""Durable checkpoints: the last resort, and what `--resume` starts from."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.process.launching import Site, site
from tests.process.training import SCRIPTS, Fault, train

STEPS = 30


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path) as made:
        yield made
        made.assert_nothing_left()


def test_a_resumed_job_ends_like_one_that_was_never_stopped(here: Site) -> None:
    whole = train(here, "whole", world=2, steps=STEPS)
    durable = ("--checkpoint-dir", str(here.folder / "durable"), "--checkpoint-every", "1ms")
    script = (str(SCRIPTS / "train_small.py"), "--steps", str(STEPS), "--pause", "0.1", "--say-steps")
    with here.start("run", "--job", "first", "--nproc-per-node", "2", *durable, *script) as first:
        first.wait_for("step 12")
        first.signal(signal.SIGTERM)
        assert first.wait() == 75
    second = train(here, "second", "--resume", *durable, world=2, steps=STEPS)
    assert second.code == 0, second.output
    assert second.finals == whole.finals
    begun = min(step for step, _ in second.losses)
    assert begun > 0
    assert second.losses == {place: loss for place, loss in whole.losses.items() if place[0] >= begun}


def test_all_ranks_lost_at_once_go_back_to_the_durable_checkpoint(here: Site) -> None:
    whole = train(here, "whole", world=2, steps=STEPS)
    durable = ("--checkpoint-dir", str(here.folder / "durable"), "--checkpoint-every", "1ms")
    faults = [Fault(0, 20, "forward"), Fault(1, 20, "forward")]
    outcome = train(here, "lost", *durable, world=2, steps=STEPS, faults=faults)
    assert outcome.code == 0, outcome.output
    assert outcome.finals == whole.finals
    assert [incident.rung for incident in outcome.ledger.incidents] == ["restart"]


def test_all_ranks_lost_without_a_durable_checkpoint_end_the_job_with_a_diagnosis(here: Site) -> None:
    faults = [Fault(0, 20, "forward"), Fault(1, 20, "forward")]
    outcome = train(here, "lost", world=2, steps=STEPS, faults=faults)
    assert outcome.code == 1
    assert "last copy of the training state" in outcome.output
    assert "--checkpoint-dir" in outcome.output
