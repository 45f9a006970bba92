"""The node's door to the job's key-value store: where ranks leave what others need to form groups.

The keys are spread over the agents of the job and outlive every worker. A worker speaks to its own node's agent, which
speaks to the others (`keeper`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Self

import msgspec

from regrow.agent.store.peers import PeerLinks
from regrow.agent.store.store_node import StoreNode
from regrow.core.config import AgentConfig
from regrow.core.errors import ProtocolError
from regrow.core.ids import Generation, Seconds
from regrow.core.messages.store import StoreCancel, StoreHello, StoreReply, StoreRequest, StoreTable
from regrow.core.net import same_secret, serve_streams
from regrow.core.strangers import refused
from regrow.core.wire import FrameCodec

_HELLO_S: Seconds = 10.0
_HELLO_BYTES = 64 << 10
_log = logging.getLogger("regrow.agent")


class StoreServer:
    """Serves the store to workers of this node and to other agents, where they know the job's token.

    Args:
        config: one node serves a unix socket, several serve TCP on `bind`.
        tables: answers for tables of generations, if it is to serve them.
    """

    def __init__(
        self, config: AgentConfig, tables: Callable[[StoreTable], Awaitable[StoreReply]] | None = None
    ) -> None:
        self._config = config
        self._token = config.token.encode()
        self.peers = PeerLinks(config.token)
        self._tables = tables
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self.address = ""
        self.keeper = self._keeper()

    def _keeper(self) -> StoreNode:
        return StoreNode(self.address, self.peers, alone=self._config.facts.node_limit == 1)

    async def __aenter__(self) -> Self:
        config = self._config
        path = Path(config.socket_dir) / "store" if config.one_machine else None
        serving = serve_streams(self._serve, path, bind=config.bind, advertise=config.advertise)
        self._server, self.address = await serving
        self.peers.open(self.address)
        self.keeper = self._keeper()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        await self.peers.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def generation_formed(self, generation: Generation, stores: Sequence[str] = (), world: int = 0) -> None:
        """Keep the keys of this generation of `world` ranks, spread over these agents, and those of the one before."""
        self.keeper.learn(generation, stores, world)
        self.keeper.drop_before(Generation(generation - 1))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)
        try:
            await _Conversation(self._answer, self._token, reader, writer).run()
        except (ProtocolError, TimeoutError) as error:
            refused.add("store", str(error) or "no greeting came")
        except ConnectionError:
            pass  # the client died; its agent sees that
        except asyncio.CancelledError:
            pass  # this agent ends
        finally:
            writer.close()

    async def _answer(self, request: StoreRequest, caller: str) -> StoreReply:
        if isinstance(request, StoreTable) and self._tables is not None:
            return await self._tables(request)
        return await self.keeper.carry_out(request, caller)


class _Conversation:
    """One client: a worker, or another agent. Requests that wait do not hold up others."""

    def __init__(
        self,
        carry_out: Callable[[StoreRequest, str], Awaitable[StoreReply]],
        token: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._carry_out = carry_out
        self._token = token
        self._reader = reader
        self._writer = writer
        self._caller = ""
        self._codec: FrameCodec[StoreRequest] = FrameCodec(StoreRequest)
        self._answering: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Answer until the client leaves. Raises `ProtocolError` where it has no business here."""
        hello = await asyncio.wait_for(self._codec.read(self._reader, _HELLO_BYTES), _HELLO_S)
        if hello is None:
            return
        if not isinstance(hello, StoreHello) or not same_secret(hello.token, self._token):
            raise ProtocolError("the client does not know the job's token")
        self._caller = hello.agent
        self._say(StoreReply(), hello.ask)
        try:
            while (request := await self._codec.read(self._reader)) is not None:
                self._take(request)
                await self._writer.drain()
        finally:
            for task in list(self._answering.values()):
                task.cancel()

    def _take(self, request: StoreRequest) -> None:
        asked = self._answering.get(request.ask)
        if isinstance(request, StoreCancel):
            if asked is not None:
                asked.cancel()
            return
        if asked is not None:
            raise ProtocolError(f"request {request.ask} is not answered yet, and was sent again")
        task = asyncio.get_running_loop().create_task(self._answer(request))
        self._answering[request.ask] = task
        task.add_done_callback(lambda done: self._answered(request.ask, done))

    def _answered(self, number: int, done: "asyncio.Task[None]") -> None:
        del self._answering[number]
        if not done.cancelled() and (error := done.exception()) is not None:
            _log.error("a request to the store could not be answered", exc_info=error)
            self._writer.close()  # so that nobody waits for the answer

    async def _answer(self, request: StoreRequest) -> None:
        self._say(await self._carry_out(request, self._caller), request.ask)

    def _say(self, reply: StoreReply, number: int) -> None:
        try:
            frame = self._codec.frame(msgspec.structs.replace(reply, ask=number))
        except ProtocolError as error:
            frame = self._codec.frame(StoreReply(error=str(error), ask=number))
        self._writer.write(frame)
