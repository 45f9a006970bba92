"""State that scripts change before an update, in evaluations and between steps is rolled back, sent or run again."""

import pytest
from tests.process.launching import Site
from tests.process.training import Fault, assert_equal, train

WORLD, STEPS = 3, 16
STRUCK = [
    Fault(1, 3, "reduce"),
    Fault(0, 5, "update"),
    Fault(2, 7, "commit"),
    Fault(1, 9, "commit"),
    Fault(2, 12, "update"),
    Fault(0, 14, "forward"),
]
BETWEEN = [Fault(1, 3, "between"), Fault(0, 5, "commit"), Fault(2, 9, "between"), Fault(1, 12, "between")]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("habits", "faults"),
    [
        ("between", STRUCK),
        pytest.param("between,guarded", STRUCK, marks=pytest.mark.full),
        ("between,guarded,restartable", [*STRUCK[:2], *BETWEEN[2:], STRUCK[5]]),
        pytest.param("between,restartable,persist", BETWEEN, marks=pytest.mark.full),
        pytest.param("early", STRUCK, marks=pytest.mark.full),
        ("early,restartable", BETWEEN),
    ],
)
def test_state_that_changes_where_nobody_looked_comes_out_as_without_faults(
    here: Site, habits: str, faults: list[Fault]
) -> None:
    extra = ("--habits", habits)
    calm = train(here, "calm", world=WORLD, steps=STEPS, extra=extra, script="train_between.py")
    assert calm.code == 0, calm.output
    assert len({str(final["digest"]) for final in calm.finals.values()}) == 1
    struck = train(here, "struck", world=WORLD, steps=STEPS, extra=extra, faults=faults, script="train_between.py")
    assert_equal(struck, calm, faults=len(faults))
