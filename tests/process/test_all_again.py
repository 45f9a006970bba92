"""The rung `all`: a lost rank of a job whose newcomers are refuted, with the result of the run without faults."""

from collections.abc import Iterator

import pytest
from tests.process.launching import Site, site
from tests.process.training import Fault, Outcome, assert_equal, train


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("again")) as made:
        yield made
        made.assert_nothing_left()


def run(here: Site, name: str, *flags: str, nodes: int = 1, faults: list[Fault] | None = None) -> Outcome:
    return train(
        here,
        name,
        *flags,
        world=4 if nodes == 2 else 2,
        nodes=nodes,
        steps=12,
        faults=faults,
        script="train_refuted.py",
        env={"REFUTED_AT": "2"},
    )


@pytest.fixture(scope="module")
def undisturbed(here: Site) -> dict[int, Outcome]:
    return {nodes: run(here, f"undisturbed{nodes}", nodes=nodes) for nodes in (1, 2)}


CASES = {
    "forward": ("forward", (), 1),
    "all-reduce": ("reduce", ("--standby", "1"), 1),
    "update": ("update", (), 1),
    "two nodes": ("backward", (), 2),
}


@pytest.mark.parametrize("case", CASES)
def test_all_start_again_with_the_survivors_state_and_end_the_same(
    here: Site, undisturbed: dict[int, Outcome], case: str
) -> None:
    stage, flags, nodes = CASES[case]
    done = run(here, case.replace(" ", "-"), *flags, nodes=nodes, faults=[Fault(1, 6, stage)])
    assert_equal(done, undisturbed[nodes], faults=1)
    assert [incident.rung for incident in done.ledger.incidents] == ["all"], done.output
    assert "which is in memory" in done.output
