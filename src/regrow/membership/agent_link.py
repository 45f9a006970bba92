"""One agent's connection to the coordinator."""

import asyncio

import msgspec
from aiohttp import web

from regrow.core.messages import AgentOrder, NodeJoined


class AgentLink:
    """A registered agent. Orders wait in a queue, so that a slow agent holds nobody up.

    Args:
        joined: how it registered.
        socket: its connection, open.
    """

    def __init__(self, joined: NodeJoined, socket: web.WebSocketResponse) -> None:
        self.node = joined.node
        self.joined = joined
        self.socket = socket
        self.stopped = False
        """It has said goodbye: what comes next is no loss."""
        self.gone = asyncio.Event()
        self.orders: asyncio.Queue[AgentOrder] = asyncio.Queue()

    async def send_orders(self) -> None:
        """Send orders, in their order, until cancelled or until the connection has ended."""
        encoder = msgspec.msgpack.Encoder()
        while True:
            order = await self.orders.get()
            try:
                await self.socket.send_bytes(encoder.encode(order))
            except (ConnectionError, RuntimeError):
                return  # Who reads from the connection reports its loss.
