"""Addresses over which a newcomer has read state, as records tell it."""

from collections.abc import Iterable

import msgspec


class StateWay(msgspec.Struct, frozen=True):
    """State that came over one address of a holder; `gbps`: rate of all its flows together, in 10^9 bytes a second.

    `address`: empty for sockets within the node. `failure`: reason why flows there ended early or could not begin.
    """

    address: str
    flows: int = 0
    bytes: int = 0
    gbps: float = 0.0
    failure: str = ""


def merged(ways: Iterable[StateWay]) -> list[StateWay]:
    """One entry for each address: flows, bytes and rates are added up, and the first failure is kept."""
    found: dict[str, StateWay] = {}
    for way in ways:
        one = found.get(way.address, StateWay(way.address))
        counts = one.flows + way.flows, one.bytes + way.bytes, one.gbps + way.gbps
        found[way.address] = StateWay(way.address, *counts, one.failure or way.failure)
    return list(found.values())
