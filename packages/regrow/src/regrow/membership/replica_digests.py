"""Comparison of replicas by digests of parts of their state, which workers send. Pure.

No rank waits for the comparison, and a difference stops no rank: the script would go on under any launcher.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass

from regrow.core.ids import Generation, Rank, StepNo
from regrow.core.messages.replicas import StateSampled

_KEPT = 8
"""Once this many comparisons of a holding are open, ranks that have not reported are left out."""
_MOST_NAMES = 8
_Look = tuple[str, StepNo, bool]
"""Holding, the step before which the digests were taken, and True if they are of parts that updates made."""


@dataclass(frozen=True)
class Divergence:
    """A difference between the states of ranks with the same holding.

    Attributes:
        alike: groups of ranks with equal state, the largest first.
        own: the ranks differ only in parts made by their first updates, of which each rank may have its own shard.
    """

    step: StepNo
    alike: tuple[tuple[Rank, ...], ...]
    parts: tuple[str, ...]
    whole: bool = False
    in_tensors: bool = False
    own: bool = False

    @property
    def odd(self) -> tuple[Rank, ...]:
        """Ranks that differ from a strict majority of three or more; empty if there is no such majority."""
        count = sum(len(ranks) for ranks in self.alike)
        if count < 3 or 2 * len(self.alike[0]) <= count:
            return ()
        return tuple(sorted(rank for ranks in self.alike[1:] for rank in ranks))


def compare(
    step: StepNo,
    reported: Mapping[Rank, Mapping[str, int]],
    tensors: Set[str] = frozenset(),
    *,
    whole: bool = False,
    made: Set[str] = frozenset(),
) -> Divergence | None:
    """Compare the digests that replicas have sent of their state before `step`; None if they agree.

    Args:
        tensors: names of the parts that are tensors.
        whole: the digests cover the whole state.
        made: names of the parts that updates made.
    """
    looks = list(reported.values())
    if all(look == looks[0] for look in looks):
        return None
    names = list(dict.fromkeys(name for look in looks for name in look))
    unequal = [name for name in names if len({look.get(name) for look in looks}) > 1]
    groups: defaultdict[tuple[int | None, ...], list[Rank]] = defaultdict(list)
    for rank in sorted(reported):
        groups[tuple(reported[rank].get(name) for name in unequal)].append(rank)
    alike = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks[0]))
    return Divergence(
        step,
        tuple(map(tuple, alike)),
        tuple(unequal[:_MOST_NAMES]),
        whole,
        not tensors.isdisjoint(unequal),
        set(unequal) <= made,
    )


class Samples:
    """Digests received in the present generation, and the differences found so far."""

    def __init__(self) -> None:
        self._generation = Generation(-1)
        self._reported: dict[_Look, dict[Rank, StateSampled]] = {}
        self._found: Counter[tuple[tuple[Rank, ...], ...]] = Counter()
        self.own: defaultdict[str, set[str]] = defaultdict(set)
        """For each holding: the plain variables of the script whose values were seen to differ between its ranks."""

    def apply(self, fact: StateSampled, rank: Rank, holding: str, *, replicas: int) -> Divergence | None:
        """Take one rank's digests. Compares once all `replicas` of its holding have reported, or are overdue."""
        if fact.generation != self._generation:
            self._generation = fact.generation
            self._reported.clear()
        key = holding, fact.step, fact.made is not None
        self._reported.setdefault(key, {})[rank] = fact
        if len(self._reported[key]) >= replicas:
            return self._close(key)
        mine = sorted((known for known in self._reported if known[0] == holding), key=lambda known: known[1])
        return self._close(mine[0]) if len(mine) > _KEPT else None

    def _close(self, key: _Look) -> Divergence | None:
        reported = self._reported.pop(key)
        looks = [fact.variables for fact in reported.values()]
        unlike = (name for look in looks for name in look if len({each.get(name) for each in looks}) > 1)
        self.own[key[0]].update(unlike)
        parts = {rank: fact.python | fact.tensors | (fact.made or {}) for rank, fact in reported.items()}
        made = {name for fact in reported.values() for name in fact.made or ()}
        tensors = made.union(*(fact.tensors for fact in reported.values()))
        return compare(key[1], parts, tensors, whole=all(fact.whole for fact in reported.values()), made=made)

    def news(self, found: Divergence) -> bool:
        """True if the difference is to be reported now: it is found for the first, second, fourth, eighth … time."""
        self._found[found.alike] += 1
        times = self._found[found.alike]
        return times & (times - 1) == 0
