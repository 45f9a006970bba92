"""Numbers of replicas, which of them go, where new ones run, whether they pay: decided without a job."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.core.ids import Generation, NodeId, Rank, StepNo, WorkerId
from regrow.core.messages import facts
from regrow.membership.pace import AHEAD_S, LEAST_AHEAD, MOST_GUESSED, Pace
from regrow.membership.roster import RankSlot
from regrow.membership.scaling import (
    Limits,
    ReplicaCandidate,
    exposed_ranks,
    first_slots,
    leavers,
    new_slots,
    replicas_of,
    unlike_places,
    weigh,
)

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


def places(seats: list[RankSlot] | None) -> list[tuple[str, int, int]]:
    return [(seat.node, seat.rank, seat.local_rank) for seat in seats or []]


@pytest.mark.parametrize(
    ("replicas", "why"),
    [
        (0, "at least one replica"),
        (-1, "at least one replica"),
        (1, "fewer than the minimum of 2"),
        (9, "more than the maximum of 8"),
        (5, "none of the allowed sizes (2, 4, 8)"),
    ],
)
def test_a_size_that_cannot_be_is_refused_with_its_reason(replicas: int, why: str) -> None:
    assert why in Limits(2, 8, sizes=(2, 4, 8)).refusal(replicas)


def test_the_largest_allowed_size_that_has_room_is_taken() -> None:
    limits = Limits(2, 8, sizes=(2, 4, 8))
    assert [limits.fit(room) for room in (1, 2, 3, 4, 7, 8, 99)] == [None, 2, 2, 4, 4, 8, 8]
    assert [limits.next_above(size) for size in (2, 4, 8)] == [4, 8, None]
    assert not limits.refusal(4)


def test_ranks_that_are_no_whole_replicas_are_refused() -> None:
    assert replicas_of(6, 2) == 3
    assert "not a multiple of the unit: a replica is 4 ranks" in str(replicas_of(6, 4))


def test_growing_pays_when_the_stay_brings_more_than_the_pause_takes() -> None:
    assert weigh(2, 3, stay=10.0, pause=1.0) == weigh(4, 6, stay=10.0, pause=1.0)
    assert weigh(2, 3, stay=10.0, pause=1.0).gain == pytest.approx(5.0)
    assert weigh(2, 3, stay=10.0, pause=4.9).grows
    assert not weigh(2, 3, stay=10.0, pause=5.1).grows


def test_broken_replicas_go_first_then_those_on_draining_nodes_then_those_behind_then_the_highest() -> None:
    everybody = [
        ReplicaCandidate(0),
        ReplicaCandidate(1, draining=True),
        ReplicaCandidate(2, newest=False),
        ReplicaCandidate(3, dead=True),
        ReplicaCandidate(4),
    ]
    assert [sorted(leavers(everybody, count)) for count in range(5)] == [[], [3], [1, 3], [1, 2, 3], [1, 2, 3, 4]]


def test_the_first_world_fills_nodes_in_their_order() -> None:
    assert places(first_slots(4, 2, {A: 2, B: 2})) == [("a", 0, 0), ("a", 1, 1), ("b", 2, 0), ("b", 3, 1)]
    assert places(first_slots(2, 1, {A: 4, B: 4})) == [("a", 0, 0), ("b", 1, 0)]


def test_where_a_node_is_missing_the_others_take_its_ranks_evenly() -> None:
    seats = places(first_slots(4, 1, {A: 3, B: 3}))
    assert [node for node, _, _ in seats] == ["a", "a", "b", "b"]
    assert first_slots(4, 2, {A: 2}) is None


def test_newcomers_fill_nodes_evenly_in_the_lowest_free_slots() -> None:
    seats = new_slots([Rank(4), Rank(5), Rank(6)], 1, {A: [3], B: [0, 2], C: []})
    assert places(seats) == [("b", 4, 0), ("a", 5, 3), ("b", 6, 2)]


def test_a_replica_stands_on_one_node_where_that_has_room() -> None:
    together = new_slots([Rank(4), Rank(5), Rank(6), Rank(7)], 2, {A: [0, 1], B: [0, 1, 2]})
    assert [(seat.node, seat.rank) for seat in together] == [("b", 4), ("b", 5), ("a", 6), ("a", 7)]
    spread = new_slots([Rank(4), Rank(5)], 2, {A: [1], B: [2]})
    assert [seat.node for seat in spread] == ["a", "b"]


def test_there_are_no_more_newcomers_than_slots() -> None:
    assert len(new_slots([Rank(1), Rank(2)], 1, {A: [0]})) == 1


def test_a_world_that_cannot_be_cut_into_replicas_is_known_by_its_parts() -> None:
    assert unlike_places(["x", "y", "x", "y"], 2) is None
    assert unlike_places(["x", "y", "x", "y"], 1) == 1
    assert unlike_places(["x", "y", "z", "y"], 2) == 2
    assert unlike_places(["", "", ""], 1) is None
    assert unlike_places(["", "y", "z"], 1) == 2, "who is being built makes the others no more alike"
    assert unlike_places(["", "y", "x", "y"], 2) is None


def commit(worker: str, generation: int, step: int, at: float, seconds: float) -> facts.WorkerCommitted:
    return facts.WorkerCommitted(WorkerId(worker), Generation(generation), StepNo(step), at, seconds)


def test_a_planned_halt_is_far_enough_ahead_for_its_order_to_arrive() -> None:
    pace, seconds = Pace(), 1 / 64
    pace.committed(commit("a", 1, 9, 7.0 - seconds, seconds), 99.0)
    pace.committed(commit("a", 1, 10, 7.0, seconds), 100.0)
    assert pace.ahead(100.0) == math.ceil(AHEAD_S / seconds)
    assert pace.ahead(100.0 + 10.5 * seconds) == math.ceil(AHEAD_S / seconds) + 10, "and by what has passed since"
    pace.committed(commit("a", 1, 11, 12.0, 5.0), 105.0)
    pace.committed(commit("a", 1, 12, 17.0, 5.0), 110.0)
    assert pace.ahead(110.0) == LEAST_AHEAD
    pace.committed(commit("a", 2, 3, 18.0, 0.5), 111.0)
    assert pace.ahead(111.0) == LEAST_AHEAD, "another generation may begin with an older step"


def test_a_planned_halt_is_not_far_ahead_while_only_bodies_are_known() -> None:
    """Bodies of a millisecond with a third of a second between them: 300 steps ahead would be a minute and a half."""
    pace = Pace()
    for worker in ("a", "b"):
        pace.committed(commit(worker, 1, 0, 7.0, 0.001), 100.0)
    assert pace.ahead(100.3) == MOST_GUESSED
    pace.committed(commit("a", 1, 1, 7.3, 0.001), 100.3)
    for worker in ("a", "b"):
        pace.committed(commit(worker, 1, 2, 7.6, 0.001), 100.6)
    assert pace.ahead(100.6) == LEAST_AHEAD


def test_a_step_takes_as_long_as_it_is_from_one_to_the_next() -> None:
    pace = Pace()
    pace.committed(commit("a", 1, 0, 5.0, 0.001), 100.0)
    pace.committed(commit("b", 1, 0, 905.0, 0.001), 100.0)
    for step in (2, 4, 6):
        pace.committed(commit("b", 1, step, 905.0 + step / 2, 0.001), 100.2)
        pace.committed(commit("a", 1, step, 5.0 + step / 2, 0.001), 100.2)
    assert pace.step_s == pytest.approx(0.5), "whenever it is heard of, and on whichever clock"
    assert pace.ahead(100.2) == LEAST_AHEAD
    pace.committed(commit("a", 2, 7, 60.0, 0.001), 160.0)
    assert pace.step_s == pytest.approx(0.5), "the first of a generation does not say what lies between two"


def test_a_pause_between_two_steps_is_not_taken_for_the_pace() -> None:
    pace = Pace()
    for step, at in enumerate((1.0, 1.1, 1.2, 1.3, 61.3)):
        pace.committed(commit("a", 1, step, at, 0.1), 100.0 + at)
    assert pace.until(3) == pytest.approx(0.3)
    assert pace.patience(3) > 60.0, "but there may be another"


def standing(seats: list[RankSlot]) -> dict[Rank, NodeId]:
    return {seat.rank: seat.node for seat in seats}


def exposed(homes: dict[Rank, NodeId], unit: int, racks: dict[NodeId, str]) -> list[Rank]:
    return exposed_ranks({rank: f"part {rank % unit}" for rank in homes}, homes, racks)


def test_after_a_restart_and_a_shrink_both_holders_of_a_part_do_not_stand_on_one_node() -> None:
    seats = first_slots(6, 2, {A: 3, B: 3}, unit=2)
    assert places(seats) == [("a", 0, 0), ("a", 1, 1), ("b", 2, 0), ("b", 3, 1), ("a", 4, 2), ("b", 5, 2)]
    replicas = [ReplicaCandidate(n, homes=homes) for n, homes in enumerate((("a", "a"), ("a", "b"), ("b", "b")))]
    assert leavers(replicas, 1) == {1}, "not the highest: the other two would stand together"
    assert leavers([ReplicaCandidate(0, homes=("a", "a")), *replicas[1:]], 2) == {1, 2}


@given(st.data())
def test_holders_of_a_part_are_kept_apart_through_restarts_shrinks_growth_and_moves(data: st.DataObject) -> None:
    """If each of two or more racks has room for a whole replica, and replicas of several."""
    unit = data.draw(st.sampled_from([1, 2, 3]), "unit")
    names = [NodeId(f"n{number}") for number in range(data.draw(st.integers(2, 5), "nodes"))]
    racks = {node: f"rack {number % 2}" if number < 2 else f"rack {number % 3}" for number, node in enumerate(names)}
    slots = {node: data.draw(st.integers(unit, 2 * unit + 1), node) for node in names}
    room = sum(most // unit for most in slots.values())
    size = data.draw(st.integers(2, room), "replicas")
    nproc = data.draw(st.sampled_from([unit, 2 * unit, unit + 1]), "nproc")
    seats = first_slots(size * unit, nproc, slots, unit=unit, domains=racks)
    if seats is None:
        return  # what is left on the nodes is less than a replica on each, and not enough together
    homes = standing(seats)
    if nproc % unit or any(most < nproc for most in slots.values()):
        assert len(homes) == size * unit
    fair = not exposed(homes, unit, racks)
    # A shrink: some leave, the others are numbered anew.
    count = data.draw(st.integers(0, size - 2), "leave")
    replicas = [
        ReplicaCandidate(number, homes=tuple(racks[homes[Rank(number * unit + place)]] for place in range(unit)))
        for number in range(size)
    ]
    gone = leavers(replicas, count)
    assert len(gone) == count
    staying = [number for number in range(size) if number not in gone]
    homes = {
        Rank(new * unit + place): homes[Rank(old * unit + place)]
        for new, old in enumerate(staying)
        for place in range(unit)
    }
    if fair and not exposed(homes, unit, racks):
        # A move, or growth: who comes does not undo it, whoever else is gone meanwhile.
        lost = Rank(data.draw(st.integers(0, len(homes) - 1), "lost"))
        free = {node: range(slots[node] - sum(home == node for home in homes.values())) for node in names}
        held = {rank: home for rank, home in homes.items() if rank != lost}
        for seat in new_slots([lost], unit, free, domains=racks, held=held):
            alone = {racks[home] for rank, home in held.items() if rank % unit == lost % unit}
            open_ = {racks[node] for node in names if len(free[node])}
            if len(alone) == 1 and open_ - alone:
                assert racks[seat.node] not in alone
    if unit == 1 or all(len(set(each.homes)) == 1 for each in replicas):
        kinds = {each.homes for each in replicas}
        assert len(kinds) == 1 or not exposed(homes, unit, racks), "whole replicas of two racks can always be kept"


@pytest.mark.parametrize(
    ("world", "nproc", "unit", "slots", "expected"),
    [
        (4, 3, 2, {A: 3, B: 3}, [("a", 0, 0), ("a", 1, 1), ("b", 2, 0), ("b", 3, 1)]),
        (4, 4, 2, {A: 4, B: 4}, [("a", 0, 0), ("a", 1, 1), ("b", 2, 0), ("b", 3, 1)]),
        (3, 4, 1, {A: 4, B: 4}, [("a", 0, 0), ("a", 1, 1), ("b", 2, 0)]),
        (4, 4, 2, {A: 4, B: 0}, [("a", 0, 0), ("a", 1, 1), ("a", 2, 2), ("a", 3, 3)]),
    ],
)
def test_a_world_that_starts_again_smaller_is_not_put_where_a_node_has_all_of_a_part(
    world: int, nproc: int, unit: int, slots: dict[NodeId, int], expected: list[tuple[str, int, int]]
) -> None:
    seats = first_slots(world, nproc, slots, unit=unit)
    assert places(seats) == expected
    if slots[B]:
        homes = standing(seats or [])
        assert len({homes[rank] for rank in homes if rank % unit == 0}) == 2


def test_a_rack_counts_as_one_place() -> None:
    racks = {A: "left", B: "left", C: "right"}
    seats = first_slots(4, 2, {A: 2, B: 2, C: 2}, unit=2, domains=racks)
    assert {racks[seat.node] for seat in seats or []} == {"left", "right"}
