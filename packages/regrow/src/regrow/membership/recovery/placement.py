"""Choice of the node that keeps another node's copies, in another failure domain if possible. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from regrow.core.ids import NodeId


@dataclass(frozen=True)
class NodeDomain:
    """A node and its failure domain (`domain`, a rack's name); an empty domain is the node alone."""

    node: NodeId
    domain: str = ""


def buddies(places: Sequence[NodeDomain]) -> dict[NodeId, NodeId | None]:
    """Each node's buddy; None if there is no other node.

    Nodes are sorted by domain, and each node's buddy is as many places further as the largest domain has nodes. So
    each node keeps the copies of one other, in another domain unless more than half of all nodes are in one.
    """
    domain = {place.node: f"rack {place.domain}" if place.domain else f"node {place.node}" for place in places}
    sizes = Counter(domain.values())
    order = sorted(domain, key=lambda node: domain[node])  # Stable: nodes of one domain keep their order.
    if set(sizes.values()) == {1}:
        order = list(domain)
    shift = max(sizes.values(), default=0) % max(1, len(order)) or 1
    ring = {node: order[(at + shift) % len(order)] for at, node in enumerate(order)}
    return {node: buddy if buddy != node else None for node, buddy in ring.items()}
