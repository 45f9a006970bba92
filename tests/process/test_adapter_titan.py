"""The adapter of torchtitan, around a stand-in with its signatures, killed. torchtitan itself needs a GPU."""

from collections.abc import Iterator

import pytest
from tests.process.launching import Site, site
from tests.process.training import Fault, assert_equal, train

WORLD, STEPS = 2, 10


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("titan")) as made:
        yield made
        made.assert_nothing_left()


def test_both_ranks_are_killed_before_behind_and_in_an_update(here: Site) -> None:
    faults = [Fault(0, 2, "backward"), Fault(1, 4, "reduce"), Fault(0, 6, "update"), Fault(1, 8, "between")]
    runs = [
        train(here, name, world=WORLD, steps=STEPS, faults=each, script="train_titan.py")
        for name, each in [("undisturbed", []), ("killed", faults)]
    ]
    undisturbed, killed = runs
    assert undisturbed.code == 0, undisturbed.output
    assert "has not been run on it" in undisturbed.output
    assert len(undisturbed.losses) == WORLD * STEPS
    finals = [undisturbed.finals[rank] for rank in range(WORLD)]
    assert len({str(final["digest"]) for final in finals}) == 1
    assert [final["saved"] for final in finals] == [STEPS] * WORLD
    assert [final["progress"] for final in finals] == [{"step": STEPS, "ntokens_seen": STEPS * 4 * 6}] * WORLD
    assert_equal(killed, undisturbed, faults=len(faults))
