"""Ranks of a group after the world has changed its size. Pure.

Ranks are numbered replica by replica: `rank // unit` is the replica, `rank % unit` the place in it. A group of the same
places of all replicas follows the world; a group inside a single replica stays with it. While there is only one replica
the ranks do not show which of these two kinds a group is: then the caller must know.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankInWorld:
    """A rank, and the size of the world in which it has this number."""

    rank: int
    world: int


def spans(ranks: Sequence[int], rank_in_world: RankInWorld, unit: int) -> bool:
    """True if a group certainly has the same places of all replicas, of which there are several."""
    return rank_in_world.world > unit and list(ranks) == _across(ranks, unit, rank_in_world.world)


def fixed(ranks: Sequence[int], rank_in_world: RankInWorld, unit: int, *, follows: bool | None) -> str:
    """Reason why a group cannot be kept in a world of another size, for people; empty if it can.

    Args:
        ranks: ranks of the group, in its order.
        rank_in_world: one of its ranks, and the world in which it was made.
        unit: number of ranks in one replica.
        follows: True if the group contains ranks of all replicas, False if it is inside one; None: not known.
    """
    if follows or (follows is None and spans(ranks, rank_in_world, unit)):
        return ""
    if follows is None and rank_in_world.world == unit:
        return (
            f"the group of ranks {list(ranks)} could be one of all replicas or one inside a replica, as there was only "
            "one when it was made; start with two, or take it from a device mesh"
        )
    inside = {rank // unit for rank in ranks} == {rank_in_world.rank // unit}
    return "" if inside else f"the group of ranks {list(ranks)} has neither all replicas' ranks, nor those of one"


def moved(
    ranks: Sequence[int], before: RankInWorld, after: RankInWorld, unit: int, *, follows: bool | None
) -> list[int]:
    """Ranks of the group after its worker changes from `before` to `after`; only if `fixed` gives no reason."""
    if follows or (follows is None and spans(ranks, before, unit)):
        return _across(ranks, unit, after.world)
    by = (after.rank // unit - before.rank // unit) * unit
    return [rank + by for rank in ranks]


def _across(ranks: Sequence[int], unit: int, world: int) -> list[int]:
    places = sorted({rank % unit for rank in ranks})
    return [replica * unit + place for replica in range(world // unit) for place in places]
