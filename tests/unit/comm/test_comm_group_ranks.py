"""Ranks of a group in a world of another size."""

import pytest

from regrow.comm.group_ranks import RankInWorld, fixed, moved, spans


@pytest.mark.parametrize(
    "ranks, before, after, unit, follows, expected",
    [
        # The default group, and one that is known to follow, whatever the world.
        ([0], RankInWorld(0, 1), RankInWorld(0, 3), 1, True, [0, 1, 2]),
        ([0, 1, 2, 3], RankInWorld(3, 4), RankInWorld(1, 2), 1, True, [0, 1]),
        ([1], RankInWorld(1, 2), RankInWorld(1, 6), 2, True, [1, 3, 5]),
        # What is seen to have all replicas' ranks.
        ([0, 1, 2], RankInWorld(2, 3), RankInWorld(0, 2), 1, None, [0, 1]),
        ([1, 3], RankInWorld(3, 4), RankInWorld(1, 6), 2, None, [1, 3, 5]),
        ([0, 1, 2, 3], RankInWorld(2, 4), RankInWorld(0, 2), 2, None, [0, 1]),
        # What is inside a replica, which may be another one by then.
        ([2, 3], RankInWorld(3, 4), RankInWorld(1, 2), 2, None, [0, 1]),
        ([4, 5], RankInWorld(4, 6), RankInWorld(2, 8), 2, None, [2, 3]),
        ([0, 1], RankInWorld(0, 2), RankInWorld(0, 6), 2, False, [0, 1]),
        ([2], RankInWorld(2, 3), RankInWorld(1, 2), 1, None, [1]),
    ],
)
def test_groups_follow_the_world_or_stay_in_their_replica(
    ranks: list[int], before: RankInWorld, after: RankInWorld, unit: int, follows: bool | None, expected: list[int]
) -> None:
    assert fixed(ranks, before, unit, follows=follows) == ""
    found = moved(ranks, before, after, unit, follows=follows)
    assert found == expected
    assert after.rank in found


@pytest.mark.parametrize(
    "ranks, seated, unit, follows, reason",
    [
        ([0], RankInWorld(0, 1), 1, None, "there was only one when it was made"),
        ([0, 1], RankInWorld(0, 2), 2, None, "there was only one when it was made"),
        ([0, 1], RankInWorld(0, 4), 1, None, "neither all replicas' ranks, nor those of one"),
        ([0, 1, 2], RankInWorld(0, 4), 2, None, "neither all replicas' ranks, nor those of one"),
        ([0, 3], RankInWorld(0, 4), 2, None, "neither all replicas' ranks, nor those of one"),
        ([1, 0], RankInWorld(0, 2), 1, None, "neither all replicas' ranks, nor those of one"),
    ],
)
def test_what_cannot_be_told_fixes_the_world(
    ranks: list[int], seated: RankInWorld, unit: int, follows: bool | None, reason: str
) -> None:
    assert reason in fixed(ranks, seated, unit, follows=follows)


def test_with_one_replica_nothing_is_seen_to_span_them() -> None:
    assert not spans([0, 1], RankInWorld(0, 2), 2)
    assert spans([0, 1, 2, 3], RankInWorld(0, 4), 2)
