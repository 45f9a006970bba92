"""How many replicas there may be, which of them go, where new ones come to stand, and whether they pay. Pure.

Sizes are counted in replicas: the ranks that together hold one copy of the state, `unit` of them. Ranks are numbered
replica by replica, so that `rank % unit` is a rank's place within its replica, in every world.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from regrow.core.ids import Generation, Instant, NodeId, Rank, Seconds
from regrow.core.job import JobSpec
from regrow.core.messages.vocabulary import WorldChange
from regrow.membership.roster import Roster, Seat


@dataclass(frozen=True)
class Limits:
    """Which numbers of replicas are allowed. `sizes`: only these, between the two; empty: all."""

    least: int
    most: int
    unit: int = 1
    sizes: tuple[int, ...] = ()

    @classmethod
    def of(cls, spec: JobSpec) -> "Limits":
        """Those of a job."""
        least = spec.replicas if spec.min_replicas is None else spec.min_replicas
        most = spec.replicas if spec.max_replicas is None else spec.max_replicas
        return cls(least, most, spec.unit, tuple(sorted(spec.sizes)))

    def allow(self, replicas: int) -> bool:
        """Whether there may be so many."""
        return self.least <= replicas <= self.most and (not self.sizes or replicas in self.sizes)

    def fit(self, room: int) -> int | None:
        """The largest number that is allowed where there is room for so many replicas; None: there is none."""
        return next((size for size in range(min(room, self.most), self.least - 1, -1) if self.allow(size)), None)

    def next_above(self, replicas: int) -> int | None:
        """The smallest number above this one that is allowed; None: there is none."""
        return next((size for size in range(replicas + 1, self.most + 1) if self.allow(size)), None)

    def refusal(self, replicas: int) -> str:
        """Why there may not be so many, for people; empty: there may."""
        if replicas <= 0:
            return f"a job has at least one replica, not {replicas}"
        if replicas < self.least:
            return f"{replicas} replicas are fewer than the minimum of {self.least}"
        if replicas > self.most:
            return f"{replicas} replicas are more than the maximum of {self.most}"
        if not self.allow(replicas):
            return f"{replicas} replicas are none of the allowed sizes ({', '.join(map(str, self.sizes))})"
        return ""


@dataclass(frozen=True)
class Change:
    """The world that the next generation has: what kind of change, from how many replicas, and why.

    `by`: when who leaves must have left; None: there is no hurry.
    """

    kind: str
    before: int
    reason: str
    by: Instant | None = None

    def told(self, generation: Generation, after: int, now: Instant) -> WorldChange:
        """The same for workers. `generation`: the first in which it is tried."""
        left = None if self.by is None else max(0.0, self.by - now)
        return WorldChange(self.kind, generation, self.before, after, self.reason, left)


def replicas_of(ranks: int, unit: int) -> int | str:
    """So many ranks in replicas; why not, where they are no whole ones."""
    if ranks % unit:
        return f"{ranks} ranks are not a multiple of the unit: a replica is {unit} ranks"
    return ranks // unit


@dataclass(frozen=True)
class Weighed:
    """What growing brings and takes, in seconds of work of the world before it."""

    gain: Seconds
    cost: Seconds

    @property
    def grows(self) -> bool:
        """Whether it pays."""
        return self.gain > self.cost


def weigh(before: int, after: int, stay: Seconds, pause: Seconds) -> Weighed:
    """Whether more replicas pay: for `stay` seconds there is `after / before` times the work done, less one pause."""
    return Weighed((after / before - 1.0) * stay, pause)


@dataclass(frozen=True)
class ReplicaCandidate:
    """What makes one replica go before another.

    `dead`: it has lost a rank, which another could fill. `draining`: a rank of it is on a node that is given back.
    `newest`: one of its ranks has, or can reach, the newest state.
    """

    replica: int
    dead: bool = False
    draining: bool = False
    newest: bool = True


def leavers(replicas: Sequence[ReplicaCandidate], count: int) -> frozenset[int]:
    """The replicas that go: broken ones first, then those on draining nodes, those behind, the highest."""
    order = sorted(replicas, key=lambda each: (not each.dead, not each.draining, each.newest, -each.replica))
    return frozenset(each.replica for each in order[:count])


def first_seats(world: int, nproc: int, slots: Mapping[NodeId, int]) -> list[Seat] | None:
    """Where the ranks of a world that starts come to stand: `nproc` a node in the order of nodes, as far as that goes.

    Where a node is missing, the others take its ranks, evenly. None: there is no room.
    """
    taken: dict[NodeId, int] = {}
    left = world
    for node, most in slots.items():
        taken[node] = min(nproc, most, left)
        left -= taken[node]
    while left:
        emptiest = max(slots, key=lambda each: slots[each] - taken[each], default=None)
        if emptiest is None or slots[emptiest] == taken[emptiest]:
            return None
        taken[emptiest] += 1
        left -= 1
    places = [(node, local) for node, count in taken.items() for local in range(count)]
    return [Seat(node, Rank(rank), local) for rank, (node, local) in enumerate(places)]


def new_seats(ranks: Sequence[Rank], unit: int, free: Mapping[NodeId, Sequence[int]]) -> list[Seat]:
    """Where newcomers come to stand: each replica on one node where that has room, the emptiest node first.

    Args:
        ranks: theirs.
        unit: ranks of a replica.
        free: the free slots of each node, in the order of nodes.

    Returns:
        Seats for all of them, or for as many as there is room for.
    """
    left = {node: list(slots) for node, slots in free.items()}
    replicas: dict[int, list[Rank]] = {}
    for rank in sorted(ranks):
        replicas.setdefault(rank // unit, []).append(rank)
    seats: list[Seat] = []
    for group in replicas.values():
        together = _emptiest(left)
        whole = together is not None and len(left[together]) >= len(group)
        for rank in group:
            node = together if whole else _emptiest(left)
            if node is None:
                return seats
            seats.append(Seat(node, rank, left[node].pop(0)))
    return seats


def _emptiest(left: Mapping[NodeId, Sequence[int]]) -> NodeId | None:
    node = max(left, key=lambda each: len(left[each]), default=None)
    return node if node is not None and left[node] else None


def unlike_places(holdings: Sequence[str], unit: int) -> Rank | None:
    """The first rank that has another part of the state than one before it at its place in a replica, if any.

    One that has none yet is about to be built as what belongs there.
    """
    parts: dict[int, str] = {}
    for rank, holding in enumerate(holdings):
        if holding and parts.setdefault(rank % unit, holding) != holding:
            return Rank(rank)
    return None


def added_ranks(before: int, after: int, unit: int) -> tuple[Rank, ...]:
    """The ranks that a larger world has besides those of a smaller one."""
    return tuple(Rank(rank) for rank in range(before * unit, after * unit))


def free_slots(roster: Roster, attempts: int) -> dict[NodeId, list[int]]:
    """Where workers of a larger world can be started: not where `attempts` in a row have failed."""
    return {
        node.node: node.free()
        for node in roster.usable_nodes()
        if node.failed_candidates < attempts and not node.unpaid and not node.quarantined
    }
