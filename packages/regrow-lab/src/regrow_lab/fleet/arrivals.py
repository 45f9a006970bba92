"""Faults and capacity of a fleet over time, drawn from a seed.

Each kind of fault has its own random generator, so all policies of a seed meet the same faults, and an additional kind
does not change the others.
"""

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

from regrow.core.ids import Instant, Seconds
from regrow_lab.fleet.deciding import Trouble
from regrow_lab.fleet.scenario import CapacityTable, FaultTable, FleetScenario

_HOUR: Seconds = 3600.0
_WAVE_LEVELS = 24
"""Number of levels by which a wave is approximated."""


class FleetFault(NamedTuple):
    """One fault."""

    at: Instant
    trouble: Trouble
    kind: str
    place: int
    """Number of the node, from 0; spares come after the job's."""
    nodes: int
    repair: Seconds
    within: float
    """Moment in a step at which it strikes, from 0 to 1."""


class CapacityChange(NamedTuple):
    """A new number of nodes, from now on."""

    at: Instant
    most: int | None
    """None: as many as the job wants."""
    away: int = 0
    """Number of nodes that are reclaimed."""


def faults(scenario: FleetScenario, seed: int, *, spares: int = 0) -> Iterator[FleetFault]:
    """All faults in order of time, an infinite stream. Spares are nodes of the first hardware."""
    streams, first = [], 0
    for number, hardware in enumerate(scenario.hardware):
        for each in hardware.faults:
            draw = random.Random(f"{seed}/{number}/{each.kind}")
            streams.append(_stream(each, range(first, first + hardware.nodes), draw))
        first += hardware.nodes
    for each in scenario.hardware[0].faults if spares else ():
        if each.takes == "node" and not each.every:
            draw = random.Random(f"{seed}/spares/{each.kind}")
            streams.append(_stream(each, range(first, first + spares), draw))
    return heapq.merge(*streams)


def _stream(fault: FaultTable, places: Sequence[int], draw: random.Random) -> Iterator[FleetFault]:
    rate = fault.per_node_hour * len(places) / _HOUR
    at = 0.0
    while rate or fault.every:
        at += draw.uniform(*fault.every) if fault.every else draw.expovariate(rate)
        place = places[draw.randrange(len(places))]
        repair = draw.expovariate(1 / fault.repair) if fault.repair else 0.0
        nodes = fault.nodes if fault.takes == "node" else 1
        yield FleetFault(at, Trouble(fault.takes), fault.kind, place, nodes, repair, draw.random())


def capacity(table: CapacityTable, wanted: int, seed: int) -> Iterator[CapacityChange]:
    """Number of nodes, in order of time; the first at 0.

    Args:
        table: the rule.
        wanted: number of nodes that the job and its spares want.
        seed: of the draws.
    """
    match table.kind:
        case "wave":
            yield from _wave(table, table.most or wanted)
        case "spot":
            yield from _spot(table, wanted, random.Random(f"{seed}/spot"))
        case "trace":
            yield from _trace(table)
        case _:
            yield CapacityChange(0.0, None)


def _wave(table: CapacityTable, most: int) -> Iterator[CapacityChange]:
    """A cosine wave with its maximum at time 0."""
    before: int | None = None
    for number in count():
        level = 0.5 + 0.5 * math.cos(2 * math.pi * (number % _WAVE_LEVELS) / _WAVE_LEVELS)
        nodes = round(table.least + (most - table.least) * level)
        if nodes != before:
            yield CapacityChange(number * table.period / _WAVE_LEVELS, nodes)
        before = nodes


def _trace(table: CapacityTable) -> Iterator[CapacityChange]:
    last = table.points[-1][0]
    if table.points[0][0] > 0:
        yield CapacityChange(0.0, table.points[-1][1] if table.period > last else None)
    for number in count():
        for at, nodes in table.points:
            yield CapacityChange(number * table.period + at, nodes)
        if table.period <= last:
            return


def _spot(table: CapacityTable, wanted: int, draw: random.Random) -> Iterator[CapacityChange]:
    """Nodes are reclaimed one by one, and return one by one."""
    yield CapacityChange(0.0, None)
    rate = table.reclaims_per_node_hour / _HOUR
    at, away, back = 0.0, 0, list[Instant]()
    while rate:
        next_taken = at + draw.expovariate(rate * (wanted - away)) if away < wanted else math.inf
        if back and back[0] <= next_taken:
            # The exponential distribution has no memory: the next reclaim may be drawn again.
            at, away = heapq.heappop(back), away - 1
        else:
            at, away = next_taken, away + 1
            heapq.heappush(back, at + draw.expovariate(1 / table.away) if table.away else at)
        yield CapacityChange(at, None, away)
