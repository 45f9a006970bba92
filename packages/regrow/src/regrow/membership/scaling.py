"""Sizes of the world: allowed numbers of replicas, removal and placement of replicas, and gain of growing. Pure.

Sizes are counted in replicas: the `unit` ranks that together hold one copy of the state. Ranks are numbered replica by
replica, so that `rank % unit` is a rank's place within its replica, in every world.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType

from regrow.core.ids import Generation, Instant, NodeId, Rank, Seconds
from regrow.core.job import JobSpec
from regrow.core.messages.vocabulary import WorldChange
from regrow.membership.roster import RankSlot, Roster

_MOST_WAYS = 4096
_ALONE: Mapping[NodeId, str] = MappingProxyType({})
_NOBODY: Mapping[Rank, NodeId] = MappingProxyType({})


@dataclass(frozen=True)
class Limits:
    """Allowed numbers of replicas. `sizes`: only these, between `least` and `most`; empty: all between them."""

    least: int
    most: int
    unit: int = 1
    sizes: tuple[int, ...] = ()

    @classmethod
    def of(cls, spec: JobSpec) -> "Limits":
        """The limits of a job."""
        least = spec.replicas if spec.min_replicas is None else spec.min_replicas
        most = spec.replicas if spec.max_replicas is None else spec.max_replicas
        return cls(least, most, spec.unit, tuple(sorted(spec.sizes)))

    def allow(self, replicas: int) -> bool:
        """True if this number of replicas is allowed."""
        return self.least <= replicas <= self.most and (not self.sizes or replicas in self.sizes)

    def fit(self, room: int) -> int | None:
        """The largest allowed number of replicas that is at most `room`; None: there is none."""
        return next((size for size in range(min(room, self.most), self.least - 1, -1) if self.allow(size)), None)

    def next_above(self, replicas: int) -> int | None:
        """The smallest allowed number above this one; None: there is none."""
        return next((size for size in range(replicas + 1, self.most + 1) if self.allow(size)), None)

    def refusal(self, replicas: int) -> str:
        """Reason, for people, why this number is not allowed; empty: it is."""
        if replicas <= 0:
            return f"a job has at least one replica, not {replicas}"
        what = "1 replica is" if replicas == 1 else f"{replicas} replicas are"
        if replicas < self.least:
            return f"{what} fewer than the minimum of {self.least}"
        if replicas > self.most:
            return f"{what} more than the maximum of {self.most}"
        if not self.allow(replicas):
            return f"{what} none of the allowed sizes ({', '.join(map(str, self.sizes))})"
        return ""


@dataclass(frozen=True)
class Change:
    """Change of the world that the next generation makes: its kind, the former number of replicas, and the reason.

    `by`: time by which leaving ranks must have left; None: no deadline.
    """

    kind: str
    before: int
    reason: str
    by: Instant | None = None

    def world_change(self, generation: Generation, after: int, now: Instant) -> WorldChange:
        """This change as sent to workers. `generation`: the first in which it is tried."""
        left = None if self.by is None else max(0.0, self.by - now)
        return WorldChange(self.kind, generation, self.before, after, self.reason, left)


def replicas_of(ranks: int, unit: int) -> int | str:
    """Convert ranks to replicas; returns a text with the reason if they are no multiple of the unit."""
    if ranks % unit:
        return f"{ranks} ranks are not a multiple of the unit: a replica is {unit} ranks"
    return ranks // unit


@dataclass(frozen=True)
class Weighed:
    """Gain and cost of growing, in seconds of work of the present world."""

    gain: Seconds
    cost: Seconds

    @property
    def grows(self) -> bool:
        """True if growing pays."""
        return self.gain > self.cost


def weigh(before: int, after: int, stay: Seconds, pause: Seconds) -> Weighed:
    """Weigh growing: `after / before` times the work for `stay` seconds, less one pause."""
    return Weighed((after / before - 1.0) * stay, pause)


@dataclass(frozen=True)
class ReplicaCandidate:
    """Facts about a replica by which replicas are chosen for removal.

    `dead`: it has lost a rank, which could be filled again. `draining`: one of its ranks is on a node that is to be
    given back. `newest`: one of its ranks has, or can reach, the newest state. `homes`: for each place in the replica,
    the failure domain of its rank.
    """

    replica: int
    dead: bool = False
    draining: bool = False
    newest: bool = True
    homes: tuple[str, ...] = ()

    @property
    def worth(self) -> tuple[bool, bool, bool]:
        """Sort key of a replica; the replicas with the lowest keys are removed first."""
        return (not self.dead, not self.draining, self.newest)


def leavers(replicas: Sequence[ReplicaCandidate], count: int) -> frozenset[int]:
    """The replicas to remove: first broken ones, then those on draining nodes, those behind the newest state, the last.

    Among equal replicas, those stay that keep the holders of each part of the state in different failure domains.
    """
    order = sorted(replicas, key=lambda each: (each.worth, -each.replica))
    going, staying = order[:count], order[count:]
    exposed = _exposed(staying)
    while exposed:
        ways = (
            (at, by)
            for at in reversed(range(len(going)))
            for by in range(len(staying))
            if going[at].worth == staying[by].worth
        )
        better = next((way for way in islice(ways, _MOST_WAYS) if _swapped(going, staying, *way) < exposed), None)
        if better is None:
            break
        at, by = better
        going[at], staying[by] = staying[by], going[at]
        exposed = _exposed(staying)
    return frozenset(each.replica for each in going)


def _swapped(going: Sequence[ReplicaCandidate], staying: Sequence[ReplicaCandidate], at: int, by: int) -> int:
    return _exposed([*staying[:by], going[at], *staying[by + 1 :]])


def _exposed(replicas: Sequence[ReplicaCandidate]) -> int:
    """Number of parts of the state whose holders, in two or more replicas, all share one failure domain."""
    places = min((len(each.homes) for each in replicas), default=0)
    if len(replicas) < 2:
        return 0
    return sum(len({each.homes[place] for each in replicas}) == 1 for place in range(places))


def first_slots(
    world: int, nproc: int, slots: Mapping[NodeId, int], *, unit: int = 1, domains: Mapping[NodeId, str] = _ALONE
) -> list[RankSlot] | None:
    """Slots for the ranks of a new world: `nproc` per node in the order of nodes, as far as possible.

    If a node is missing, the others take its ranks, in whole replicas if they have room. Ranks are spread in the same
    way if the holders of a part of the state would otherwise fail together. None: there is no room.

    Args:
        world: number of ranks.
        nproc: ranks per node with which the job was started.
        slots: number of slots of each node, in the order of nodes.
        unit: ranks of a replica.
        domains: failure domain of each node; without one the node is alone.
    """
    left, plain = world, list[RankSlot]()
    for node, most in slots.items():
        here = min(nproc, most, left)
        plain += [RankSlot(node, Rank(world - left + local), local) for local in range(here)]
        left -= here
    if not left and not _slots_exposed(plain, unit, domains):
        return plain
    if unit == 1:
        each = min(nproc, -(-world // max(1, len(slots)))) if not left else nproc
        dealt = _evenly(world, each, slots)
    else:
        free = {node: range(most) for node, most in slots.items()}
        rank_slots = new_slots([Rank(rank) for rank in range(world)], unit, free, domains=domains)
        dealt = rank_slots if len(rank_slots) == world else None
    if not left and (dealt is None or _slots_exposed(dealt, unit, domains) >= _slots_exposed(plain, unit, domains)):
        return plain
    return dealt


def _slots_exposed(rank_slots: Sequence[RankSlot], unit: int, domains: Mapping[NodeId, str]) -> int:
    """Number of parts of the state whose holders, in two or more replicas, all share one failure domain."""
    homes = [domains.get(slot.node) or slot.node for slot in sorted(rank_slots, key=lambda each: each.rank)]
    cut = range(0, len(homes), unit)
    return _exposed([ReplicaCandidate(at // unit, homes=tuple(homes[at : at + unit])) for at in cut])


def _evenly(world: int, nproc: int, slots: Mapping[NodeId, int]) -> list[RankSlot] | None:
    """Slots for ranks that all have the whole state, as evenly as possible; None: there is no room."""
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
    return [RankSlot(node, Rank(rank), local) for rank, (node, local) in enumerate(places)]


def new_slots(
    ranks: Sequence[Rank],
    unit: int,
    free: Mapping[NodeId, Sequence[int]],
    *,
    domains: Mapping[NodeId, str] = _ALONE,
    held: Mapping[Rank, NodeId] = _NOBODY,
) -> list[RankSlot]:
    """Slots for newcomers: each replica on one node that has room, the emptiest node first.

    Ranks that hold the same part of the state are placed in different failure domains, as far as there is room.

    Args:
        ranks: ranks of the newcomers.
        unit: ranks of a replica.
        free: the free slots of each node, in the order of nodes.
        domains: failure domain of each node; without one the node is alone.
        held: nodes of the present ranks.

    Returns:
        Slots for all of them, or for as many as there is room for.
    """
    left = {node: list(slots) for node, slots in free.items()}
    homes: dict[int, set[str]] = {place: set() for place in range(unit)}
    for rank, node in held.items():
        homes[rank % unit].add(domains.get(node) or node)

    def best(group: Sequence[Rank]) -> NodeId | None:
        """The node with room for the group where the fewest parts of the state stay in a single failure domain."""
        fitting = [node for node, slots in left.items() if len(slots) >= len(group)]

        def exposed(node: NodeId) -> int:
            return sum(homes[rank % unit] == {domains.get(node) or node} for rank in group)

        return min(fitting, key=lambda node: (exposed(node), -len(left[node])), default=None)

    replicas: dict[int, list[Rank]] = {}
    for rank in sorted(ranks):
        replicas.setdefault(rank // unit, []).append(rank)
    rank_slots: list[RankSlot] = []
    for group in replicas.values():
        together = best(group)
        for rank in group:
            home = together if together is not None else best([rank])
            if home is None:
                return rank_slots
            homes[rank % unit].add(domains.get(home) or home)
            rank_slots.append(RankSlot(home, rank, left[home].pop(0)))
    return rank_slots


def exposed_ranks(
    holdings: Mapping[Rank, str], nodes: Mapping[Rank, NodeId], domains: Mapping[NodeId, str]
) -> list[Rank]:
    """Ranks that hold the same part of the state in one failure domain, although the world spans several.

    Args:
        holdings: the holdings of all ranks.
        nodes: the nodes of the ranks.
        domains: failure domain of each node; without one the node is alone.

    Returns:
        The ranks of the first such part; empty if there is none.
    """
    alike: dict[str, list[Rank]] = {}
    for rank, holding in sorted(holdings.items()):
        alike.setdefault(holding, []).append(rank)
    homes = {rank: domains.get(node) or node for rank, node in nodes.items()}
    if len(set(homes.values())) == 1:
        return []
    return next((ranks for ranks in alike.values() if len(ranks) > 1 and len({homes[r] for r in ranks}) == 1), [])


def unlike_places(holdings: Sequence[str], unit: int) -> Rank | None:
    """The first rank whose part of the state differs from that of an earlier rank at the same place in a replica.

    A rank without a part yet is skipped, because it will be built for its place. None: there is no such rank.
    """
    parts: dict[int, str] = {}
    for rank, holding in enumerate(holdings):
        if holding and parts.setdefault(rank % unit, holding) != holding:
            return Rank(rank)
    return None


def added_ranks(before: int, after: int, unit: int) -> tuple[Rank, ...]:
    """The ranks that a larger world has in addition to those of a smaller one."""
    return tuple(Rank(rank) for rank in range(before * unit, after * unit))


def failing_together(roster: Roster) -> dict[NodeId, str]:
    """Failure domain of each node: its rack, or the node alone."""
    return {each.node: f"rack {each.domain}" if each.domain else f"node {each.node}" for each in roster.nodes.values()}


def nodes_of_ranks(roster: Roster) -> dict[Rank, NodeId]:
    """Nodes of the living ranks."""
    return {each.rank: each.node for each in roster.placed() if each.rank is not None and each.living}


def left_behind(roster: Roster, rank: Rank, node: NodeId, unit: int) -> list[Rank]:
    """The other ranks on a node that a rank leaves, if one of them belongs to the same replica; else none."""
    there = sorted(each.rank for each in roster.nodes[node].placed.values() if each.rank not in (None, rank))
    return there if any(each // unit == rank // unit for each in there) else []


def free_slots(roster: Roster, attempts: int) -> dict[NodeId, list[int]]:
    """Slots where workers of a larger world can be started; none on nodes where `attempts` in a row have failed."""
    return {
        node.node: node.free()
        for node in roster.usable_nodes()
        if node.failed_candidates < attempts and not node.unpaid and not node.quarantined
    }
