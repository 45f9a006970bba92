"""Changes of the world beside all else that a job can have: standbys, checkpoints, copies, comparisons."""

from typing import Any

import pytest
from tests.process.elastic import Elastic, assert_same, fixed_run
from tests.process.launching import Site
from tests.process.training import SCRIPTS

STEPS = 100


def _words(name: str, *flags: str, extra: tuple[str, ...] = ()) -> list[str]:
    script = [str(SCRIPTS / "train_micro.py"), "--steps", str(STEPS), "--invariant", "--out", f"{name}.out"]
    return ["run", "--job", name, *flags, *script, *extra]


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Result of the training in a world of one replica."""
    return fixed_run(tmp_path_factory.mktemp("fixed"), STEPS)


@pytest.mark.parametrize("warmth", ["built", "imports"])
def test_standbys_become_ranks_of_a_larger_world_and_still_replace_lost_ones(
    here: Site, fixed: dict[str, Any], warmth: str
) -> None:
    flags = ("--nproc-per-node", "2", "--replicas", "1:4", "--standby", "1", "--warmth", warmth)
    with here.start(*_words("job", *flags, extra=("--pace", "0.2"))) as started:
        job = Elastic(here, "job", started)
        job.settled(2)
        waiting = job.standby("ready" if warmth == "built" else "idle")
        grown = job.reach(3)
        assert grown.ranks[2].worker == waiting.worker
        job.standby("ready" if warmth == "built" else "idle")
        lost = job.worker("member", 1)
        job.kill(lost)
        job.until(lambda now: lost.worker not in [each.worker for each in now.ranks], "the kill was seen")
        job.settled(3)
        job.reach(1)
        job.standby("ready" if warmth == "built" else "idle")
        job.reach(4)
        ledger = job.finish()
    assert_same(here, ledger, fixed, ranks=4)
    assert [each.rung for each in ledger.incidents] == ["grow", "standby", "shrink", "grow"]


def test_checkpoints_copies_and_comparisons_go_on_through_changes(here: Site, fixed: dict[str, Any]) -> None:
    flags = ("--local-nodes", "2", "--nproc-per-node", "1", "--replicas", "1:4", "--slots", "2")
    kept = ("--checkpoint-dir", "kept", "--checkpoint-every", "1s", "--buddy-every", "5", "--digest-every", "10")
    with here.start(*_words("job", *flags, *kept, extra=("--pace", "0.2"))) as started:
        job = Elastic(here, "job", started)
        ledger = job.through_changes()
    assert_same(here, ledger, fixed, ranks=3)
    assert ledger.corruptions == []
    assert (here.folder / "kept" / f"step-{STEPS}").is_dir()
    assert "cannot" not in job.job.output
