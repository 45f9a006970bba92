"""A flipped bit in one replica's state is found, its rank is named, and the run ends equal to the undisturbed one."""

from collections.abc import Iterator

import pytest
from tests.process.launching import Site, site
from tests.process.training import Fault, Outcome, assert_equal, train

STEPS, EVERY = 30, 4
COMPARING = ("--digest-every", str(EVERY))
PACED = ("--pause", "0.02")
"""Pause that ends an incident before the next fault strikes: one for both would cost more steps."""
SLOW = ("--pause", "0.05")
"""Pause for counting incidents: at least eight steps lie between the end of one and the next."""
Named = list[tuple[int, int]]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("corruption")) as made:
        yield made
        made.assert_nothing_left()


@pytest.fixture(scope="module")
def undisturbed(here: Site) -> dict[int, Outcome]:
    """By world size."""
    return {world: train(here, f"undisturbed-{world}", world=world, steps=STEPS) for world in (2, 3)}


def flip(rank: int, step: int, at: str = "forward") -> Fault:
    return Fault(rank, step, at, "bitflip")


def named(outcome: Outcome) -> Named:
    """(rank, the comparison that found it) of each corruption, in order."""
    return [(found.rank, found.step) for found in outcome.ledger.corruptions]


def found_by(faults: list[Fault]) -> Named:
    """Expected findings: each flip by the first comparison after it, which is the last one after the last step."""
    return [(fault.rank, min((fault.step // EVERY + 1) * EVERY, STEPS)) for fault in faults]


def test_three_replicas_name_the_odd_one_at_once(here: Site, undisturbed: dict[int, Outcome]) -> None:
    flips = [flip(1, 5), flip(2, 8, "backward"), flip(0, 15, "commit"), flip(1, 22, "update"), flip(2, 29, "reduce")]
    outcome = train(here, "three", *COMPARING, world=3, steps=STEPS, faults=flips, extra=SLOW)
    assert_equal(outcome, undisturbed[3], faults=len(flips), lost=EVERY)
    assert named(outcome) == found_by(flips)
    assert [(i.kind, i.ranks, i.rung) for i in outcome.ledger.incidents] == [
        ("corruption", [fault.rank], "retry") for fault in flips
    ]
    assert outcome.ledger.corruptions[-1].tensors != []
    assert outcome.ledger.corruptions[-1].on_node == len(flips)


def test_two_replicas_name_the_wrong_one_when_the_steps_have_been_run_again(
    here: Site, undisturbed: dict[int, Outcome]
) -> None:
    flips = [flip(1, 5), flip(0, 8, "backward"), flip(0, 15, "commit"), flip(1, 22, "update"), flip(0, 29, "reduce")]
    outcome = train(here, "two", *COMPARING, world=2, steps=STEPS, faults=flips, extra=SLOW)
    assert_equal(outcome, undisturbed[2], faults=len(flips), lost=EVERY)
    assert named(outcome) == found_by(flips)
    assert [incident.kind for incident in outcome.ledger.incidents] == ["corruption"] * len(flips)


@pytest.mark.parametrize("world", [2, 3])
def test_a_flip_in_an_optimizers_memory_is_found_too(here: Site, undisturbed: dict[int, Outcome], world: int) -> None:
    outcome = train(here, f"optimizer-{world}", *COMPARING, world=world, steps=STEPS, extra=("--spoil", "1:9"))
    assert_equal(outcome, undisturbed[world], faults=0, lost=EVERY)
    assert named(outcome) == [(1, 12)]


@pytest.mark.parametrize(
    "kill",
    [
        Fault(2, 6, "forward"),  # not in its reduction: who then is ahead alone gives its state to all, flip and all
        Fault(2, 7, "commit"),
        Fault(2, 4, "form"),
        Fault(1, 4, "form"),
        Fault(0, 5, "forward"),
    ],
    ids=["before", "as they compare", "as they go back", "itself", "in the same step"],
)
def test_a_flip_and_a_kill_together(here: Site, undisturbed: dict[int, Outcome], kill: Fault) -> None:
    faults = [flip(1, 5, "commit"), kill]
    name = f"killed-{kill.rank}-{kill.step}-{kill.at}"
    outcome = train(here, name, *COMPARING, world=3, steps=STEPS, faults=faults, extra=PACED)
    assert_equal(outcome, undisturbed[3], faults=2, lost=EVERY)
    assert named(outcome) == [(1, 8)]


def test_a_comparison_at_every_step_raises_no_false_alarm(here: Site, undisturbed: dict[int, Outcome]) -> None:
    outcome = train(here, "quiet", "--digest-every", "1", world=3, steps=STEPS)
    assert_equal(outcome, undisturbed[3], faults=0)
    assert outcome.ledger.incidents == []


def test_what_each_rank_has_for_itself_is_no_corruption(here: Site) -> None:
    outcome = train(here, "own", "--digest-every", "1", world=2, steps=8, extra=("--own-buffers",))
    assert outcome.code == 0, outcome.output
    assert outcome.ledger.incidents == []
    assert len({str(final["digest"]) for final in outcome.finals.values()}) == 2


def test_kills_alone_raise_no_alarm(here: Site, undisturbed: dict[int, Outcome]) -> None:
    kills = [Fault(0, 3, "reduce"), Fault(1, 7, "commit"), Fault(2, 8, "data"), Fault(0, 15, "update")]
    outcome = train(here, "kills", "--digest-every", "2", "--standby", "1", world=3, steps=STEPS, faults=kills)
    assert_equal(outcome, undisturbed[3], faults=len(kills))
    assert named(outcome) == []


def test_replicas_that_differ_again_end_the_job_with_a_diagnosis(here: Site) -> None:
    outcome = train(here, "drift", *COMPARING, world=2, steps=STEPS, extra=("--drift",))
    assert outcome.code == 1, outcome.output
    assert "the replicas differ again" in outcome.output
    assert "rank 0 (node0.w0 on node0) and rank 1 (node0.w1 on node0)" in outcome.output
    assert "model.0.weight" in outcome.output


@pytest.mark.parametrize("mode", ["hsdp", "tp_dp", "pp_dp"])
def test_replicas_of_shards_are_compared(here: Site, mode: str) -> None:
    script, extra = "train_parallel.py", ("--mode", mode)
    plain = train(here, f"plain-{mode}", world=4, steps=12, script=script, extra=extra)
    faults = [flip(3, 2), flip(0, 6, "commit"), Fault(1, 9, "backward")]
    disturbed = train(here, mode, *COMPARING, world=4, steps=12, script=script, extra=extra, faults=faults)
    assert_equal(disturbed, plain, faults=3, lost=EVERY)
    assert named(disturbed) == [(3, 4), (0, 8)]
