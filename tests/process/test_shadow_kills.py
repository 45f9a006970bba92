"""A kill in the middle of a shadow proof is mended as any other, and the proof is made again."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.process.launching import PATIENCE, Running, Site, site
from tests.process.training import SCRIPTS, assert_only_the_dead_lose

from regrow.core.records import ReplacementJudged, WorkerForked, WorkerSpawned
from regrow.observe.ledger import Ledger, read_records

SCRIPT, COMPARED = str(SCRIPTS / "train_shadowed.py"), 600
WORLD, PROVEN, THIRD = 3, 1, 2
"""A standby shows that it computes what rank 1 does: rank 0 may do more than others."""
PACE = "0.03"


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[int, int], float]]:
    """The losses of the run that nobody disturbs."""
    with site(tmp_path_factory.mktemp("calm")) as made:
        words = ["run", "--job", "calm", "--nproc-per-node", str(WORLD)]
        done = made.regrow(*words, SCRIPT, "--steps", str(COMPARED), "--pace", "0")
        assert done.returncode == 0, done.stderr
        yield losses(Ledger(read_records(made.home / "jobs" / "calm")))


def losses(ledger: Ledger) -> dict[tuple[int, int], float]:
    commits = ((step, rank, each) for step, ranks in ledger.commits.items() for rank, each in ranks.items())
    return {
        (step, rank): each.metrics["loss"] for step, rank, each in commits if step < COMPARED and "loss" in each.metrics
    }


def wait_for(path: Path, running: Running) -> None:
    until = time.monotonic() + PATIENCE
    while not path.exists():
        running.drain()
        assert time.monotonic() < until and running.process.poll() is None, running.output
        time.sleep(0.01)


def proofs(here: Site) -> list[ReplacementJudged]:
    folder = here.home / "jobs" / "struck"
    found = read_records(folder) if (folder / "events.jsonl").exists() else ()
    return [each for each in found if isinstance(each, ReplacementJudged)]


@pytest.mark.parametrize("hold", ["shadow", "backward", "offered"])
@pytest.mark.parametrize("whom", ["the proven rank", "the prover", "a third rank"])
def test_a_kill_in_the_middle_of_a_proof_costs_nothing_and_the_proof_is_made_again(
    here: Site, calm: dict[tuple[int, int], float], whom: str, hold: str
) -> None:
    words = ["run", "--job", "struck", "--nproc-per-node", str(WORLD), "--standby", "1"]
    with here.start(*words, SCRIPT, "--hold", hold, "--pace", PACE) as running:
        wait_for(here.folder / "held", running)
        assert proofs(here) == []
        os.kill(victim(here, whom), signal.SIGKILL)
        (here.folder / "go").touch()
        until = time.monotonic() + PATIENCE
        while not proofs(here) and time.monotonic() < until and running.process.poll() is None:
            running.drain()
            time.sleep(0.05)
        (here.folder / "enough").touch()
        assert running.wait() == 0, running.output
    ledger = Ledger(read_records(here.home / "jobs" / "struck"))
    assert [each.reason for each in proofs(here)][:1] == [""], running.output
    assert len(ledger.incidents) == (whom != "the prover"), running.output
    assert_only_the_dead_lose(ledger)
    assert ledger.divergences == []
    assert {at: loss for at, loss in losses(ledger).items() if calm[at] != loss} == {}


def victim(here: Site, whom: str) -> int:
    """The process to be killed."""
    if whom != "the prover":
        return int((here.folder / f"{PROVEN if whom == 'the proven rank' else THIRD}.pid").read_text())
    records = list(read_records(here.home / "jobs" / "struck"))
    (standby,) = (each.worker for each in records if isinstance(each, WorkerSpawned) and each.role == "standby")
    return next(each.pid for each in records if isinstance(each, WorkerForked) and each.worker == standby)
