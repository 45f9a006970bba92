"""Which ranks a group has in a world of another size."""

import pytest

from regrow.comm.places import Seated, fixed, moved, spans


@pytest.mark.parametrize(
    "ranks, before, after, unit, follows, expected",
    [
        # The default group, and one that is known to follow, whatever the world.
        ([0], Seated(0, 1), Seated(0, 3), 1, True, [0, 1, 2]),
        ([0, 1, 2, 3], Seated(3, 4), Seated(1, 2), 1, True, [0, 1]),
        ([1], Seated(1, 2), Seated(1, 6), 2, True, [1, 3, 5]),
        # What is seen to have all replicas' ranks.
        ([0, 1, 2], Seated(2, 3), Seated(0, 2), 1, None, [0, 1]),
        ([1, 3], Seated(3, 4), Seated(1, 6), 2, None, [1, 3, 5]),
        ([0, 1, 2, 3], Seated(2, 4), Seated(0, 2), 2, None, [0, 1]),
        # What is inside a replica, which may be another one by then.
        ([2, 3], Seated(3, 4), Seated(1, 2), 2, None, [0, 1]),
        ([4, 5], Seated(4, 6), Seated(2, 8), 2, None, [2, 3]),
        ([0, 1], Seated(0, 2), Seated(0, 6), 2, False, [0, 1]),
        ([2], Seated(2, 3), Seated(1, 2), 1, None, [1]),
    ],
)
def test_groups_follow_the_world_or_stay_in_their_replica(
    ranks: list[int], before: Seated, after: Seated, unit: int, follows: bool | None, expected: list[int]
) -> None:
    assert fixed(ranks, before, unit, follows=follows) == ""
    found = moved(ranks, before, after, unit, follows=follows)
    assert found == expected
    assert after.rank in found


@pytest.mark.parametrize(
    "ranks, seated, unit, follows, reason",
    [
        ([0], Seated(0, 1), 1, None, "there was only one when it was made"),
        ([0, 1], Seated(0, 2), 2, None, "there was only one when it was made"),
        ([0, 1], Seated(0, 4), 1, None, "neither all replicas' ranks, nor those of one"),
        ([0, 1, 2], Seated(0, 4), 2, None, "neither all replicas' ranks, nor those of one"),
        ([0, 3], Seated(0, 4), 2, None, "neither all replicas' ranks, nor those of one"),
        ([1, 0], Seated(0, 2), 1, None, "neither all replicas' ranks, nor those of one"),
    ],
)
def test_what_cannot_be_told_fixes_the_world(
    ranks: list[int], seated: Seated, unit: int, follows: bool | None, reason: str
) -> None:
    assert reason in fixed(ranks, seated, unit, follows=follows)


def test_with_one_replica_nothing_is_seen_to_span_them() -> None:
    assert not spans([0, 1], Seated(0, 2), 2)
    assert spans([0, 1, 2, 3], Seated(0, 4), 2)
