"""Elections of coordinators under random schedules: never do two decide, and after a loss one does again."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.schedules.test_membership_schedules import schedules, soak

from regrow.cli import main
from regrow.membership.succession.voters import VOTE_LEASE as LEASE
from regrow.membership.succession.voters import Voters
from regrow_lab.sim.elections.faults import Conditions, ElectionFault, ElectionSchedule, How, draw_election
from regrow_lab.sim.elections.laws import Decided
from regrow_lab.sim.elections.world import ElectionWorld, election_lines, run_election
from regrow_lab.sim.invariants import InvariantBroken

END_S = 120.0


def elections(
    launchers: int,
    seed: int,
    faults: list[ElectionFault],
    *,
    lost: float = 0.0,
    slow: float = 0.0,
    witness: bool = False,
) -> ElectionWorld:
    return ElectionWorld(ElectionSchedule(launchers, seed, tuple(faults), Conditions(lost, slow), witness))


@pytest.mark.parametrize("hundred", range(10))
def test_a_hundred_elections_by_number(hundred: int) -> None:
    """Never two coordinators, terms never go back, and somebody is elected in time once all is well again."""
    for number in range(100 * hundred, 100 * (hundred + 1)):
        run_election(number)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_soak_elections_by_number() -> None:
    for number in range(1000, 1000 + max(10_000, soak())):
        run_election(number)


def test_an_election_that_breaks_a_law_is_seen_again_by_its_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Voters, "may_decide", lambda self, now: True)
    with pytest.raises(InvariantBroken, match="two coordinators decide") as failed:
        for number in range(1000):
            run_election(number)
    (said,) = failed.value.__notes__
    assert said == f"to replay this run: regrow sim replay election:{number}"
    assert main(said.split("regrow ")[1].split()) == 1
    seen = capsys.readouterr().out.splitlines()
    assert seen == list(election_lines(draw_election(number)))
    assert seen[-1] == f"BROKEN: InvariantBroken: {failed.value}"


def test_an_election_that_ends_well_is_printed_too_and_one_without_a_number_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["sim", "replay", "election:11"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("ended well: ")
    assert main(["sim", "replay", "election:11", "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=ElectionSchedule) == draw_election(11)
    assert main(["sim", "replay", "election:x"]) == 2
    assert "is not an election" in capsys.readouterr().err


@st.composite
def worlds(draw: st.DrawFn) -> ElectionWorld:
    launchers = draw(st.integers(3, 8))
    some = st.frozensets(st.integers(0, launchers - 1), min_size=1, max_size=launchers - 1)
    event = st.builds(
        ElectionFault, st.floats(1, 90), st.sampled_from(["dies", "pauses", "cut"]), some, st.floats(0.1, 4 * LEASE)
    )
    events = draw(st.lists(event, max_size=6))
    loss, slow = draw(st.sampled_from([0.0, 0.05, 0.3])), draw(st.sampled_from([0.0, 0.02, 0.2]))
    return elections(launchers, draw(st.integers(0, 2**32)), events, lost=loss, slow=slow)


def assert_one_after_the_other(decisions: list[Decided]) -> None:
    """A term is one launcher's, and nobody decides once one of a later term has."""
    assert [decision.term for decision in decisions] == sorted(decision.term for decision in decisions)
    assert len({(decision.term, decision.by) for decision in decisions}) == len({d.term for d in decisions})


@given(worlds())
@schedules(150)
def test_never_do_two_coordinators_decide(world: ElectionWorld) -> None:
    world.run(END_S)
    assert_one_after_the_other(world.decisions)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@given(worlds())
@schedules(max(1000, soak()))
def test_never_do_two_coordinators_decide_in_many_schedules(world: ElectionWorld) -> None:
    world.run(END_S)
    assert_one_after_the_other(world.decisions)


@st.composite
def witnessed(draw: st.DrawFn) -> ElectionWorld:
    launchers = draw(st.integers(2, 4))
    some = st.frozensets(st.integers(0, launchers - 1), min_size=1, max_size=launchers - 1)
    event = st.builds(
        ElectionFault,
        st.floats(1, 90),
        st.sampled_from(["dies", "pauses", "cut", "off"]),
        some,
        st.floats(0.1, 4 * LEASE),
    )
    events = draw(st.lists(event, max_size=6))
    loss, slow = draw(st.sampled_from([0.0, 0.05, 0.3])), draw(st.sampled_from([0.0, 0.02, 0.2]))
    return elections(launchers, draw(st.integers(0, 2**32)), events, lost=loss, slow=slow, witness=True)


@given(witnessed())
@schedules(120)
def test_never_do_two_coordinators_decide_that_a_witness_may_elect(world: ElectionWorld) -> None:
    world.run(END_S)
    assert_one_after_the_other(world.decisions)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@given(witnessed())
@schedules(max(1000, soak()))
def test_never_do_two_coordinators_decide_that_a_witness_may_elect_in_many_schedules(world: ElectionWorld) -> None:
    world.run(END_S)
    assert_one_after_the_other(world.decisions)


@given(st.integers(0, 2**32), st.floats(15, 30), st.sampled_from([["dies"], ["cut", "off"], ["pauses"]]))
@schedules(25)
def test_of_two_launchers_with_a_witness_the_one_that_is_left_is_elected(seed: int, at: float, how: list[How]) -> None:
    world = elections(2, seed, [ElectionFault(at, each, frozenset({0}), 1000.0) for each in how], witness=True)
    world.run(at + 4 * LEASE)
    assert_one_after_the_other(world.decisions)
    assert (world.decisions[-1].by, world.decisions[-1].term) == (1, 2)
    again = next(decision.at for decision in world.decisions if decision.term > 1)
    assert again - at < 3 * LEASE


@given(st.integers(0, 2**32), st.integers(0, 1))
@schedules(25)
def test_where_only_the_link_between_two_is_cut_or_the_disk_is_gone_the_coordinator_stays(seed: int, off: int) -> None:
    how: How = "off" if off else "cut"
    world = elections(2, seed, [ElectionFault(20.0, how, frozenset({off}), 1000.0)], witness=True)
    world.run(20.0 + 4 * LEASE)
    assert {decision.by for decision in world.decisions} == {0}
    assert world.decisions[-1].at > 20.0 + 3 * LEASE


def succeeded(launchers: int, seed: int, at: float, how: How) -> ElectionWorld:
    """The first coordinator is lost then, and another has its place within two leases."""
    world = elections(launchers, seed, [ElectionFault(at, how, frozenset({0}), 1000.0)])
    world.run(at + 2 * LEASE)
    assert_one_after_the_other(world.decisions)
    assert world.decisions[-1].term > 1, world.decisions[-1]
    return world


@given(
    st.integers(3, 8),
    st.integers(0, 2**32),
    st.floats(5, 20),
    st.sampled_from(["dies", "cut", "pauses"]),
)
@schedules(150)
def test_a_coordinator_that_is_lost_has_a_successor_within_two_leases(
    launchers: int, seed: int, at: float, how: How
) -> None:
    world = succeeded(launchers, seed, at, how)
    if how == "dies":
        again = next(decision.at for decision in world.decisions if decision.term > 1)
        assert again - at < LEASE / 2, "who is known to have ended is not waited for"


@pytest.mark.parametrize(
    ("launchers", "seed", "at", "how"),
    [
        (6, 1644, 14.79174127718753, "dies"),
        (5, 2840, 17.729228204711415, "dies"),
        (7, 1776, 13.74875952749742, "cut"),
        (5, 578, 7.451763973081124, "pauses"),
    ],
)
def test_who_is_elected_is_followed_by_all_though_others_stood_at_the_same_moment(
    launchers: int, seed: int, at: float, how: How
) -> None:
    """Those that it had not reached yet voted for a third one, and could follow it no more: nobody might decide."""
    succeeded(launchers, seed, at, how)


def test_of_two_launchers_the_one_that_is_left_elects_nobody() -> None:
    world = elections(2, 0, [ElectionFault(5.0, "dies", frozenset({0}))])
    world.run(END_S)
    assert {decision.term for decision in world.decisions} == {1}


@pytest.mark.parametrize("silent", [1, 2])
def test_a_coordinator_decides_on_while_those_that_are_silent_could_elect_nobody(silent: int) -> None:
    """Of five voters three elect. Those that are lost one after the other are voters no more."""
    events = [ElectionFault(10.0 + 30.0 * turn, "cut", frozenset({turn + 1}), 1000.0) for turn in range(3)]
    world = elections(5, silent, events)
    world.run(END_S)
    assert {decision.by for decision in world.decisions} == {0}
    gaps = [b.at - a.at for a, b in zip(world.decisions, world.decisions[1:], strict=False)]
    assert max(gaps) < 1.0


def test_a_coordinator_that_most_voters_have_left_decides_nothing_more() -> None:
    world = elections(5, 1, [ElectionFault(10.0, "cut", frozenset({1, 2, 3}), 1000.0)])
    world.run(END_S)
    assert_one_after_the_other(world.decisions)
    assert max(decision.at for decision in world.decisions if decision.by == 0) <= 10.0 + LEASE
    assert world.decisions[-1].by in (1, 2, 3)


def test_when_most_launchers_end_at_once_the_coordinator_goes_on() -> None:
    """Nothing listens at their addresses any more, so they have elected nobody."""
    world = elections(5, 1, [ElectionFault(10.0, "dies", frozenset({1, 2, 3}))])
    world.run(END_S)
    assert {decision.by for decision in world.decisions} == {0}
    assert world.decisions[-1].at > END_S - 1
