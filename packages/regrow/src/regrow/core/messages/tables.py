"""The table of a generation: the data that all its workers share. A node gets it once, and its agent keeps it.

Small orders to single workers refer to the table by number, and the agent completes them from it. A node that has the
table of the last formed generation gets only the differences; in large jobs nodes get whole tables from each other.
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
    """A table without its lists.

    `number`: its own; later tables have larger ones. `since`: number of the last table whose generation was formed, 0
    before the first; that table is kept too, and changes refer to it. `holders`: runs of ranks, each as its first and
    last rank. The other fields are as in `FormGeneration`; before the first generation has formed they have no meaning.
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
    """Places of all workers. `stores`: addresses of the agents' stores, by node; keys are spread over them.

    `members`: by rank; empty while the workers build.
    """

    head: TableHead
    stores: list[str]
    members: list[Member]

    def checked(self) -> "GenerationTable":
        """Return this table after a check that no rank is missing. Raises `ProtocolError`."""
        if self.members and [member.rank for member in self.members] != list(range(self.head.world)):
            raise ProtocolError(f"table {self.head.number} has not every rank of its world of {self.head.world} once")
        return self


def _put(former: list[Line], length: int, lines: Iterable[tuple[int, Line]]) -> list[Line]:
    """The first `length` lines, after `lines` were put at their indices. Raises `ProtocolError` at a gap."""
    made = former[:length]
    for at, line in lines:
        if not 0 <= at <= len(made):
            raise ProtocolError(f"a table of {len(made)} lines has none at {at}")
        made[at : at + 1] = [line]
    return made


class TableChange(msgspec.Struct, frozen=True):
    """Differences between a table and the one with the number `head.since`: the new places and stores.

    `nodes`: present number of stores. `stores`: the changed ones, with their indices.
    """

    head: TableHead
    nodes: int
    stores: list[tuple[int, str]]
    members: list[Member]

    def applied_to(self, base: GenerationTable) -> GenerationTable:
        """Apply the change to `base`. Raises `ProtocolError` if `base` has another number, or ranks are missing."""
        if base.head.number != self.head.since:
            raise ProtocolError(f"a change of table {self.head.since} cannot be made to table {base.head.number}")
        stores = _put(base.stores, self.nodes, self.stores)
        members = _put(base.members, self.head.world, ((member.rank, member) for member in self.members))
        if len(stores) != self.nodes or len(members) != self.head.world:
            raise ProtocolError(f"a change leaves places of table {self.head.number} empty")
        return GenerationTable(self.head, stores, members)


class JoinGeneration(msgspec.Struct, frozen=True, tag=True):
    """A worker enters a generation: `FormGeneration` without the fields that the table number `table` contains."""

    worker: WorkerId
    rank: Rank
    generation: Generation
    table: int
    faults: list[FaultSpec] = []
    restore: CopySource | None = None
    own: OwnValues | None = None


class KeepTable(msgspec.Struct, frozen=True, tag=True):
    """To an agent: keep this whole table."""

    node: NodeId
    table: GenerationTable


class ChangeTable(msgspec.Struct, frozen=True, tag=True):
    """To an agent that has the table of the last formed generation: change it into the new table."""

    node: NodeId
    change: TableChange


class FetchTable(msgspec.Struct, frozen=True, tag=True):
    """To an agent: get the table with this number from another agent, which has it or is about to get it.

    `source`: address of that agent's store. If the table does not come `within` these seconds, send `TableMissed`.
    """

    node: NodeId
    table: int
    source: str
    within: Seconds


class TableMissed(msgspec.Struct, frozen=True, tag=True):
    """The agent did not get the table with this number; the coordinator then sends it the whole table."""

    node: NodeId
    table: int


TableOrder = KeepTable | ChangeTable | FetchTable
"""Orders by which a node gets a table."""


def completed(join: JoinGeneration, table: GenerationTable, holders: list[Rank]) -> FormGeneration:
    """Complete a worker's order from the table. `holders`: the ranks in the table's head.

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
    """Ascending ranks as runs of successive ranks, each given by its first and last rank."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return runs


def ranks_of(runs: Iterable[tuple[int, int]]) -> list[Rank]:
    """The ranks in these runs."""
    return [Rank(rank) for first, last in runs for rank in range(first, last + 1)]
