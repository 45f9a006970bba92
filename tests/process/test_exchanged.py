"""Steps that exchange what a class has for all its objects: no such step ends a job, and no kill after it is told less.

Data travels to whoever takes a lost rank. Code does not: no rank is replaced then, and all workers start again.
"""

from collections.abc import Iterator

import pytest
from tests.process.launching import Site, site
from tests.process.training import Fault, Outcome, assert_equal, train


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("exchanged")) as made:
        yield made
        made.assert_nothing_left()


def run(here: Site, name: str, *words: str, flags: tuple[str, ...] = (), faults: list[Fault] | None = None) -> Outcome:
    return train(
        here, name, *flags, world=2, steps=12, faults=faults, script="train_exchanging.py", extra=("--what", *words)
    )


DATA = {
    "number": ("number",),
    "tuple": ("tuple", "--since", "5"),
    "list": ("list", "--since", "5"),
    "tensor": ("tensor", "--since", "5"),
    "new": ("new", "--since", "5"),
    "alone": ("list", "--since", "5", "--only", "1"),
}


@pytest.mark.parametrize("case", DATA)
def test_data_that_steps_exchange_in_a_class_comes_through_a_kill(here: Site, case: str) -> None:
    flags = ("--buddy-every", "1") if case == "alone" else ()
    calm = run(here, f"{case}-calm", *DATA[case], flags=flags)
    assert calm.code == 0, calm.output
    struck = run(here, f"{case}-struck", *DATA[case], flags=flags, faults=[Fault(1, 8, "reduce")])
    assert_equal(struck, calm, faults=1, lost=1 if case == "alone" else None)  # which its copy may be behind
    assert [incident.rung for incident in struck.ledger.incidents] == ["fork"], struck.output
    assert struck.ledger.refuted == []


TOLD = "training goes on, and from now on no lost rank is replaced"


def test_an_optimizer_that_nobody_protects_and_that_steps_late_ends_no_job(here: Site) -> None:
    calm = run(here, "late-calm", "optimizer", "--since", "5")
    assert calm.code == 0, calm.output
    assert calm.output.count(TOLD) == 1 and "an optimizer (SGD) steps in the step's body" in calm.output
    struck = run(here, "late-struck", "optimizer", "--since", "5", faults=[Fault(1, 8, "reduce")])
    assert struck.code == 76, struck.output
    assert [incident.rung for incident in struck.ledger.incidents] == ["all"], struck.output


CODE = {"function": "steps change Game.gain", "own-function": "game.also (function) cannot be protected"}


@pytest.mark.parametrize("what", CODE)
def test_code_that_a_step_puts_there_ends_no_job_and_after_a_kill_all_start_again(here: Site, what: str) -> None:
    calm = run(here, f"{what}-calm", what, "--since", "5")
    assert calm.code == 0, calm.output
    struck = run(here, f"{what}-struck", what, "--since", "5", faults=[Fault(1, 8, "reduce")])
    assert struck.output.count(TOLD) == 1
    assert [judged.reason.startswith(CODE[what]) for judged in struck.ledger.refuted] == [True]
    assert struck.code == 76, struck.output  # the class is as the script has built it: whether that is all is not known
    assert [incident.rung for incident in struck.ledger.incidents] == ["all"], struck.output
    assert struck.finals == calm.finals and struck.losses == calm.losses  # each step of this script exchanges it again
