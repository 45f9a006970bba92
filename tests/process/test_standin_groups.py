"""Whole jobs over process groups of a device's own, as NCCL's are: they connect and run late, hang, are aborted."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
from tests.process.launching import Site, site
from tests.process.training import Fault, Outcome, assert_equal, train
from tests.standin.building import Unbuildable, library

WORLD, STEPS = 2, 16
BOUND = "15s"
"""Of hangs: longer than a busy machine keeps a rank from its processor."""
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


def processes(outcome: Outcome) -> list[dict[str, str]]:
    """Worker of each rank in each generation."""
    return [dict(formed.workers) for formed in outcome.ledger.generations]


@pytest.mark.parametrize("where", ["body", "after"])
def test_the_rank_of_a_device_that_fails_for_good_goes_on_elsewhere_and_the_others_groups_are_aborted(
    here: Site, undisturbed: Outcome, where: str
) -> None:
    outcome = train(
        here, f"broken-{where}", world=WORLD, steps=STEPS, extra=("--break-device", f"1:5:{where}"), env=LATE
    )
    assert outcome.code == 0, outcome.output
    assert outcome.finals == undisturbed.finals
    assert {at: loss for at, loss in outcome.losses.items() if undisturbed.losses[at] != loss} == {}
    assert [incident.ranks for incident in outcome.ledger.incidents] == [[1]]
    first, *_, last = processes(outcome)
    assert {rank for rank in last if last[rank] != first[rank]} == {"1"}


@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("how", ["hang", "error"])
def test_groups_that_hang_or_have_an_error_are_formed_anew_and_nobody_is_ended(
    here: Site, undisturbed: Outcome, how: str, rank: int
) -> None:
    """A collective that never begins, and one whose group says so."""
    extra, name = ("--spoil-groups", f"{rank}:5:{how}"), f"{how}-{rank}"
    # An error is told within a second: a bound that is never reached shows that nothing else has seen it.
    flags = () if how == "error" else ("--hang-timeout", BOUND)
    outcome = train(here, name, *flags, world=WORLD, steps=STEPS, extra=extra, env=LATE)
    assert outcome.code == 0, outcome.output
    assert outcome.finals == undisturbed.finals
    assert outcome.losses == undisturbed.losses
    first, *others = processes(outcome)
    assert others == [first], "formed anew once, of the same processes"
    kind = "collective" if how == "error" else "standstill"
    assert [incident.kind for incident in outcome.ledger.incidents] == [kind]


@pytest.mark.parametrize("how", ["hold connect", "die in connect"])
def test_a_connection_that_is_never_made_ends_with_the_abort(here: Site, undisturbed: Outcome, how: str) -> None:
    """After a kill, groups are connected anew: one rank waits in that for ever, or is killed in it.

    It is spoilt a step before the kill: no other connection is made there, and the other rank comes to its next step
    only behind this one's sums. Within one step the kill may come first.
    """
    extra, faults = ("--spoil-groups", f"1:4:{how}"), [Fault(0, 5, "backward")]
    flags = ("--hang-timeout", BOUND)
    name = how.replace(" ", "-")
    outcome = train(here, name, *flags, world=WORLD, steps=STEPS, extra=extra, faults=faults, env=LATE)
    assert_equal(outcome, undisturbed, faults=len(faults))
    first, *_, last = processes(outcome)
    assert {rank for rank in last if last[rank] != first[rank]} == ({"0"} if how == "hold connect" else {"0", "1"})


@pytest.mark.parametrize("times", [1, 2])
def test_one_that_skips_a_collective_is_replaced_only_if_it_does_so_again(
    here: Site, undisturbed: Outcome, times: int
) -> None:
    extra = ("--also-reduce", "--skip", f"1:5:{times}")
    flags = ("--hang-timeout", BOUND)
    outcome = train(here, f"skipped-{times}", *flags, world=WORLD, steps=STEPS, extra=extra, env=LATE)
    assert outcome.code == 0, outcome.output
    assert outcome.finals == undisturbed.finals
    assert outcome.losses == undisturbed.losses
    changes = [{rank for rank in now if now[rank] != then[rank]} for then, now in pairwise(processes(outcome))]
    assert changes == [set(), {"1"}][:times]


def test_a_collective_in_a_graph_is_refused_before_the_first_step(here: Site) -> None:
    outcome = train(here, "captured", world=WORLD, steps=STEPS, extra=("--also-reduce", "--capture"), env=LATE)
    assert outcome.code == 1, outcome.output
    assert "allreduce was called while a graph of standin:" in outcome.output
    assert "record the parts between collectives" in outcome.output
    assert outcome.losses == {}
