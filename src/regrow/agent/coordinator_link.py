"""The agent's connection to the coordinator: one WebSocket, facts up and orders down."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Self

import aiohttp
import msgspec

from regrow.core.config import AgentConfig
from regrow.core.errors import ProtocolError, RegrowError
from regrow.core.ids import Seconds
from regrow.core.messages import AgentFact, AgentOrder
from regrow.core.wire import MAX_FRAME_BYTES, FrameCodec

_RETRY_S: Seconds = 0.1
_FLUSH_S: Seconds = 2.0
_REFUSED = 4400
"""Close codes from here on are the coordinator's own."""
_log = logging.getLogger("regrow.agent")


class CoordinatorUnreachable(RegrowError):
    """No coordinator answers at the address, or it refuses this agent."""


class CoordinatorLink:
    """Connects on entry.

    Args:
        config: where, with which token, and for how long a silence is borne (`patience`).
    """

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._codec: FrameCodec[AgentOrder] = FrameCodec(AgentOrder)
        self._encoder = msgspec.msgpack.Encoder()
        self._outbox: asyncio.Queue[AgentFact | None] = asyncio.Queue()
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._sender: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession()
        try:
            self._socket = await self._connect(self._session)
        except BaseException:
            await self._session.close()
            raise
        self._sender = asyncio.create_task(self._send_all(self._socket))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._outbox.put_nowait(None)
        if self._sender is not None:
            with contextlib.suppress(TimeoutError):  # a coordinator that reads no more is not waited for
                await asyncio.wait_for(self._sender, _FLUSH_S)
        if self._socket is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._socket.close(), _FLUSH_S)
        if self._session is not None:
            await self._session.close()

    async def _connect(self, session: aiohttp.ClientSession) -> aiohttp.ClientWebSocketResponse:
        config = self._config
        loop = asyncio.get_running_loop()
        deadline = loop.time() + config.lease
        while True:
            try:
                return await session.ws_connect(
                    f"{config.coordinator}/agent",
                    params={"node": config.node},
                    headers={"Authorization": f"Bearer {config.token}"},
                    timeout=aiohttp.ClientWSTimeout(ws_close=_FLUSH_S),
                    # A ping each interval, answered within half of it. Training does not need the coordinator between
                    # faults, so one that is paused costs nothing; the end of one's own parent is known anyway.
                    heartbeat=None if config.near else config.patience * 2 / 3,
                    max_msg_size=MAX_FRAME_BYTES,
                )
            except aiohttp.WSServerHandshakeError as error:
                raise CoordinatorUnreachable(
                    f"the coordinator at {config.coordinator} refused node {config.node}: {error.message}",
                    hint="is the token that of this job?",
                ) from error
            except (aiohttp.ClientError, OSError) as error:
                if loop.time() + _RETRY_S > deadline:
                    raise CoordinatorUnreachable(
                        f"no coordinator answers at {config.coordinator}: {error}",
                        hint="has the launcher ended, or does a firewall stand between?",
                    ) from error
                await asyncio.sleep(_RETRY_S)

    def send(self, fact: AgentFact) -> None:
        """Send a fact, after all earlier ones. Once the connection is lost, facts go nowhere."""
        self._outbox.put_nowait(fact)

    async def _send_all(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while (fact := await self._outbox.get()) is not None:
            try:
                await socket.send_bytes(self._encoder.encode(fact))
            except (ConnectionError, aiohttp.ClientError):
                return  # the end of `orders` says so

    async def orders(self) -> AsyncIterator[AgentOrder]:
        """Orders until the connection ends. Raises `ProtocolError` on what is none, or where this agent is refused."""
        while self._socket is not None:
            try:
                message = await self._socket.receive()
            except (ConnectionError, aiohttp.ClientError):
                return  # a ping cannot be answered: the coordinator has given up an agent that was silent for so long
            match message.type:
                case aiohttp.WSMsgType.BINARY:
                    yield self._codec.decode(message.data)
                case aiohttp.WSMsgType.CLOSE if message.data is not None and message.data >= _REFUSED:
                    raise ProtocolError(f"the coordinator refuses this agent: {message.extra}")
                case aiohttp.WSMsgType.CLOSE | aiohttp.WSMsgType.CLOSING | aiohttp.WSMsgType.CLOSED:
                    return
                case aiohttp.WSMsgType.ERROR:
                    return
                case _:
                    raise ProtocolError(f"the coordinator sent a {message.type.name} frame, not a message")
