"""Cost of a rendezvous at the busiest node: regrow's agents, simulated and counted, and TCPStore's server, measured.

Described in `rendezvous.py`.
"""

import asyncio
import socket
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from forking import PER_NODE, Failed
from torch._C._distributed_c10d import TCPStore

from regrow.agent.store.store_node import StoreNode
from regrow.core.ids import Generation, Seconds
from regrow.core.messages.store import (
    StoreAdd,
    StoreGet,
    StoreMessage,
    StoreReply,
    StoreRequest,
    StoreSet,
    StoreWait,
    placed,
)
from regrow.core.wire import FrameCodec

ADDRESS = b"tcp:10.20.30.40:54321"
ID = b"n" * 128
KEYS = ("broadcast", "neighbours", "barrier")


class Load(NamedTuple):
    """Load of one node."""

    requests: int
    connections: int
    bytes: int


class Net:
    """The agents of a job in one event loop; messages between them, and from their workers, are counted."""

    def __init__(self, world: int) -> None:
        self.stores = [f"tcp:10.0.{node // 256}.{node % 256}:40000" for node in range(max(1, world // PER_NODE))]
        self._codec: FrameCodec[StoreReply] = FrameCodec(StoreReply)
        self._requests, self._bytes = Counter[str](), Counter[str]()
        self._links: set[tuple[str, str]] = set()
        self._keepers = {store: StoreNode(store, _Wires(self, store), alone=False) for store in self.stores}
        for keeper in self._keepers.values():
            keeper.learn(Generation(1), self.stores, world)

    async def carry(self, sender: str, agent: str, request: StoreMessage) -> StoreReply:
        """Send a request and return the reply; `sender` is another agent's address, or a worker's name."""
        self._requests[agent] += 1
        self._links.add((sender, agent))
        caller = sender if sender in self._keepers else ""
        await asyncio.sleep(0)
        keeper = self._keepers[agent]
        reply = keeper.at_once(request, caller) or await keeper.carry_out(request, caller)  # type: ignore[arg-type]
        await asyncio.sleep(0)
        if reply.error:
            raise Failed(reply.error)
        passed = len(self._codec.frame(request)) + len(self._codec.frame(reply))
        self._bytes[agent] += passed
        if caller:
            self._bytes[sender] += passed
        return reply

    def busiest(self) -> Load:
        """The maximum of each figure, which may be of different nodes."""
        links = Counter(end for link in self._links for end in link if end in self._keepers)
        return Load(max(self._requests.values()), max(links.values()), max(self._bytes.values()))


class _Wires:
    def __init__(self, net: Net, own: str) -> None:
        self._net, self._own = net, own

    async def ask(self, agent: str, request: StoreMessage, within: Seconds) -> StoreReply:
        return await self._net.carry(self._own, agent, request)

    def keep_only(self, agents: set[str]) -> None:
        pass


Ask = Callable[[StoreRequest], Awaitable[StoreReply]]


async def simulated_rank(ask: Ask, rank: int, world: int, what: str) -> None:
    """One rank's requests to its agent for one kind of key."""
    if what == "broadcast":
        if rank == 0:
            await ask(StoreSet("g1/0//cuda//0", ID))
        await ask(StoreGet("g1/0//cuda//0", 600.0))
    elif what == "neighbours":
        await ask(StoreSet(placed("g1/mesh", rank), ADDRESS))
        for peer in ((rank - 1) % world, (rank + 1) % world):
            await ask(StoreGet(placed("g1/mesh", peer), 600.0))
    else:
        if (await ask(StoreAdd("g1/met", 1))).number == world:
            await ask(StoreSet("g1/all", b"1"))
        await ask(StoreWait(["g1/all"], 600.0))


def simulate(world: int, *kinds: str) -> Load:
    """The busiest agent's load for these kinds of keys."""

    async def play() -> Load:
        net = Net(world)

        def asking(rank: int) -> Ask:
            agent = net.stores[rank * len(net.stores) // world]
            return lambda request: net.carry(f"rank {rank}", agent, request)

        for what in kinds:
            await asyncio.gather(*(simulated_rank(asking(rank), rank, world, what) for rank in range(world)))
        return net.busiest()

    return asyncio.run(play())


# --- TCPStore, counted at the real server ---------------------------------------------------------------------------


class Proxy:
    """A proxy before a TCPStore server that counts the traffic."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]
        self.connections = self.asked = self.bytes = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = socket.create_connection(("127.0.0.1", self._to))
            for sock in (near, far):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self.connections += 1
            for here, there, asks in ((near, far, True), (far, near, False)):
                threading.Thread(target=self._pump, args=(here, there, asks), daemon=True).start()

    def _pump(self, here: socket.socket, there: socket.socket, asks: bool) -> None:
        while data := here.recv(1 << 16):
            with self._lock:
                self.bytes += len(data)
                self.asked += asks
            there.sendall(data)


class Call(NamedTuple):
    """Cost of one call to the server: requests (one send of the client each), and bytes both ways."""

    requests: int
    bytes: int


def tcp_rank(store: Any, rank: int, world: int, what: str) -> None:
    """The requests of `simulated_rank`, with torch's client; keys have the same lengths."""
    if what == "broadcast":
        if rank == 0:
            store.set("g1/0//cuda//0", ID)
        store.get("g1/0//cuda//0")
    elif what == "neighbours":
        store.set(placed("g1/mesh", rank), ADDRESS)
        for peer in ((rank - 1) % world, (rank + 1) % world):
            store.get(placed("g1/mesh", peer))
    else:
        if store.add("g1/met", 1) == world:
            store.set("g1/all", b"1")
        store.wait(["g1/all"])


class TcpCosts:
    """Cost of TCPStore's calls at its server, measured with one client whose requests are separate."""

    def __init__(self) -> None:
        self._server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self._proxy = Proxy(self._server.port)
        self._store: Any = TCPStore("127.0.0.1", self._proxy.port, None, False)
        self._store.check(["x"])
        self.connecting = Call(self._proxy.asked - 1, self._proxy.bytes - self._cost(self._store.check, ["x"]).bytes)

    def _cost(self, call: Callable[..., Any], *args: Any) -> Call:
        asked, size = self._proxy.asked, self._proxy.bytes
        call(*args)
        until = time.monotonic() + 1.0
        while self._proxy.asked == asked and time.monotonic() < until:
            time.sleep(0.0001)  # a write has no reply: it must arrive before the next is sent
        self._store.num_keys()
        call_asked, call_bytes = self._proxy.asked - asked, self._proxy.bytes - size
        asked, size = self._proxy.asked, self._proxy.bytes
        self._store.num_keys()
        return Call(call_asked - (self._proxy.asked - asked), call_bytes - (self._proxy.bytes - size))

    def load(self, world: int, *kinds: str) -> Load:
        """The server's load for these kinds of keys: the sum over all calls of all ranks."""
        total = [Call(0, self.connecting.bytes * world)]
        add, cost = total.append, self._cost
        if "broadcast" in kinds:
            add(cost(self._store.set, "g1/0//cuda//0", ID))
            add(_times(cost(self._store.get, "g1/0//cuda//0"), world))
        if "neighbours" in kinds:
            for digits in range(1, len(str(world)) + 1):  # lengths of keys differ
                ranks = sum(len(str(rank)) == digits for rank in range(world))
                key = placed("g1/mesh", 10**digits - 1)
                add(_times(cost(self._store.set, key, ADDRESS), ranks))
                add(_times(cost(self._store.get, key), 2 * ranks))
        if "barrier" in kinds:
            add(_times(cost(self._store.add, "g1/met", 1), world))
            add(cost(self._store.set, "g1/all", b"1"))
            add(_times(cost(self._store.wait, ["g1/all"]), world))
        return Load(sum(call.requests for call in total), world, sum(call.bytes for call in total))

    def check(self, world: int = 16) -> None:
        """Compare with real concurrent clients. Raises `Failed` if the computed bytes differ from theirs."""
        server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        proxy = Proxy(server.port)
        clients = [TCPStore("127.0.0.1", proxy.port, None, False) for _ in range(world)]

        def play(rank: int) -> None:
            for what in KEYS:
                tcp_rank(clients[rank], rank, world, what)

        with ThreadPoolExecutor(world) as pool:
            list(pool.map(play, range(world)))
        expected, until = self.load(world, *KEYS), time.monotonic() + 5.0
        while proxy.bytes < expected.bytes and time.monotonic() < until:
            time.sleep(0.01)
        if (proxy.connections, proxy.bytes) != (expected.connections, expected.bytes):
            raise Failed(f"TCPStore was counted wrongly: {proxy.connections}, {proxy.bytes}, not {expected}")


def _times(call: Call, count: int) -> Call:
    return Call(call.requests * count, call.bytes * count)
