"""Decides which replica's state is wrong, from the statements of all ranks at one step boundary. Pure.

All ranks receive the same statements, so all come to the same verdict without another message.

A rank is a *witness* if its state was computed in its own memory since all ranks last agreed. A rank that has received
state from others since then is no evidence: it may have received the wrong state.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from regrow.core.ids import Rank


@dataclass(frozen=True)
class Statement:
    """A rank's statement about its state.

    `holding`: equal for ranks that should have the same state. `distance`: from the rank's former state of this step to
    the present one, if steps were run again; None without a former one. `was_witness`: `witness` at that former time.
    """

    rank: Rank
    holding: int
    digest: bytes
    witness: bool = True
    distance: float | None = None
    was_witness: bool = True


@dataclass(frozen=True)
class Agree:
    """All replicas have the same state. `wrong`: ranks whose state was wrong before steps were run again."""

    wrong: tuple[Rank, ...] = ()


@dataclass(frozen=True)
class Differ:
    """Replicas differ. `wrong`: ranks that differ from a strict majority; `undecided`: ranks without a majority."""

    wrong: tuple[Rank, ...]
    undecided: tuple[Rank, ...]


def judge(statements: Iterable[Statement]) -> Agree | Differ:
    """Compare the statements of all ranks of a world; all ranks come to the same verdict."""
    holdings: defaultdict[int, list[Statement]] = defaultdict(list)
    for each in statements:
        holdings[each.holding].append(each)
    split = [replicas for replicas in holdings.values() if len({each.digest for each in replicas}) > 1]
    if not split:
        return Agree(_sorted(rank for replicas in holdings.values() for rank in _farther(replicas)))
    wrong: list[Rank] = []
    undecided: list[Rank] = []
    for replicas in split:
        odd = _odd(replicas)
        wrong += odd
        if not odd:
            undecided += [each.rank for each in replicas]
    return Differ(_sorted(wrong), _sorted(undecided))


def _sorted(ranks: Iterable[Rank]) -> tuple[Rank, ...]:
    return tuple(sorted(ranks))


def _odd(replicas: Sequence[Statement]) -> list[Rank]:
    """Ranks that differ from a strict majority of at least two witnesses; empty if there is none."""
    witnesses = [each for each in replicas if each.witness]
    if not witnesses:
        return []
    digest, votes = Counter(each.digest for each in witnesses).most_common(1)[0]
    if votes < 2 or 2 * votes <= len(witnesses):
        return []
    odd = [each.rank for each in witnesses if each.digest != digest]
    # A rank that has received state is to blame only if no witness can have sent it wrong state.
    return odd or [each.rank for each in replicas if each.digest != digest]


def _farther(replicas: Sequence[Statement]) -> list[Rank]:
    """Ranks whose former state is farther than the nearest rank's from the state after steps were run again.

    A difference alone is no proof: a wrong parameter spoils the gradients that all ranks sum, so the others' states
    were wrong too, but only by the effect of the gradients.
    """
    known = {each.rank: each.distance for each in replicas if each.distance is not None}
    if len(known) < 2:
        return []
    distances = {rank: math.inf if math.isnan(distance) else distance for rank, distance in known.items()}
    nearest = min(distances.values())
    farther = [each for each in replicas if each.rank in known and distances[each.rank] > nearest]
    # A rank that had received its state may have received a wrong one: blame witnesses first, if there are any.
    blamed = [each.rank for each in farther if each.was_witness]
    return blamed or [each.rank for each in farther]
