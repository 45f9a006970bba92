"""Values of a script in any form come through a kill, or are named where a rank is replaced; nothing else is named."""

from typing import Any, cast

import pytest
from tests.process.launching import Site
from tests.process.training import Fault, Outcome, train

SCRIPT = "train_unkept.py"
OWN_STEPS = 12


def run(here: Site, name: str, since: str, faults: list[Fault] | None = None) -> Outcome:
    outcome = train(here, name, world=2, steps=OWN_STEPS, extra=("--since", since), script=SCRIPT, faults=faults)
    assert outcome.code == 0, outcome.output
    return outcome


def named(outcome: Outcome) -> set[str]:
    return {name.removeprefix("module ") for incident in outcome.ledger.incidents for name in incident.not_kept}


@pytest.mark.parametrize("since", ["0", "2"])
def test_what_is_not_carried_is_named_and_nothing_else(here: Site, since: str) -> None:
    calm = run(here, "calm", since)
    bodies = OWN_STEPS - int(since)
    for final in cast(list[dict[str, Any]], list(calm.finals.values())):  # as under torchrun: no rehearsal in it
        lengths = [final[f"carried {name}"][0] for name in ("history", "meter.long", "trainer.losses")]
        assert lengths == [1_500 + bodies] * 3
        assert final["carried pair"][1][1] == str(bodies) and final["carried meter.pairs"][0] == 1 + bodies
        assert [final[f"carried {name}"] for name in ("counted", "slotted.count")] == [str(bodies + 1), str(bodies)]
    told = here.regrow("story", "calm").stdout
    assert ("the rehearsal of the loop's body has changed" in told) == (since == "0"), told
    struck = run(here, "struck", since, [Fault(1, 6, "backward"), Fault(0, 9, "forward")])
    assert struck.losses == calm.losses
    names, unlike = named(struck), differences(struck, calm)
    assert {each.partition(" ")[2] for each in unlike} <= names, (unlike - names, names)
    assert not [each for each in unlike if not each.startswith("named")], unlike
    assert names <= {each.partition(" ")[2] for each in calm.finals[0] if each.startswith("named")}, names
    assert not names or "may have another's values" in struck.output


def differences(one: Outcome, other: Outcome) -> set[str]:
    """Names with other values at the end on some rank."""
    return {
        name for rank, final in other.finals.items() for name, value in final.items() if one.finals[rank][name] != value
    }
