"""Hugging Face's `Trainer` in a world that grows, loses a rank and shrinks: the same bits as in a world of one."""

from collections.abc import Iterator

import pytest
from tests.process.elastic import Elastic, changes, losses
from tests.process.launching import TRAINERS, Site, site
from tests.process.training import SCRIPTS, Outcome, outcome_of, redone

from regrow.observe.ledger import read_records

STEPS, LAST = 60, 2
WORDS = ("--steps", str(STEPS), "--invariant", "--microbatches", "6", "--no-evaluation")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("elastic-trainer"), *TRAINERS) as made:
        yield made
        made.assert_nothing_left()


def words(name: str, *flags: str) -> list[str]:
    script = str(SCRIPTS / "train_trainer.py")
    return ["run", "--job", name, "--nproc-per-node", "1", *flags, script, "--out", f"{name}.out", *WORDS]


@pytest.fixture(scope="module")
def fixed(here: Site) -> Outcome:
    done = here.regrow(*words("fixed"))
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = outcome_of(here, "fixed", 1, done.returncode, done.stdout + done.stderr)
    assert len(outcome.losses) == STEPS
    return outcome


def test_from_one_rank_to_three_of_which_one_dies_to_two(here: Site, fixed: Outcome) -> None:
    with here.start(*words("job", "--replicas", "1:3"), "--pace", "0.3") as started:
        job = Elastic(here, "job", started)
        job.settled(1)
        generation = job.reach(3).generation
        job.kill(job.worker("member", rank=1))
        job.until(lambda now: now.generation > generation, "the kill was seen")
        job.settled(3)
        job.reach(LAST)
        ledger = job.finish()
    assert [(each.before, each.after) for each in changes(read_records(job.folder))] == [(1, 3), (3, LAST)]
    assert "exit" in [incident.kind for incident in ledger.incidents]
    assert all(incident.steps_lost == 0 for incident in ledger.incidents)
    assert redone(ledger) == []
    assert losses(ledger) == {step: loss for (step, _), loss in fixed.losses.items()}
    ended = outcome_of(here, "job", LAST, 0, started.output).finals
    assert len(ended) == LAST
    for final in ended.values():
        assert (final["digest"], final["history"]) == (fixed.finals[0]["digest"], fixed.finals[0]["history"])
