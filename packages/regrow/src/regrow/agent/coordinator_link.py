"""The agent's connection to the coordinator or its successor: one WebSocket, facts up and orders down."""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator
from typing import Self

import aiohttp
import msgspec

from regrow.agent.held_tables import Feasible
from regrow.agent.history import NodeHistory
from regrow.agent.succession import NextCoordinator
from regrow.agent.worker_states import WorkerStates
from regrow.core import http
from regrow.core.config import AgentConfig
from regrow.core.errors import ProtocolError, RegrowError
from regrow.core.ids import Seconds
from regrow.core.messages import facts
from regrow.core.messages.succession import ReportNode
from regrow.core.messages.unions import AgentFact, AgentOrder
from regrow.core.process.tasks import Fails, supervised
from regrow.core.wire import MAX_FRAME_BYTES, FrameCodec, encoded

_RETRY_S: Seconds = 0.1
_FLUSH_S: Seconds = 2.0
_REFUSED = 4400
"""First of the close codes that the coordinator defines itself."""
_log = logging.getLogger("regrow.agent")


class CoordinatorUnreachable(RegrowError):
    """Error: no coordinator answers at the address, or it refuses this agent."""


class CoordinatorLink:
    """Connection to the coordinator; connects when its context is entered.

    Args:
        config: the address, the token, and the longest silence (`patience`).
        fails: called with an error after which nothing is sent or noticed any more.
    """

    def __init__(self, config: AgentConfig, fails: Fails) -> None:
        self.worker_states = WorkerStates()
        """States of this node's workers, from all sent facts and carried out orders."""
        self._history = NodeHistory(config.node)
        self._config, self._fails = config, fails
        self._codec: FrameCodec[AgentOrder | list[AgentOrder]] = FrameCodec(AgentOrder | list[AgentOrder])
        self._encoder = msgspec.msgpack.Encoder()
        self._outbox: asyncio.Queue[AgentFact | None] = asyncio.Queue()
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._sender: asyncio.Task[None] | None = None
        self._next = NextCoordinator(config)
        self._need: asyncio.Task[None] | None = None
        self._joined: AgentFact | None = None
        self._unsent: AgentFact | None = None

    async def __aenter__(self) -> Self:
        self._session = http.session()
        try:
            self._socket = await self._connect(self._session, self._config.coordinator)
        except BaseException:
            await self._session.close()
            raise
        self._sender = self._sending(self._socket)
        self._need = supervised(
            self._next.report_need(self._session), "reporting that a coordinator is needed", self._fails
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self._outbox.put_nowait(None)
        if self._need is not None:
            self._need.cancel()
        if self._sender is not None:
            # Do not wait for a coordinator that reads no more or could not be reached.
            await asyncio.wait({self._sender}, timeout=_FLUSH_S)
            self._sender.cancel()
        if self._socket is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._socket.close(), _FLUSH_S)
        if self._session is not None:
            await self._session.close()

    async def _connect(self, session: aiohttp.ClientSession, coordinator: str) -> aiohttp.ClientWebSocketResponse:
        config = self._config
        loop = asyncio.get_running_loop()
        deadline = loop.time() + config.lease
        while True:
            try:
                return await session.ws_connect(
                    f"{coordinator}/agent",
                    params={"node": config.node},
                    headers={"Authorization": f"Bearer {config.token}"},
                    timeout=aiohttp.ClientWSTimeout(ws_close=_FLUSH_S),
                    # A ping each interval, answered within half of it. Training does not need the coordinator between
                    # faults, so a paused one costs nothing; a near agent sees the end of its parent in any case.
                    heartbeat=None if config.near else config.patience * 2 / 3,
                    max_msg_size=MAX_FRAME_BYTES,
                )
            except aiohttp.WSServerHandshakeError as error:
                raise CoordinatorUnreachable(
                    f"the coordinator at {coordinator} refused node {config.node}: {error.message}",
                    hint="is the token that of this job?",
                ) from error
            except (aiohttp.ClientError, OSError) as error:
                if loop.time() + _RETRY_S > deadline:
                    raise CoordinatorUnreachable(
                        f"no coordinator answers at {coordinator}: {error}",
                        hint="has the launcher ended, or does a firewall block the connection?",
                    ) from error
                await asyncio.sleep(_RETRY_S)

    def register(self, *, store: str, copy_endpoint: str) -> None:
        """Register this node, with the addresses of its key-value store and of its copies of state."""
        config = self._config
        self.send(
            facts.NodeJoined(
                node=config.node,
                host=config.advertise,
                slots=config.slots or config.spec.nproc,
                store=store,
                pid=os.getpid(),
                copy_endpoint=copy_endpoint,
                domain=config.domain,
                stay=config.stay,
            )
        )

    def send(self, fact: AgentFact) -> None:
        """Send a fact after all earlier ones. Without a connection, facts wait for the next coordinator."""
        if isinstance(fact, facts.NodeJoined):
            self._joined = fact
        self._history.sent(fact)
        self.worker_states.sent(fact)
        self._next.sent(fact)
        self._outbox.put_nowait(fact)

    def carried_out(self, order: Feasible) -> None:
        """Enter an order that is being carried out; if it requests a report of the workers, send the report."""
        self._history.ordered(order)
        self.worker_states.ordered(order)
        if isinstance(order, ReportNode):
            self.send(self._history.report(order))

    def _sending(self, socket: aiohttp.ClientWebSocketResponse) -> asyncio.Task[None]:
        return supervised(self._send_all(socket), "sending facts to the coordinator", self._fails)

    async def _send_all(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while (fact := self._unsent or await self._outbox.get()) is not None:
            self._unsent = fact
            try:
                await socket.send_bytes(encoded(self._encoder, fact))
            except (ConnectionError, aiohttp.ClientError):
                return  # The end of `orders` reports the loss.
            self._unsent = None

    async def orders(self) -> AsyncIterator[AgentOrder]:
        """Orders until no coordinator is left. Raises `ProtocolError` on invalid messages, or on a refusal."""
        while self._socket is not None:
            waiting = supervised(self._give_way(self._socket), "waiting for another coordinator", self._fails)
            try:
                async for order in self._orders_of(self._socket):
                    self._next.answered()
                    yield order
            finally:
                waiting.cancel()
            if not await self._follow():
                return

    async def _give_way(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Close the connection to a coordinator once there is another coordinator."""
        if self._session is not None and self._config.launcher:
            await self._next.wait(self._session)
            await socket.close()

    async def _follow(self) -> bool:
        """Register with the successor of a lost coordinator; returns False if there is no successor."""
        if self._session is None or self._joined is None:
            return False
        while (leader := await self._next.find(self._session)) is not None:
            if self._sender is not None:
                self._sender.cancel()
                await asyncio.wait({self._sender})
            _log.warning("node %s turns to another coordinator, at %s", self._config.node, leader.address)
            try:
                self._socket = await self._connect(self._session, leader.address)
                await self._socket.send_bytes(self._encoder.encode(self._joined))
            except (CoordinatorUnreachable, ConnectionError, aiohttp.ClientError):
                continue  # This coordinator is lost too, and there may be another after it.
            self._sender = self._sending(self._socket)
            return True
        return False

    async def _orders_of(self, socket: aiohttp.ClientWebSocketResponse) -> AsyncIterator[AgentOrder]:
        while True:
            try:
                message = await socket.receive()
            except (ConnectionError, aiohttp.ClientError):
                return  # A ping cannot be answered: the coordinator has given up this agent after a long silence.
            match message.type:
                case aiohttp.WSMsgType.BINARY:
                    orders = self._codec.decode(message.data)
                    for order in orders if isinstance(orders, list) else [orders]:
                        yield order
                case aiohttp.WSMsgType.CLOSE if message.data is not None and message.data >= _REFUSED:
                    raise ProtocolError(f"the coordinator refuses this agent: {message.extra}")
                case aiohttp.WSMsgType.CLOSE | aiohttp.WSMsgType.CLOSING | aiohttp.WSMsgType.CLOSED:
                    return
                case aiohttp.WSMsgType.ERROR:
                    return
                case _:
                    raise ProtocolError(f"the coordinator sent a {message.type.name} frame, not a message")
