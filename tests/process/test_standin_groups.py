"""Whole jobs over process groups of a device's own, as NCCL's are: they connect late, run late, hang, and are aborted."""

from collections.abc import Callable, Iterator

import pytest
from tests.process.launching import Site, site
from tests.process.training import Fault, Outcome, assert_equal, train
from tests.standin.building import Unbuildable, library

WORLD, STEPS = 2, 16
STAGES = ("forward", "backward", "reduce", "update")
LATE = {"REGROW_TEST_DEVICE": "standin", "STANDIN_GROUPS": "1", "STANDIN_LAG_US": "50", "STANDIN_QUEUE": "48"}
"""Each launch takes a while, and a step has more of them than a stream holds."""
pytestmark = pytest.mark.timeout(1200)  # the first of all builds the device


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    try:
        library()
    except Unbuildable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("groups")) as made:
        yield made
        made.assert_nothing_left()


@pytest.fixture(scope="module")
def undisturbed(here: Site) -> Outcome:
    """On the processor: sums of two are the same in any order."""
    outcome = train(here, "undisturbed", world=WORLD, steps=STEPS)
    assert outcome.code == 0, outcome.output
    assert len(outcome.losses) == WORLD * STEPS
    return outcome


@pytest.mark.parametrize("standbys", [0, 1])
def test_any_rank_of_ddp_killed_at_every_stage(here: Site, undisturbed: Outcome, standbys: int) -> None:
    kills = [(stage, rank) for stage in STAGES for rank in range(WORLD)]
    faults = [Fault(rank, 1 + at + at // 2, stage) for at, (stage, rank) in enumerate(kills)]
    flags = ("--standby", str(standbys))
    outcome = train(here, f"killed-{standbys}", *flags, world=WORLD, steps=STEPS, faults=faults, env=LATE)
    # As in test_standin.py: a device's numbers are read at the commit, which who dies with it may not see.
    unsaid = {(fault.step, fault.rank) for fault in faults if fault.at in ("reduce", "update")}
    assert_equal(outcome, undisturbed, faults=len(faults), unsaid=unsaid)


PARALLEL = {**LATE, "STANDIN_DEVICES": "4"}
EVERY = ("data", "forward", "backward", "reduce", "vote", "update", "commit")


@pytest.mark.parametrize("mode", ["fsdp2", "hsdp", "tp_dp", "pp_dp"])
def test_any_rank_killed_at_every_stage_in_each_parallelism(here: Site, mode: str) -> None:
    def run(name: str, *flags: str, faults: list[Fault] | None = None) -> Outcome:
        extra = ("--mode", mode)
        return train(
            here,
            f"{mode}-{name}",
            *flags,
            world=4,
            steps=34,
            faults=faults,
            extra=extra,
            script="train_parallel.py",
            env=PARALLEL,
        )

    # No rank of FSDP2 alone has what another has: a copy of each state is kept beside it, which may be a step older.
    flags, lost = (("--buddy-every", "1"), 1) if mode == "fsdp2" else ((), None)
    reference = run("undisturbed")
    assert reference.code == 0, reference.output
    assert len(reference.losses) == 4 * 34
    faults = [Fault((at * 3) % 4, 2 + 4 * at, stage) for at, stage in enumerate(EVERY)]
    assert_equal(run("killed", *flags, faults=faults), reference, faults=len(faults), lost=lost)
