"""Homes of keys, and the routes of requests to them. Pure: the simulation uses the same functions.

All agents of a generation have the same table of agents. A key with many readers is read through a tree of agents,
whose root is the key's home. The trees are those of a hypercube: node numbers are written in base `RADIX`, and each hop
makes one digit equal to the home's, the lowest first. So a node is asked by at most `RADIX - 1` others for each digit
of the table's size, and these neighbours are the same for every key.
"""

import re

import xxhash

from regrow.core.messages.store import gloo_address

RADIX = 8
_PLACED = re.compile(r"@(\d+)$")
_DEFAULT_GROUP = "0"
"""torch's name of the default group, whose ranks are those of the world."""


def home(key: str, nodes: int, world: int) -> int:
    """The node that keeps a key.

    Args:
        key: the key as the store knows it.
        nodes: number of agents in the table.
        world: number of ranks, which are distributed over the nodes in order.
    """
    rank = _rank_of(key)
    if rank is not None and rank < world:
        return rank * nodes // world
    return xxhash.xxh3_64_intdigest(key.encode()) % nodes


def _rank_of(key: str) -> int | None:
    """The rank of the world that writes the key, if its name shows the rank; else None."""
    match = _PLACED.search(key)
    if match is not None:
        return int(match.group(1))
    address = gloo_address(key)
    return address.rank if address is not None and address.group == _DEFAULT_GROUP else None


def is_direct(key: str) -> bool:
    """True if the key belongs to one rank, such as its address, so that it has few readers or each rank has one.

    Such keys have different homes, so that readers ask these without a tree and no agent gets more requests than
    others. They are keys with a placement (`@rank`), and those in which gloo publishes a rank's address.
    """
    return _PLACED.search(key) is not None or gloo_address(key) is not None


def parent(node: int, root: int, nodes: int) -> int:
    """Node that `node` asks on the way to `root`; for the root, the root itself."""
    unit = 1
    while node != root:
        step = (root // unit % RADIX - node // unit % RADIX) * unit
        if step and node + step < nodes:
            return node + step
        unit *= RADIX
    return root


def next_hop(key: str, node: int | None, nodes: int, world: int) -> int:
    """Node that `node` asks for a key; for the key's home, the home itself.

    Args:
        key: the key as the store knows it.
        node: number of the asking node; None if it is not in the table.
        nodes: number of agents in the table.
        world: number of ranks.
    """
    root = home(key, nodes, world)
    if is_direct(key):
        return root
    if node is None:
        return xxhash.xxh3_64_intdigest(key.encode(), seed=1) % nodes
    return parent(node, root, nodes)
