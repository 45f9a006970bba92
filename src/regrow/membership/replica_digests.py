"""Whether replicas have the same state, from the digests of parts of it that workers tell. Pure.

Nobody waits for this, and what is found stops nobody: the same script would go on under another launcher too.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass

from regrow.core.ids import Generation, Rank, StepNo
from regrow.core.messages.replicas import StateSampled

_KEPT = 8
"""So many steps are waited for before those who have not spoken are left out."""
_MOST_NAMES = 8


@dataclass(frozen=True)
class Divergence:
    """Ranks with the same holding do not have the same. `alike`: who has the same, the largest group first."""

    step: StepNo
    alike: tuple[tuple[Rank, ...], ...]
    parts: tuple[str, ...]
    whole: bool = False
    in_tensors: bool = False

    @property
    def odd(self) -> tuple[Rank, ...]:
        """Who differs from a strict majority of three or more; empty where there is none."""
        count = sum(len(ranks) for ranks in self.alike)
        if count < 3 or 2 * len(self.alike[0]) <= count:
            return ()
        return tuple(sorted(rank for ranks in self.alike[1:] for rank in ranks))


def compare(
    step: StepNo, told: Mapping[Rank, Mapping[str, int]], tensors: Set[str] = frozenset(), *, whole: bool = False
) -> Divergence | None:
    """What replicas have told of themselves before `step`; None where it is the same. `tensors`: which parts are."""
    looks = list(told.values())
    if all(look == looks[0] for look in looks):
        return None
    names = list(dict.fromkeys(name for look in looks for name in look))
    unequal = [name for name in names if len({look.get(name) for look in looks}) > 1]
    groups: defaultdict[tuple[int | None, ...], list[Rank]] = defaultdict(list)
    for rank in sorted(told):
        groups[tuple(told[rank].get(name) for name in unequal)].append(rank)
    alike = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks[0]))
    return Divergence(
        step, tuple(map(tuple, alike)), tuple(unequal[:_MOST_NAMES]), whole, not tensors.isdisjoint(unequal)
    )


class Samples:
    """What was told in the present generation, and what has been found so far."""

    def __init__(self) -> None:
        self._generation = Generation(-1)
        self._told: dict[tuple[str, StepNo], dict[Rank, StateSampled]] = {}
        self._found: Counter[tuple[tuple[Rank, ...], ...]] = Counter()

    def tell(self, fact: StateSampled, rank: Rank, holding: str, *, replicas: int) -> Divergence | None:
        """One rank's sample; what is known when all `replicas` of its holding have told theirs, or never will."""
        if fact.generation != self._generation:
            self._generation = fact.generation
            self._told.clear()
        key = holding, fact.step
        self._told.setdefault(key, {})[rank] = fact
        if len(self._told[key]) >= replicas:
            return self._close(key)
        mine = sorted((known for known in self._told if known[0] == holding), key=lambda known: known[1])
        return self._close(mine[0]) if len(mine) > _KEPT else None

    def _close(self, key: tuple[str, StepNo]) -> Divergence | None:
        told = self._told.pop(key)
        parts = {rank: fact.python | fact.tensors for rank, fact in told.items()}
        tensors = {name for fact in told.values() for name in fact.tensors}
        return compare(key[1], parts, tensors, whole=all(fact.whole for fact in told.values()))

    def news(self, found: Divergence) -> bool:
        """Whether to say it: the first time, and ever less often."""
        self._found[found.alike] += 1
        times = self._found[found.alike]
        return times & (times - 1) == 0
