"""One agent's connection to the coordinator."""

import asyncio

import msgspec
from aiohttp import web

from regrow.core.ids import Seconds
from regrow.core.messages import facts
from regrow.core.messages.unions import AgentOrder
from regrow.core.process.tasks import TaskScope

_FULL_FRAME = 1 << 20
"""A frame of at least this many bytes gets no further orders; a single order may be longer."""


class AgentLink:
    """Link to a registered agent. Orders wait in a queue, so that a slow agent delays no others.

    Args:
        joined: the agent's registration.
        socket: the agent's open connection.
    """

    def __init__(self, joined: facts.NodeJoined, socket: web.WebSocketResponse) -> None:
        self.node = joined.node
        self.joined = joined
        self.socket = socket
        self.stopped = False
        """True if the agent announced its end, so that the end of its connection is no loss."""
        self.gone = asyncio.Event()
        self.orders: asyncio.Queue[AgentOrder] = asyncio.Queue()

    def is_of(self, joined: facts.NodeJoined) -> bool:
        """True if this link belongs to the agent that has connected again."""
        return (self.joined.host, self.joined.pid) == (joined.host, joined.pid)

    async def gives_way(self, successor: web.WebSocketResponse, *, within: Seconds) -> bool:
        """Wait for this link to end, so that another agent of the node can take its place; True if it ended in time.

        Args:
            successor: the other agent's connection. It sends nothing until accepted; reading from it answers its pings.
            within: longest wait; longer than a lease, so that the loss of a silent agent is known by then.
        """
        async with TaskScope() as scope:
            lost, leaves = scope.start(self.gone.wait()), scope.start(successor.receive())
            await asyncio.wait({lost, leaves}, timeout=within, return_when=asyncio.FIRST_COMPLETED)
            return lost.done()

    def ended(self, lease: Seconds) -> str:
        """Reason, for people, why the agent's connection has ended."""
        match self.socket.exception():
            case TimeoutError():
                return f"it answered nothing for {lease:g} s"
            case None | ConnectionError():
                return "its connection ended"
            case error:
                return f"{type(error).__name__}: {error}"

    def silent(self, lease: Seconds) -> Seconds:
        """Length of the agent's silence before the end of its connection."""
        return lease if isinstance(self.socket.exception(), TimeoutError) else 0.0

    async def send_orders(self) -> None:
        """Send orders, one after the other, until cancelled or until the connection has ended.

        Waiting orders go together as a list in one frame, because one fault causes orders to all ranks of a node.
        """
        encoder = msgspec.msgpack.Encoder()
        while True:
            bodies = [encoder.encode(await self.orders.get())]
            while not self.orders.empty() and sum(map(len, bodies)) < _FULL_FRAME:
                bodies.append(encoder.encode(self.orders.get_nowait()))
            frame = bodies[0] if len(bodies) == 1 else encoder.encode([msgspec.Raw(body) for body in bodies])
            try:
                await self.socket.send_bytes(frame)
            except (ConnectionError, RuntimeError):
                return  # The reader of the connection reports its loss.
