"""Values in objects, classes, functions and generators of a script go with its steps, into newcomers too."""

import pytest
from tests.process.launching import Site
from tests.process.training import Fault, assert_equal, train

FAULTS = [Fault(1, 5, "backward"), Fault(0, 8, "forward")]


@pytest.mark.parametrize(
    "flags", [(), pytest.param(("--standby", "1"), marks=pytest.mark.full)], ids=["fork", "standby"]
)
@pytest.mark.parametrize("where", ["--in-body", pytest.param("", marks=pytest.mark.full)])
def test_losses_after_kills_are_those_of_the_undisturbed_run(here: Site, flags: tuple[str, ...], where: str) -> None:
    words = tuple(word for word in [where] if word)
    calm = train(here, "calm", world=2, steps=12, extra=words, script="train_kept.py")
    struck = train(here, "struck", *flags, world=2, steps=12, extra=words, script="train_kept.py", faults=FAULTS)
    assert calm.code == 0, calm.output
    assert_equal(struck, calm, faults=len(FAULTS))
