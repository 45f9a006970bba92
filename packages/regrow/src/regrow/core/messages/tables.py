"""The table of a generation: what all of its workers are told alike. A node gets it once, and its agent keeps it.

Small orders to single workers refer to it by its number; the agent completes them from it. A node that has the table of
the generation that stood last is told what differs from that; in large jobs nodes get whole tables from one another.
"""

from collections.abc import Iterable
from typing import TypeVar

import msgspec

from regrow.core.errors import ProtocolError
from regrow.core.ids import Generation, NodeId, Rank, Seconds, StepNo, WorkerId
from regrow.core.messages.copies import CopySource
from regrow.core.messages.orders import FormGeneration
from regrow.core.messages.replicas import OwnValues
from regrow.core.messages.vocabulary import FaultSpec, Member, WorldChange

Line = TypeVar("Line")


class TableHead(msgspec.Struct, frozen=True):
    """All of a table but its lists.

    `number`: its own; later tables have larger ones. `since`: the number of the last table of which a generation stood,
    0 before the first; it is kept too, and changes refer to it. `holders`: the first and the last rank of each run of
    them. The rest as in `FormGeneration`; before the first generation has formed there is nothing of it yet.
    """

    generation: Generation
    world: int
    number: int = 0
    since: int = 0
    step: StepNo = StepNo(0)
    holders: list[tuple[int, int]] = []
    restart_index: int = msgspec.field(default=0, name="inside")
    rewind: bool = False
    change: WorldChange | None = None
    whole_body: bool = False
    over: bool = False


class GenerationTable(msgspec.Struct, frozen=True, tag=True):
    """Places of all workers. `stores`: the agents' stores in the order of nodes, over which the keys are spread.

    `members`: by rank; empty while the workers build.
    """

    head: TableHead
    stores: list[str]
    members: list[Member]

    def checked(self) -> "GenerationTable":
        """Itself. Raises `ProtocolError` where ranks are missing."""
        if self.members and [member.rank for member in self.members] != list(range(self.head.world)):
            raise ProtocolError(f"table {self.head.number} has not every rank of its world of {self.head.world} once")
        return self


def _put(former: list[Line], length: int, lines: Iterable[tuple[int, Line]]) -> list[Line]:
    """The first `length` lines with these put in their places, each of which is there or is the next one."""
    made = former[:length]
    for at, line in lines:
        if not 0 <= at <= len(made):
            raise ProtocolError(f"a table of {len(made)} lines has none at {at}")
        made[at : at + 1] = [line]
    return made


class TableChange(msgspec.Struct, frozen=True):
    """A table as it differs from the one with the number `head.since`: the places and stores that are new.

    `nodes`: how many stores there are now. `stores`: with their places.
    """

    head: TableHead
    nodes: int
    stores: list[tuple[int, str]]
    members: list[Member]

    def applied_to(self, base: GenerationTable) -> GenerationTable:
        """The table that is meant. Raises `ProtocolError` where `base` is another one, or ranks are missing."""
        if base.head.number != self.head.since:
            raise ProtocolError(f"a change of table {self.head.since} cannot be made to table {base.head.number}")
        stores = _put(base.stores, self.nodes, self.stores)
        members = _put(base.members, self.head.world, ((member.rank, member) for member in self.members))
        if len(stores) != self.nodes or len(members) != self.head.world:
            raise ProtocolError(f"a change leaves places of table {self.head.number} empty")
        return GenerationTable(self.head, stores, members)


class JoinGeneration(msgspec.Struct, frozen=True, tag=True):
    """A worker enters a generation: `FormGeneration` without what stands in the table with the number `table`."""

    worker: WorkerId
    rank: Rank
    generation: Generation
    table: int
    faults: list[FaultSpec] = []
    restore: CopySource | None = None
    own: OwnValues | None = None


class KeepTable(msgspec.Struct, frozen=True, tag=True):
    """To an agent: a whole table."""

    node: NodeId
    table: GenerationTable


class ChangeTable(msgspec.Struct, frozen=True, tag=True):
    """To an agent that has the table of the generation that stood last."""

    node: NodeId
    change: TableChange


class FetchTable(msgspec.Struct, frozen=True, tag=True):
    """To an agent: another one has the table with this number, or is about to get it.

    `source`: the address of that one's store. An agent that does not get it `within` these seconds sends `TableMissed`.
    """

    node: NodeId
    table: int
    source: str
    within: Seconds


class TableMissed(msgspec.Struct, frozen=True, tag=True):
    """An agent has not got the table with this number, in whatever way it should have; it is then sent whole."""

    node: NodeId
    table: int


TableOrder = KeepTable | ChangeTable | FetchTable
"""Ways of a table to a node."""


def completed(join: JoinGeneration, table: GenerationTable, holders: list[Rank]) -> FormGeneration:
    """Complete a worker's order with the contents of the table. `holders`: those of its head, as ranks.

    Raises `ProtocolError` if the worker does not have that rank in the table.
    """
    head = table.head
    place = table.members[join.rank] if 0 <= join.rank < len(table.members) else None
    if place is None or place.worker != join.worker or head.generation != join.generation:
        raise ProtocolError(f"{join.worker} is to enter generation {join.generation}, and is not in its table")
    return FormGeneration(
        worker=join.worker,
        generation=join.generation,
        rank=place.rank,
        local_rank=place.local_rank,
        step=head.step,
        members=table.members,
        holders=holders,
        stores=table.stores,
        faults=join.faults,
        restore=join.restore,
        restart_index=head.restart_index,
        rewind=head.rewind,
        change=head.change,
        whole_body=head.whole_body,
        over=head.over,
        own=join.own,
    )


def runs_of(ranks: Iterable[Rank]) -> list[tuple[int, int]]:
    """Ascending ranks as runs: the first and the last of each."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return runs


def ranks_of(runs: Iterable[tuple[int, int]]) -> list[Rank]:
    """The ranks of such runs."""
    return [Rank(rank) for first, last in runs for rank in range(first, last + 1)]
