"""A standby shows in a rank's shadow that it computes the same; where it does not, what differs is named, and why."""

import time
from pathlib import Path

import pytest
from tests.process.launching import PATIENCE, Running, Site
from tests.process.training import SCRIPTS

from regrow.core.records import Noted, Record, ReplacementJudged
from regrow.observe.ledger import Ledger, read_records

WELL = ("", "clip", "seeded", "counter", "closure")
"""Modes in which a newcomer computes the same as the rank."""


def judged(here: Site, name: str, running: Running) -> Record:
    """Judgement on newcomers, or the reason why there is none, while the job trains."""
    folder, until = here.home / "jobs" / name, time.monotonic() + PATIENCE
    while time.monotonic() < until:
        running.drain()
        for record in read_records(folder) if (folder / "events.jsonl").exists() else ():
            if isinstance(record, ReplacementJudged) or (isinstance(record, Noted) and "not proven" in record.text):
                return record
        time.sleep(0.05)
    raise AssertionError(f"nothing was found of newcomers: {running.output}")


def shadowed(here: Site, fault: str, *flags: str, world: int = 2) -> tuple[Record, Ledger, str]:
    """Train until something is found, and to its end."""
    name = fault or "well"
    words = ["run", "--job", name, "--nproc-per-node", str(world), "--standby", "1", *flags]
    with here.start(*words, str(SCRIPTS / "train_shadowed.py"), "--fault", fault, REGROW_PROOF="auto") as running:
        found = judged(here, name, running)
        (here.folder / "enough").touch()
        code = running.wait()
        assert code == 0, running.output
        return found, Ledger(read_records(here.home / "jobs" / name)), running.output


@pytest.mark.parametrize("fault", WELL)
def test_a_standby_of_a_script_that_keeps_nothing_is_proven_and_training_is_not_disturbed(
    here: Site, fault: str
) -> None:
    found, ledger, output = shadowed(here, fault)
    assert isinstance(found, ReplacementJudged) and found.reason == "" and found.step >= 3, (found, output)
    assert found.rank == 1
    assert ledger.incidents == [] and ledger.divergences == []
    assert not Path(here.folder / "behind").exists(), "what stands behind the body was run in the shadow"
    told = here.regrow("story", fault or "well").stdout
    assert told.count("rank 1 is replaceable: proven at step") == 1, told


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("statistic", "`augment.mean`"),
        ("number", "total`"),
        ("clock", "time.monotonic()"),
        ("environment", "os.environ['GAIN']"),
        ("file", "`augment.text`"),
        ("rank", "`early_rank`"),
        ("module", "forwards`"),
        ("memoized", "made_once"),
    ],
)
def test_what_a_newcomer_would_compute_in_another_way_is_found_and_its_cause_named(
    here: Site, fault: str, named: str
) -> None:
    # A standby of three ranks is looked at in another place than it was built under.
    found, ledger, output = shadowed(here, fault, world=3 if fault == "rank" else 2)
    assert isinstance(found, ReplacementJudged), (found, output)
    assert "Likely causes" in found.reason and named in found.reason, found.reason
    assert ledger.incidents == []


@pytest.mark.parametrize(
    ("fault", "named"),
    [("generator", "augment.numbers"), ("torch_generator", "augment.torch"), ("python_generator", "augment.python")],
)
def test_a_generator_that_nobody_protects_is_refused_before_the_first_step(here: Site, fault: str, named: str) -> None:
    words = ["run", "--job", fault, "--nproc-per-node", "2", str(SCRIPTS / "train_shadowed.py"), "--fault", fault]
    done = here.regrow(*words)
    assert done.returncode != 0 and named in done.stderr and "before its first step" in done.stderr, done.stderr
