"""Judgement of which replica's state is wrong, over the statements of all ranks at one boundary. Pure.

All ranks hear the same statements, so all come to the same verdict without another message.

A rank is a *witness* if its state has come about in its own memory since all agreed last. A rank that has received
state from others since then says nothing about who is right: it may have received from the wrong one.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from regrow.core.ids import Rank


@dataclass(frozen=True)
class Statement:
    """Statement of one rank about its state.

    `holding`: equal for ranks that should have the same state. `distance`: after a run again, how far its former state
    of this step was from the present one, None if it has none to compare; `was_witness`: of that former state.
    """

    rank: Rank
    holding: int
    digest: bytes
    witness: bool = True
    distance: float | None = None
    was_witness: bool = True


@dataclass(frozen=True)
class Agree:
    """All replicas have the same state. `wrong`: whose state had been wrong before the run again."""

    wrong: tuple[Rank, ...] = ()


@dataclass(frozen=True)
class Differ:
    """Some have not. `wrong`: who, by a strict majority; `undecided`: of whom one is, but it cannot be said who."""

    wrong: tuple[Rank, ...]
    undecided: tuple[Rank, ...]


def judge(statements: Iterable[Statement]) -> Agree | Differ:
    """The verdict of all ranks of a world."""
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
    # Who has received state is to blame only where no witness can have given it wrong state.
    return odd or [each.rank for each in replicas if each.digest != digest]


def _farther(replicas: Sequence[Statement]) -> list[Rank]:
    """Ranks whose former state was farther than the nearest from the state that the run again led to.

    Being different is no proof: a wrong parameter spoils the gradients that all ranks sum up, so the others' state was
    off too, but only by what came through the gradients.
    """
    known = {each.rank: each.distance for each in replicas if each.distance is not None}
    if len(known) < 2:
        return []
    distances = {rank: math.inf if math.isnan(distance) else distance for rank, distance in known.items()}
    nearest = min(distances.values())
    farther = [each for each in replicas if each.rank in known and distances[each.rank] > nearest]
    # Who had received its state may have received it wrong: the one that it came from is to blame, if it is there.
    blamed = [each.rank for each in farther if each.was_witness]
    return blamed or [each.rank for each in farther]
