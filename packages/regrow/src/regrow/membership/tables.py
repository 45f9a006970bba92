"""Distribution of a generation's table to the nodes, with traffic that grows no faster than the world.

A node that has the table of the last formed generation gets the differences, if they are small. Up to `DIRECT` other
nodes get the whole table. If there are more, only `WIDTH` of them do, and each of the rest fetches it from another
node, along a tree in which no node passes it on to more than `WIDTH`. A node that cannot fetch it in time reports that
and gets it from the coordinator (docs/decisions/0034).
"""

from collections.abc import Sequence

import msgspec

from regrow.core.ids import NodeId, Seconds
from regrow.core.messages.tables import (
    ChangeTable,
    FetchTable,
    GenerationTable,
    KeepTable,
    TableChange,
    TableHead,
    TableMissed,
    TableOrder,
)
from regrow.core.messages.vocabulary import Member
from regrow.membership.roster import NodeRecord

DIRECT = 64
WIDTH = 8
HOP_S: Seconds = 2.0
"""Time that a node in the tree waits longer than the node from which it fetches."""
_LINES_A_RANK = 4
"""Changes go to more than `DIRECT` nodes only if all messages together have at most this many lines per rank."""


class Tables:
    """The newest table, and the table of the last formed generation, which most nodes have."""

    def __init__(self) -> None:
        self.newest: GenerationTable | None = None
        self._formed_table: GenerationTable | None = None
        self.number = 0
        """Number of the newest table."""

    def spread(self, head: TableHead, nodes: Sequence[NodeRecord], members: list[Member]) -> list[TableOrder]:
        """Number a new table and make the orders that distribute it to these nodes."""
        self.number += 1
        since = 0 if self._formed_table is None else self._formed_table.head.number
        head = msgspec.structs.replace(head, number=self.number, since=since)
        table = self.newest = GenerationTable(head, [node.store for node in nodes], members)
        know = [node for node in nodes if since and node.table == since]
        change = None if self._formed_table is None or not know else difference(self._formed_table, table)
        if change is None or not _is_little(change, table, len(know)):
            return _pass_on(table, [], nodes)
        others = [node for node in nodes if node.table != since]
        return [*(ChangeTable(node.node, change) for node in know), *_pass_on(table, know, others)]

    def take_over(self, table: GenerationTable | None, number: int) -> None:
        """Continue after another coordinator. `number`: the largest number of a table that an agent has received."""
        self.newest = table
        self.number = max(number, 0 if table is None else table.head.number)

    def formed(self, nodes: Sequence[NodeRecord]) -> None:
        """Note that these nodes have the newest table, as all workers have joined its generation."""
        self._formed_table = self.newest
        for node in nodes:
            node.table = self.number

    def missed(self, fact: TableMissed) -> list[KeepTable]:
        """Orders to give the newest table to a node that missed one; none if the missed one is newer still."""
        if self.newest is None or self.newest.head.number < fact.table:
            return []
        return [KeepTable(fact.node, self.newest)]


def difference(base: GenerationTable, table: GenerationTable) -> TableChange | None:
    """Change that turns `base` into `table`; None if `table` has no members."""
    if not table.members:
        return None
    former, stores = base.members, base.stores
    return TableChange(
        table.head,
        len(table.stores),
        [(at, store) for at, store in enumerate(table.stores) if at >= len(stores) or stores[at] != store],
        [member for at, member in enumerate(table.members) if at >= len(former) or former[at] != member],
    )


def _is_little(change: TableChange, table: GenerationTable, nodes: int) -> bool:
    """True if it is cheaper to send the change to this number of nodes than the whole table."""
    runs = len(change.head.holders)
    lines, whole = (len(change.members) + len(change.stores)), len(table.members) + len(table.stores)
    return 2 * lines <= whole and (nodes <= DIRECT or (lines + runs) * nodes <= _LINES_A_RANK * len(table.members))


def _pass_on(table: GenerationTable, have: Sequence[NodeRecord], nodes: Sequence[NodeRecord]) -> list[TableOrder]:
    """Orders that bring the whole table to `nodes`, from the coordinator or each other. `have`: other nodes with it."""
    if len(nodes) <= DIRECT:
        return [KeepTable(node.node, table) for node in nodes]
    first = max(0, WIDTH - len(have))
    orders: list[TableOrder] = [KeepTable(node.node, table) for node in nodes[:first]]
    line, depths = [*have, *nodes], dict[NodeId, int]()
    for at, node in enumerate(nodes[first:]):
        source = line[at // WIDTH]
        depths[node.node] = depth = depths.get(source.node, 0) + 1
        orders.append(FetchTable(node.node, table.head.number, source.store, depth * HOP_S))
    return orders
