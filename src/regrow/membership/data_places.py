"""Where each node's data cache finds entries of others, and which other node keeps a copy of what it needs next. Pure.

Unlike copies of state this needs no flag: a cache is worth having on its own, and whoever has none takes no part.
"""

from regrow.core.data_messages import PlaceData
from regrow.core.ids import NodeId
from regrow.membership.placement import Place, buddies
from regrow.membership.roster import NodeRecord, Roster

MOST_PEERS = 8
"""A node asks so many others at most, so that no message grows with the job."""


class DataPlaces:
    """What each node was told, so that only those are told again for whom something has changed.

    Args:
        roster: the nodes, and where their doors are.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._told: dict[NodeId, PlaceData] = {}

    def lost(self, node: NodeId) -> None:
        """Its next agent has been told nothing."""
        self._told.pop(node, None)

    def news(self) -> list[PlaceData]:
        """An order for each node that is here, has a cache, and was told otherwise before.

        A mirror that is away is not replaced: it is waited for, and what its node needs it makes itself meanwhile. One
        that was given back is.
        """
        nodes = [node for node in self._roster.nodes.values() if not node.stopped]
        doors = {node.node: node.data for node in nodes if node.data and not node.away}
        if not self._told and len(doors) < 2:
            return []
        ring = buddies([Place(node.node, node.domain) for node in nodes])
        orders = [
            PlaceData(node, doors.get(mirror, "") if (mirror := ring[node]) is not None else "", peers)
            for node, peers in _neighbours(nodes, doors, ring).items()
        ]
        news = [order for order in orders if self._told.get(order.node) != order]
        self._told.update((order.node, order) for order in news)
        return news


def _neighbours(
    nodes: list[NodeRecord], doors: dict[NodeId, str], ring: dict[NodeId, NodeId | None]
) -> dict[NodeId, list[str]]:
    """For each node with a door the doors of others: the mirror's first, then those of the nodes that come after it."""
    order = [node.node for node in nodes if node.node in doors]
    found: dict[NodeId, list[str]] = {}
    for at, node in enumerate(order):
        mirror = ring[node]
        first = [mirror] if mirror in doors else []
        after = [order[(at + turn) % len(order)] for turn in range(1, min(len(order), MOST_PEERS + 1))]
        found[node] = [doors[other] for other in [*first, *(other for other in after if other != mirror)][:MOST_PEERS]]
    return found
