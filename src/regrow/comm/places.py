"""Which ranks a group has after the world has changed its size. Pure.

Ranks are numbered replica by replica: `rank // unit` is the replica, `rank % unit` the place in it. A group of the same
places of all replicas follows the world; one inside a single replica stays with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Seated:
    """A rank in a world of so many ranks."""

    rank: int
    world: int


def fixed(ranks: Sequence[int], seated: Seated, unit: int, *, follows: bool) -> str:
    """Why a group cannot be the same in a world of another size, for people; empty: it can.

    Args:
        ranks: of the group, in its order.
        seated: one of its ranks, and the world it was made in.
        unit: ranks of one replica.
        follows: it is known to have all replicas' ranks, also where there is only one replica.
    """
    if follows or list(ranks) == _across(ranks, unit, seated.world):
        lone = seated.world == unit == 1 and not follows
        return "" if not lone else "a group of one rank alone could be of all replicas, or of one"
    inside = {rank // unit for rank in ranks} == {seated.rank // unit}
    return "" if inside else f"the group of ranks {list(ranks)} has neither all replicas' ranks, nor those of one"


def moved(ranks: Sequence[int], before: Seated, after: Seated, unit: int, *, follows: bool) -> list[int]:
    """The ranks of a group of the worker that was `before` and is `after`. Only for groups that are not `fixed`."""
    across = list(ranks) == _across(ranks, unit, before.world) and before.world > unit
    if follows or across:
        return _across(ranks, unit, after.world)
    by = (after.rank // unit - before.rank // unit) * unit
    return [rank + by for rank in ranks]


def _across(ranks: Sequence[int], unit: int, world: int) -> list[int]:
    places = sorted({rank % unit for rank in ranks})
    return [replica * unit + place for replica in range(world // unit) for place in places]
