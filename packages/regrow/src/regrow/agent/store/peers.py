"""Connections to the stores of other agents: opened when first needed, many requests at a time on each."""

import asyncio
import itertools
import logging
from typing import Protocol

import msgspec

from regrow.core.errors import ProtocolError, StoreNodeLost, UsageError
from regrow.core.ids import Seconds
from regrow.core.messages.store import StoreCancel, StoreHello, StoreMessage, StoreReply
from regrow.core.net import open_connection
from regrow.core.process.tasks import seen, shared
from regrow.core.wire import FrameCodec

_CONNECT_S: Seconds = 10.0
_CODEC: FrameCodec[StoreReply] = FrameCodec(StoreReply)
_log = logging.getLogger("regrow.agent")


class StorePeers(Protocol):
    """The stores of other agents, as a store node uses them."""

    async def ask(self, agent: str, request: StoreMessage, within: Seconds) -> StoreReply:
        """Answer of the agent at this address to a request. Raises `StoreNodeLost`."""
        ...

    def keep_only(self, agents: set[str]) -> None:
        """Close the connections to all agents but these, as the others are no longer part of the job."""
        ...


class PeerLinks:
    """Connections to other agents, one to each that was sent a request.

    Args:
        token: the job's token.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self._own = ""
        self._links: dict[str, asyncio.Task[_Link]] = {}

    def open(self, own: str) -> None:
        """Set the address of this agent's store, which is sent to the other agents."""
        self._own = own

    async def ask(self, agent: str, request: StoreMessage, within: Seconds) -> StoreReply:
        """Answer of the agent at this address to a request. Raises `StoreNodeLost`."""
        opening = self._links.get(agent)
        if opening is None or (opening.done() and _is_dead(opening)):
            opening = self._links[agent] = shared(self._connect(agent))
        try:
            link = await asyncio.shield(opening)
        except asyncio.CancelledError:
            if not opening.cancelled():
                raise  # The caller was cancelled, not the connection.
            raise StoreNodeLost(f"{agent} is not part of the job any more") from None
        return await link.ask(request, within)

    async def _connect(self, agent: str) -> "_Link":
        try:
            async with asyncio.timeout(_CONNECT_S):
                link = await open_connection(lambda: _Link(agent), agent)
        except (OSError, UsageError) as error:
            raise StoreNodeLost(f"{agent} cannot be reached: {str(error) or type(error).__name__}") from error
        link.send(StoreHello(self._token, self._own, quiet=True))
        return link

    def keep_only(self, agents: set[str]) -> None:
        """Close the connections to all agents but these."""
        for agent in [agent for agent in self._links if agent not in agents]:
            self._hang_up(self._links.pop(agent))

    async def close(self) -> None:
        """Close all connections."""
        links = list(self._links.values())
        self._links.clear()
        for opening in links:
            self._hang_up(opening)
        await asyncio.gather(*links, return_exceptions=True)

    @staticmethod
    def _hang_up(opening: "asyncio.Task[_Link]") -> None:
        if not opening.done():
            opening.cancel()
        elif not opening.cancelled() and opening.exception() is None:
            opening.result().close("this agent has hung up")


class _Link(asyncio.Protocol):
    """Connection to one agent. Answers are matched to requests by number."""

    def __init__(self, agent: str) -> None:
        self._agent = agent
        self._transport: asyncio.Transport
        self._received = bytearray()
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[StoreReply]] = {}
        self._lost = ""
        self._room = asyncio.Event()
        """Set unless the other agent reads too slowly."""
        self._room.set()

    @property
    def lost(self) -> bool:
        """True if the link has ended."""
        return bool(self._lost)

    def send(self, message: StoreMessage) -> None:
        """Send a message that gets no answer."""
        self._transport.write(_CODEC.frame(message))

    async def ask(self, request: StoreMessage, within: Seconds) -> StoreReply:
        """The agent's answer to a request. Raises `StoreNodeLost`."""
        if self._lost:
            raise StoreNodeLost(self._lost)
        number = next(self._numbers)
        answer: asyncio.Future[StoreReply] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        answer.add_done_callback(seen)
        try:
            async with asyncio.timeout(within):
                self._transport.write(_CODEC.frame(msgspec.structs.replace(request, ask=number)))
                if not self._room.is_set():
                    await self._room.wait()
                return await answer
        except TimeoutError:
            raise StoreNodeLost(f"{self._agent} has not answered within {within:.0f} s") from None
        finally:
            del self._asked[number]
            if not answer.done() or answer.cancelled():
                self._withdraw(number)

    def _withdraw(self, number: int) -> None:
        if not self._lost and not self._transport.is_closing():
            self._transport.write(_CODEC.frame(StoreCancel(ask=number)))

    # --- called by the event loop ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send requests from now on, as the connection is open."""
        self._transport = transport  # type: ignore[assignment]  # of a stream, so it can write

    def data_received(self, data: bytes) -> None:
        """Take bytes of answers."""
        self._received += data
        try:
            while not self._lost and (reply := _CODEC.next(self._received)) is not None:
                answer = self._asked.get(reply.ask)
                if answer is not None and not answer.done():
                    answer.set_result(reply)
        except ProtocolError as error:
            self.close(f"{self._agent} does not speak this protocol: {error}")

    def pause_writing(self) -> None:
        """Let further requests wait, as the buffer is full."""
        self._room.clear()

    def resume_writing(self) -> None:
        """Send requests again, as the buffer has room."""
        self._room.set()

    def connection_lost(self, error: Exception | None) -> None:
        """End open requests, as the connection was closed by either side, or broke."""
        self.close(f"{self._agent} has ended" if error is None else f"the connection to {self._agent} broke: {error}")

    def close(self, reason: str) -> None:
        """Close the connection; open requests end with `StoreNodeLost`."""
        self._lost = self._lost or reason
        self._room.set()
        self._transport.close()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(StoreNodeLost(self._lost))


def _is_dead(opening: "asyncio.Task[_Link]") -> bool:
    return opening.cancelled() or opening.exception() is not None or opening.result().lost
