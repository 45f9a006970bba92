"""Choice of the node that keeps another's copies: one that does not fail together with it. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from regrow.core.ids import NodeId


@dataclass(frozen=True)
class NodeDomain:
    """A node, and what fails together with it (`domain`, a rack's name); an empty domain is the node alone."""

    node: NodeId
    domain: str = ""


def buddies(places: Sequence[NodeDomain]) -> dict[NodeId, NodeId | None]:
    """Each node's buddy; None where there is no other node.

    Sorted by domain, each node's buddy stands as many places further as the largest domain has nodes. So each node
    keeps the copies of one other, in another domain unless more than half of all nodes are in one.
    """
    domain = {place.node: f"rack {place.domain}" if place.domain else f"node {place.node}" for place in places}
    sizes = Counter(domain.values())
    order = sorted(domain, key=lambda node: domain[node])  # nodes of one domain stay in their order
    if set(sizes.values()) == {1}:
        order = list(domain)
    shift = max(sizes.values(), default=0) % max(1, len(order)) or 1
    ring = {node: order[(at + shift) % len(order)] for at, node in enumerate(order)}
    return {node: buddy if buddy != node else None for node, buddy in ring.items()}
