"""Whole jobs over process groups of a device's own, as NCCL's are: they connect and run late, hang, are aborted."""

import functools
import json
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from tests.process import kill_lists
from tests.process.launching import Site
from tests.process.training import Fault, Outcome, assert_equal, train

WORLD, STEPS = 2, 16
BOUND = "15s"
"""Of hangs: longer than a busy machine keeps a rank from its processor."""
STAGES = ("forward", "backward", "reduce", "update")
LATE = {"REGROW_TEST_DEVICE": "standin", "STANDIN_GROUPS": "1", "STANDIN_LAG_US": "50", "STANDIN_QUEUE": "48"}
"""Each launch takes a while, and a step has more of them than a stream holds."""
pytestmark = pytest.mark.timeout(1200)  # the first of all builds the device


@pytest.mark.parametrize("standbys", [0, 1])
def test_any_rank_of_ddp_killed_at_every_stage(standin_site: Site, on_the_processor: Outcome, standbys: int) -> None:
    kills = [(stage, rank) for stage in STAGES for rank in range(WORLD)]
    faults = [Fault(rank, 1 + at + at // 2, stage) for at, (stage, rank) in enumerate(kills)]
    flags = ("--standby", str(standbys))
    outcome = train(standin_site, f"killed-{standbys}", *flags, world=WORLD, steps=STEPS, faults=faults, env=LATE)
    # As in test_standin.py: a device's numbers are read behind the gate, to which who dies in a reduction never comes.
    unsaid = {(fault.step, fault.rank) for fault in faults if fault.at == "reduce"}
    assert_equal(outcome, on_the_processor, faults=len(faults), unsaid=unsaid)
    if standbys:
        assert "standbys wait before the script (--warmth imports): ranks use all devices" in outcome.output


PARALLEL = {**LATE, "STANDIN_DEVICES": "4"}
Reference = Callable[[str], Outcome]


def parallel(site: Site, name: str, mode: str, *flags: str, faults: Sequence[Fault] = ()) -> Outcome:
    """A training of four ranks, each on a device of its own."""
    return train(
        site,
        f"{mode}-{name}",
        *flags,
        world=kill_lists.WORLD,
        steps=kill_lists.STEPS,
        faults=list(faults),
        extra=("--mode", mode),
        script="train_parallel.py",
        env=PARALLEL,
    )


@pytest.fixture(scope="module")
def reference(standin_site: Site) -> Reference:
    """The run of a mode that nobody disturbs, on the same devices; made once."""

    @functools.cache
    def of(mode: str) -> Outcome:
        outcome = parallel(standin_site, "undisturbed", mode)
        assert outcome.code == 0, outcome.output
        assert len(outcome.losses) == kill_lists.WORLD * kill_lists.STEPS
        return outcome

    return of


@pytest.mark.parametrize("mode", ["fsdp2", "hsdp", "tp_dp", "pp_dp"])
def test_any_rank_killed_at_every_stage_in_each_parallelism(
    standin_site: Site, reference: Reference, mode: str
) -> None:
    # No rank of FSDP2 alone has what another has: a copy of each state is kept beside it, which may be a step older.
    flags, lost = (("--buddy-every", "1"), 1) if mode == "fsdp2" else ((), None)
    faults = kill_lists.EVERY_STAGE_AND_RANK
    outcome = parallel(standin_site, "killed", mode, *flags, faults=faults)
    assert_equal(outcome, reference(mode), faults=len(faults), lost=lost)


@pytest.mark.parametrize("mode", ["hsdp", "pp_dp"])
@pytest.mark.parametrize("faults", [kill_lists.AGAIN, kill_lists.ROLL], ids=["again", "roll"])
def test_killed_during_a_recovery_and_between_the_vote_and_the_update(
    standin_site: Site, reference: Reference, mode: str, faults: list[Fault]
) -> None:
    outcome = parallel(standin_site, f"{len(faults)}-kills", mode, faults=faults)
    assert_equal(outcome, reference(mode), faults=len(faults))


def processes(outcome: Outcome) -> list[dict[str, str]]:
    """Worker of each rank in each generation."""
    return [dict(formed.workers) for formed in outcome.ledger.generations]


@pytest.mark.parametrize("where", ["body", "after"])
def test_the_rank_of_a_device_that_fails_for_good_goes_on_elsewhere_and_the_others_groups_are_aborted(
    standin_site: Site, on_the_processor: Outcome, where: str
) -> None:
    outcome = train(
        standin_site, f"broken-{where}", world=WORLD, steps=STEPS, extra=("--break-device", f"1:5:{where}"), env=LATE
    )
    assert outcome.code == 0, outcome.output
    assert outcome.finals == on_the_processor.finals
    assert {at: loss for at, loss in outcome.losses.items() if on_the_processor.losses[at] != loss} == {}
    assert [incident.ranks for incident in outcome.ledger.incidents] == [[1]]
    first, *_, last = processes(outcome)
    assert {rank for rank in last if last[rank] != first[rank]} == {"1"}


@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("how", ["hang", "error"])
def test_groups_that_hang_or_have_an_error_are_formed_anew_and_nobody_is_ended(
    standin_site: Site, on_the_processor: Outcome, how: str, rank: int
) -> None:
    """A collective that never begins, and one whose group says so."""
    extra, name = ("--spoil-groups", f"{rank}:5:{how}"), f"{how}-{rank}"
    # An error is told within a second: a bound that is never reached shows that nothing else has seen it.
    flags = () if how == "error" else ("--hang-timeout", BOUND)
    outcome = train(standin_site, name, *flags, world=WORLD, steps=STEPS, extra=extra, env=LATE)
    assert outcome.code == 0, outcome.output
    assert outcome.finals == on_the_processor.finals
    assert outcome.losses == on_the_processor.losses
    first, *others = processes(outcome)
    assert others == [first], "formed anew once, of the same processes"
    kind = "collective" if how == "error" else "standstill"
    assert [incident.kind for incident in outcome.ledger.incidents] == [kind]


@pytest.mark.parametrize("how", ["hold connect", "die in connect"])
def test_a_connection_that_is_never_made_ends_with_the_abort(
    standin_site: Site, on_the_processor: Outcome, how: str
) -> None:
    """After a kill, groups are connected anew: one rank waits in that for ever, or is killed in it.

    It is spoilt a step before the kill: no other connection is made there, and the other rank comes to its next step
    only behind this one's sums. Within one step the kill may come first.
    """
    extra, faults = ("--spoil-groups", f"1:4:{how}"), [Fault(0, 5, "backward")]
    flags = ("--hang-timeout", BOUND)
    name = how.replace(" ", "-")
    outcome = train(standin_site, name, *flags, world=WORLD, steps=STEPS, extra=extra, faults=faults, env=LATE)
    assert_equal(outcome, on_the_processor, faults=len(faults))
    first, *_, last = processes(outcome)
    assert {rank for rank in last if last[rank] != first[rank]} == ({"0"} if how == "hold connect" else {"0", "1"})


@pytest.mark.parametrize("times", [1, 2])
def test_one_that_skips_a_collective_is_replaced_only_if_it_does_so_again(
    standin_site: Site, on_the_processor: Outcome, times: int
) -> None:
    extra = ("--also-reduce", "--skip", f"1:5:{times}")
    flags = ("--hang-timeout", BOUND)
    outcome = train(standin_site, f"skipped-{times}", *flags, world=WORLD, steps=STEPS, extra=extra, env=LATE)
    assert outcome.code == 0, outcome.output
    assert outcome.finals == on_the_processor.finals
    assert outcome.losses == on_the_processor.losses
    changes = [{rank for rank in now if now[rank] != then[rank]} for then, now in pairwise(processes(outcome))]
    assert changes == [set(), {"1"}][:times]


def test_the_last_copy_is_freed_where_a_launch_keeps_pythons_lock_behind_a_dead_ranks_sum(
    standin_site: Site, on_the_processor: Outcome
) -> None:
    """The survivor hears no order, as its launch waits for room in the queue: its groups are aborted without Python."""
    extra = ("--launch-holding", "100", "--die-behind", "1:5")
    outcome = train(standin_site, "locked", world=WORLD, steps=STEPS, extra=extra, env=LATE)
    # Numbers of the step before are read at the gate, to which the dead one does not come.
    assert_equal(outcome, on_the_processor, faults=0, unsaid={(4, 1)})
    assert "something keeps Python's lock there" in outcome.output
    first, *_, last = processes(outcome)
    assert {rank for rank in last if last[rank] != first[rank]} == {"1"}


def test_groups_of_gloo_and_groups_with_options_stand_beside_those_of_the_device(
    standin_site: Site, on_the_processor: Outcome
) -> None:
    """They are formed anew after a kill, and the options count each time."""
    faults = [Fault(1, 4, "forward"), Fault(0, 9, "reduce")]
    outcome = train(standin_site, "own", world=WORLD, steps=STEPS, faults=faults, extra=("--own-groups",), env=LATE)
    assert_equal(outcome, on_the_processor, faults=len(faults))
    for rank in range(WORLD):
        found = json.loads((standin_site.folder / f"groups.{rank}.json").read_text())
        assert found["backend"] == "gloo"
        (name, given), *again = found["options"]
        assert name != ""
        assert given == "urgent"
        assert all(each == [name, given] for each in again)


def test_a_collective_in_a_graph_is_refused_before_the_first_step(standin_site: Site) -> None:
    outcome = train(standin_site, "captured", world=WORLD, steps=STEPS, extra=("--also-reduce", "--capture"), env=LATE)
    assert outcome.code == 1, outcome.output
    assert "allreduce was called while a graph of standin:" in outcome.output
    assert "record the parts between collectives" in outcome.output
    assert outcome.losses == {}
