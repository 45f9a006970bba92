"""Distribution of tables: fetched from other agents, passed on to them, or requested from the coordinator."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec

from regrow.agent.held_tables import Feasible, HeldTables
from regrow.core.errors import ProtocolError, StoreNodeLost
from regrow.core.ids import NodeId, Seconds
from regrow.core.messages.store import TIMEOUT, StoreMessage, StoreReply, StoreTable
from regrow.core.messages.tables import FetchTable, GenerationTable, KeepTable, TableMissed
from regrow.core.messages.unions import AgentOrder
from regrow.core.wire import FrameCodec

_AGAIN_S: Seconds = 2.0
_LONGEST_S: Seconds = 60.0
_log = logging.getLogger("regrow.agent")


class TableRelay:
    """Passes orders to the agent once the tables to which they refer are here.

    Args:
        node: the agent's node.
        do: carries out an order that is feasible now.
        report: sends a fact to the coordinator.
        ask: sends a request to another agent's store.
        start: runs a task whose failure ends the agent.
    """

    def __init__(
        self,
        node: NodeId,
        *,
        do: Callable[[Feasible], None],
        report: Callable[[TableMissed], None],
        ask: Callable[[str, StoreMessage, Seconds], Awaitable[StoreReply]],
        start: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._node = node
        self._carry_out, self._report, self._ask, self._start = do, report, ask, start
        self._held = HeldTables()
        self._codec: FrameCodec[GenerationTable] = FrameCodec(GenerationTable)
        self._encoder = msgspec.msgpack.Encoder()
        self._encoded: tuple[int, bytes] = (0, b"")
        self._pursued = 0
        self._news: asyncio.Event = asyncio.Event()

    def obey(self, order: AgentOrder) -> None:
        """Carry out an order now, or as soon as its table has arrived. Raises `ProtocolError`."""
        if isinstance(order, KeepTable):
            order.table.checked()
        self._do(self._held.take(order))
        missing = self._held.missing
        if missing > self._pursued:
            self._pursued = missing
            fetch = order if isinstance(order, FetchTable) and order.table == missing else None
            self._start(self._pursue(missing, fetch))

    def _do(self, feasible: list[Feasible]) -> None:
        for each in feasible:
            if isinstance(each, GenerationTable):
                self._news.set()
                self._news = asyncio.Event()
            self._carry_out(each)

    async def _pursue(self, number: int, fetch: FetchTable | None) -> None:
        """Get a missing table: from another agent if `fetch` names one, else from the coordinator."""
        if fetch is not None and (table := await self._fetched(fetch)) is not None:
            self._do(self._held.keep(table))
        while self._held.missing == number:
            self._report(TableMissed(self._node, number))
            await asyncio.sleep(_AGAIN_S)

    async def _fetched(self, fetch: FetchTable) -> GenerationTable | None:
        try:
            async with asyncio.timeout(fetch.within):
                reply = await self._ask(fetch.source, StoreTable(fetch.table, fetch.within), fetch.within)
            if reply.error:
                raise StoreNodeLost(reply.error)
            table = self._codec.decode(reply.value).checked()
            if table.head.number != fetch.table:
                raise ProtocolError(f"it sent table {table.head.number}")
            return table
        except (StoreNodeLost, TimeoutError, ProtocolError) as error:
            why = str(error) or f"no answer within {fetch.within:g} s"
            _log.warning("table %d does not come from the agent at %s: %s", fetch.table, fetch.source, why)
            return None

    async def answer(self, request: StoreTable) -> StoreReply:
        """Answer another agent's request for a table that this agent has or is about to get."""
        loop = asyncio.get_running_loop()
        until = loop.time() + min(request.timeout, _LONGEST_S)
        while (table := self._held.get(request.table)) is None:
            if self._held.is_over(request.table):
                return StoreReply(error=f"table {request.table} is over")
            try:
                async with asyncio.timeout_at(until):
                    await self._news.wait()
            except TimeoutError:
                return StoreReply(error=TIMEOUT)
        return StoreReply(value=self._bytes_of(table))

    def _bytes_of(self, table: GenerationTable) -> bytes:
        if self._encoded[0] != table.head.number:
            self._encoded = (table.head.number, self._encoder.encode(table))
        return self._encoded[1]
