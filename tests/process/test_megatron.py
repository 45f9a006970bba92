"""The real Megatron-Core, on processors, protected as docs/adopt.md says, and killed in every phase of a step."""

from collections.abc import Iterator

import pytest
from tests.process.launching import Site, site
from tests.process.training import Fault, assert_equal, train

STEPS = 12


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("megatron")) as made:
        yield made
        made.assert_nothing_left()


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "world", "extra"),
    [("data", 2, ()), ("tensor", 4, ("--tensor", "2", "--overlap"))],
)
def test_a_rank_is_killed_in_each_phase(here: Site, name: str, world: int, extra: tuple[str, ...]) -> None:
    phases = ["forward", "backward", "reduce", "update"]
    faults = [Fault(at % world, 2 + 2 * at, phase) for at, phase in enumerate(phases)]
    undisturbed, killed = [
        train(
            here,
            f"{name}-{kind}",
            "--buddy-every",
            "1",
            world=world,
            steps=STEPS,
            faults=each,
            script="train_megatron.py",
            extra=extra,
        )
        for kind, each in [("calm", []), ("killed", faults)]
    ]
    assert undisturbed.code == 0, undisturbed.output
    assert len(undisturbed.losses) == world * STEPS
    assert [final["steps"] for final in undisturbed.finals.values()] == [4 * STEPS] * world
    assert_equal(killed, undisturbed, faults=len(faults), lost=1)
