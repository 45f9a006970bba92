"""Addresses from which a newcomer has read state, in the form in which records show them."""

from collections.abc import Iterable

import msgspec


class StateWay(msgspec.Struct, frozen=True):
    """State that came from one address of a holder. `gbps`: rate of all its flows together, in 10^9 bytes a second.

    `address`: empty within the node. `failure`: reason why flows there ended early or could not begin. `by`: the method
    of reading the holder's memory, `memory` or `nixl`; empty: sockets. `fallback`: why sockets were used instead.
    """

    address: str
    flows: int = 0
    bytes: int = 0
    gbps: float = 0.0
    failure: str = ""
    by: str = ""
    fallback: str = ""


def merged(ways: Iterable[StateWay]) -> list[StateWay]:
    """One entry for each address and method: flows, bytes and rates are added up, the first reasons are kept."""
    found: dict[tuple[str, str], StateWay] = {}
    for way in ways:
        one = found.get((way.address, way.by), StateWay(way.address))
        counts = one.flows + way.flows, one.bytes + way.bytes, one.gbps + way.gbps
        failure, fallback = one.failure or way.failure, one.fallback or way.fallback
        found[way.address, way.by] = StateWay(way.address, *counts, failure, way.by, fallback)
    return list(found.values())
