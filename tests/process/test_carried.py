"""Values that bodies hand to the next in variables come through a kill, also what the first bodies leave equal."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
from tests.process.launching import Site, site
from tests.process.training import Fault, Outcome, assert_equal, train


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("carried")) as made:
        yield made
        made.assert_nothing_left()


def run(here: Site, name: str, *words: str, flags: tuple[str, ...] = (), faults: list[Fault] | None = None) -> Outcome:
    return train(here, name, *flags, world=2, steps=12, faults=faults, script="train_carrying.py", extra=words)


def test_arrays_and_numbers_in_variables_come_through_a_kill(here: Site) -> None:
    calm = run(here, "alike-calm")
    assert calm.code == 0, calm.output
    for final in cast(list[dict[str, list[Any]]], list(calm.finals.values())):
        assert [len(final[name]) for name in ("trace", "history", "many", "every")] == [12] * 4  # none of the rehearsal
        assert final["trace"] == final["many"] and [number for number, _ in final["history"]] == list(range(12))
    struck = run(here, "alike-struck", faults=[Fault(1, 8, "reduce")])
    assert_equal(struck, calm, faults=1)


def test_those_that_each_rank_has_of_its_own_come_from_its_copy(here: Site) -> None:
    flags = ("--buddy-every", "1")
    calm = run(here, "own-calm", "--own", flags=flags)
    assert calm.code == 0, calm.output
    struck = run(here, "own-struck", "--own", flags=flags, faults=[Fault(1, 8, "reduce")])
    assert_equal(struck, calm, faults=1, lost=1)


def test_lists_and_sums_of_an_epoch_have_each_of_its_steps_once(here: Site) -> None:
    calm = train(here, "epochs-calm", world=2, steps=8, script="train_epoch_lists.py")
    assert calm.code == 0, calm.output
    for final in cast(list[dict[str, Any]], list(calm.finals.values())):
        assert [[each[0], each[2]] for each in final["sums"]] == [[8, 8]] * 3 and final["seen"] == 24
    struck = train(here, "epochs", world=2, steps=8, script="train_epoch_lists.py", faults=[Fault(1, 11, "reduce")])
    assert_equal(struck, calm, faults=1)
