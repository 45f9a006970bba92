"""Bodies that are not "compute, then update" go straight through faults too, bitwise as if nothing had happened."""

import pytest
from tests.process.launching import Site
from tests.process.training import Fault, Outcome, assert_equal, train

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


@pytest.mark.timeout(180)
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


@pytest.mark.timeout(180)
def test_a_sharded_world_survives_an_error_after_unscaling_in_a_skipped_update_and_after_the_update(here: Site) -> None:
    calm = run(here, "calm", "sharded")
    assert calm.code == 0, calm.output
    flags = mishaps(here)
    struck = run(here, "struck", "sharded", *flags)
    assert_equal(struck, calm, faults=0)
    assert [incident.kind for incident in struck.ledger.incidents] == ["exception"] * 3
    assert len(list((here.folder / "mishaps").iterdir())) == 3
