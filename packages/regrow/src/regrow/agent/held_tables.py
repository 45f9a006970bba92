"""The tables that an agent keeps, and orders that wait for a table. Pure."""

from typing import TypeAlias

from regrow.core.ids import Generation, Rank, WorkerId
from regrow.core.messages import orders
from regrow.core.messages.succession import ReportNode
from regrow.core.messages.tables import (
    ChangeTable,
    FetchTable,
    GenerationTable,
    JoinGeneration,
    KeepTable,
    completed,
    ranks_of,
)
from regrow.core.messages.unions import AgentOrder, NodeTask, WorkerOrder

Feasible: TypeAlias = NodeTask | WorkerOrder | GenerationTable
"""A new table, or an order that can be carried out now: it needs no table or was completed from one."""


class HeldTables:
    """The newest table, the table to which changes refer, and orders that wait for a table that has not arrived."""

    def __init__(self) -> None:
        self.missing = 0
        """Number of the newest table that is missing; 0: no table is."""
        self._tables: dict[int, GenerationTable] = {}
        self._newest = 0
        self._holders: list[Rank] = []
        self._waiting: list[JoinGeneration] = []

    def get(self, number: int) -> GenerationTable | None:
        """The table with this number, if it is kept."""
        return self._tables.get(number)

    def is_over(self, number: int) -> bool:
        """True if a later table is here, so that the table with this number is obsolete."""
        return number < self._newest

    def take(self, order: AgentOrder) -> list[Feasible]:
        """Take an order; returns the orders that can be carried out now. Raises `ProtocolError`."""
        match order:
            case KeepTable():
                return self.keep(order.table)
            case ChangeTable(change=change):
                base = self._tables.get(change.head.since)
                if base is None or change.head.number <= self._newest:
                    self._miss(change.head.number)
                    return []
                return self.keep(change.applied_to(base))
            case FetchTable():
                self._miss(order.table)
                return []
            case JoinGeneration() if order.table == self._newest:
                return [self._complete(order)]
            case JoinGeneration():
                self._miss(order.table)
                if order.table > self._newest:
                    self._waiting.append(order)
                return []
            case orders.FenceWorker():
                self._waiting = [join for join in self._waiting if join.worker != order.worker]
            case ReportNode():
                # Waiting orders are not in the report, so they must not be carried out any more.
                self._waiting, self.missing = [], 0
            case orders.HaltGeneration(at=None):
                self._give_up(order.worker, order.generation)
        return [order]

    def keep(self, table: GenerationTable) -> list[Feasible]:
        """Keep a checked table; returns it and the orders that waited for it. Ignores a table that is not newer."""
        head = table.head
        if head.number <= self._newest:
            return []
        base = self._tables.get(head.since)
        self._tables = {head.number: table} | ({} if base is None else {head.since: base})
        self._newest = head.number
        self._holders = ranks_of(head.holders)
        if self.missing <= self._newest:
            self.missing = 0
        ready = [join for join in self._waiting if join.table == head.number]
        # Orders that wait for an older table are obsolete, as a later generation is being formed.
        self._waiting = [join for join in self._waiting if join.table > head.number]
        return [table, *(self._complete(join) for join in ready)]

    def _miss(self, number: int) -> None:
        if number > self._newest:
            self.missing = max(number, self.missing)

    def _complete(self, join: JoinGeneration) -> Feasible:
        return completed(join, self._tables[join.table], self._holders)

    def _give_up(self, worker: WorkerId, generation: Generation) -> None:
        """Drop a worker's waiting orders to enter this or an older generation, as it is halted in this one."""
        self._waiting = [join for join in self._waiting if join.worker != worker or join.generation > generation]
