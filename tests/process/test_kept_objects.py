"""Arrays, exact numbers and dates in a script's own objects go with its steps, into newcomers too."""

from typing import Any, cast

import pytest
from tests.process.launching import Site
from tests.process.training import Fault, Outcome, assert_equal, train

UNFOLLOWED = {"late", "holder", "counter", "cached", "meters"}
"""These a replaced rank begins anew: docs/limits.md."""
FAULTS = [Fault(1, 5, "backward"), Fault(0, 8, "forward")]


@pytest.mark.parametrize("since", ["0", pytest.param("2", marks=pytest.mark.full)])
def test_what_objects_hold_at_the_end_is_that_of_the_undisturbed_run(here: Site, since: str) -> None:
    words = ("--since", since)
    calm = train(here, "calm", world=2, steps=12, extra=words, script="train_objects.py")
    struck = train(here, "struck", world=2, steps=12, extra=words, script="train_objects.py", faults=FAULTS)
    assert calm.code == 0, calm.output
    for final in cast(list[dict[str, list[Any]]], list(calm.finals.values())):
        total, both, losses, pairs = final["holder"]
        assert total == [counted := sum(range(int(since) + 1, 13))] and both == [counted] * 2
        assert len(losses) == len(pairs) == 12 - int(since)  # none of the rehearsal
    assert_equal(followed(struck), followed(calm), faults=len(FAULTS))
    if since == "0":
        named = {name for incident in struck.ledger.incidents for name in incident.not_kept}
        assert {"holder.total", "holder.sum", "holder.losses", "late.meter"} <= named, named


def followed(outcome: Outcome) -> Outcome:
    outcome.finals = {
        rank: {key: value for key, value in final.items() if key not in UNFOLLOWED}
        for rank, final in outcome.finals.items()
    }
    return outcome
