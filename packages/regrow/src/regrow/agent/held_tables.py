"""The tables that an agent keeps, and orders that wait for one. Pure."""

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
"""Orders that can be carried out now: without a table, or completed from one; news of a table."""


class HeldTables:
    """The newest table, the one that changes refer to, and the orders that wait for one that is on its way."""

    def __init__(self) -> None:
        self.missing = 0
        """The number of a table that should be here and is not; 0: there is none."""
        self._tables: dict[int, GenerationTable] = {}
        self._newest = 0
        self._holders: list[Rank] = []
        self._waiting: list[JoinGeneration] = []

    def get(self, number: int) -> GenerationTable | None:
        """The table with this number, if it is kept."""
        return self._tables.get(number)

    def is_over(self, number: int) -> bool:
        """True if a later table is here, so that this one is of no use any more."""
        return number < self._newest

    def take(self, order: AgentOrder) -> list[Feasible]:
        """Orders that can be carried out now that this one has come. Raises `ProtocolError`."""
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
                # What could not be done yet is not in the answer, and so must not be done any more.
                self._waiting, self.missing = [], 0
            case orders.HaltGeneration(at=None):
                self._give_up(order.worker, order.generation)
        return [order]

    def keep(self, table: GenerationTable) -> list[Feasible]:
        """A table is here, checked; what waited for it can be done. One that is older than the newest is of no use."""
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
        # What waits for an older one is over: a later generation is being formed.
        self._waiting = [join for join in self._waiting if join.table > head.number]
        return [table, *(self._complete(join) for join in ready)]

    def _miss(self, number: int) -> None:
        if number > self._newest:
            self.missing = max(number, self.missing)

    def _complete(self, join: JoinGeneration) -> Feasible:
        return completed(join, self._tables[join.table], self._holders)

    def _give_up(self, worker: WorkerId, generation: Generation) -> None:
        """The worker is halted in this generation: it is not to enter it, or an older one, any more."""
        self._waiting = [join for join in self._waiting if join.worker != worker or join.generation > generation]
