"""The connections of one group in one generation, each made when it is first needed.

For collectives the higher of two ranks connects; for sends each side makes a connection of its own, so that a send
never waits for the receiver. The other side accepts when it needs the connection: until then the connection and its
first bytes wait in the kernel.
"""

import contextlib
import hashlib
import select
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from regrow.comm.torch_private.internals import Store
from regrow.core.errors import DeadlineExceeded, GenerationHalted
from regrow.core.ids import Seconds
from regrow.core.messages.store import placed
from regrow.core.net import Listener, connect, hang_up, listen, same_secret
from regrow.core.strangers import refused

COLLECTIVES, SENDING, RECEIVING = 0, 1, 2
"""Purposes of connections. A connection that is `SENDING` at one end is `RECEIVING` at the other."""
_HELLO = struct.Struct("!32sII")
_HELLO_S: Seconds = 10.0
_BUFFER_BYTES = 4 << 20
_HALTED = "halted while its groups were formed"


class PeerLost(ConnectionError):
    """The connection to a peer has ended. This is a symptom; the coordinator knows the cause."""


@dataclass(frozen=True)
class Site:
    """Addresses at which a worker may listen, and the secret that its peers share.

    `socket_dir`: private folder for unix sockets, used if all peers are on this node; else TCP on `host`.
    """

    socket_dir: str | None
    host: str
    token: str


@dataclass
class Links:
    """Connects to the peers of one group, and accepts their connections.

    Args:
        store: the generation's store, in which the peers publish their addresses.
        name: name of the group in the store; the same on all ranks.
        rank: this worker's rank in the group.
        size: number of ranks in the group.
        ranks: the group's ranks in the world: each publishes its address with its own agent. Empty: with any agent.
    """

    store: Store
    name: str
    rank: int
    size: int
    site: Site
    ranks: Sequence[int] = ()
    halted: bool = False
    made: dict[tuple[int, int], socket.socket] = field(default_factory=dict)
    """The connections, by peer and purpose."""
    _passing: set[socket.socket] = field(default_factory=set)
    """Further sockets that `halt` shuts down: the bell, and connections whose caller is not identified yet."""

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._answering = False
        self._listener: Listener | None = None
        self._ring: socket.socket | None = None

    def open(self) -> None:
        """Listen, and publish this rank's address. Raises `GenerationHalted` or `OSError`."""
        bell, ring = socket.socketpair()
        with self._changed:
            if self.halted:
                bell.close()
                ring.close()
                raise GenerationHalted(_HALTED)
            self._passing.add(bell)
            self._ring = ring
        self.store.set(self._published(self.rank), self._listen())

    def _published(self, peer: int) -> str:
        name = f"{self.name}/{peer}"
        return placed(name, self.ranks[peer]) if self.ranks else name

    def _listen(self) -> str:
        host = self.site.host
        listener = listen("mesh", self.site.socket_dir, bind=host, advertise=host, backlog=2 * self.size)
        self._listener = listener
        listener.sock.setblocking(False)
        return listener.endpoint

    # --- waiting for connections -------------------------------------------------------------------------------

    def need(self, peers: Iterable[int], channel: int, until: float) -> None:
        """Wait until there is a connection to each of these peers.

        Raises `PeerLost`, `GenerationHalted`, `DeadlineExceeded`, or errors of the store.
        """
        missing = [peer for peer in peers if (peer, channel) not in self.made]
        if not missing:
            return
        if self.halted:
            raise GenerationHalted(f"{self.name}: this generation is over")
        for peer in missing:
            if channel == SENDING or (channel == COLLECTIVES and peer < self.rank):
                self._call(peer, channel, until)
        while missing := [peer for peer in missing if (peer, channel) not in self.made]:
            if not self.answer(until):
                raise DeadlineExceeded(f"{self.name}: rank {missing[0]} did not connect in time", hint="is it hung?")

    def answer(self, until: float) -> bool:
        """Accept the next connection, or wait until another thread has accepted one; False at the deadline."""
        with self._changed:
            if self._answering:
                return self._changed.wait(max(0.0, until - time.monotonic()))
            self._answering = True
        try:
            return self._answer(until)
        finally:
            with self._changed:
                self._answering = False
                self._changed.notify_all()

    def lost(self, peer: int) -> Exception:
        """The error to raise when the connection to this peer has ended."""
        if self.halted:
            return GenerationHalted(f"{self.name}: this generation is over")
        return PeerLost(f"{self.name}: the connection to rank {peer} ended")

    # --- connecting and accepting ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _passes(self, sock: socket.socket) -> Iterator[None]:
        """Context in which `halt` ends calls that block in the socket. It closes the socket at its end, unless kept."""
        with self._changed:
            self._passing.add(sock)
            halted = self.halted
        try:
            if halted:
                raise GenerationHalted(_HALTED)
            yield
        finally:
            with self._changed:
                self._passing.discard(sock)
                if sock not in self.made.values():
                    sock.close()

    def _call(self, peer: int, channel: int, until: float) -> None:
        left = max(0.001, until - time.monotonic())
        self.store.set_timeout(timedelta(seconds=left))
        address = self.store.get(self._published(peer)).decode()
        try:
            sock = connect(address, left)
            with self._passes(sock):
                sock.sendall(_HELLO.pack(self._secret(), self.rank, channel))
                self._keep(sock, peer, channel)
        except OSError as error:
            raise self.lost(peer) from error

    def _answer(self, until: float) -> bool:
        listener, ring = self._listener, self._ring
        if self.halted or listener is None or ring is None:
            raise GenerationHalted(f"{self.name}: this generation is over")
        # Linux does not wake a poll of a listening unix socket when the socket is shut down: hence the bell.
        poller = select.poll()
        for sock in (listener.sock, ring):
            poller.register(sock, select.POLLIN)
        ready = poller.poll(max(0.0, 1000 * (until - time.monotonic())))
        if self.halted:
            raise GenerationHalted(f"{self.name}: this generation is over")
        if not ready:
            return False
        with contextlib.suppress(BlockingIOError, ConnectionError):  # the caller has hung up
            sock = listener.accept()
            with self._passes(sock):
                self._admit(sock, until)
        return True

    def _admit(self, sock: socket.socket, until: float) -> None:
        hello = self._hello(sock, until)
        if len(hello) < _HELLO.size:
            return
        secret, peer, channel = _HELLO.unpack(hello)
        if not same_secret(secret, self._secret()) or not 0 <= peer < self.size:
            refused.add("mesh", f"{self.name}: a caller does not know this group")
            return
        if channel == SENDING:
            channel = RECEIVING
        elif channel != COLLECTIVES or peer <= self.rank:
            return
        if (peer, channel) not in self.made:
            self._keep(sock, peer, channel)

    def _hello(self, sock: socket.socket, until: float) -> bytes:
        """The first bytes from a caller; too short if it ends the connection, or takes too long."""
        latest = min(until, time.monotonic() + _HELLO_S)
        hello = b""
        while len(hello) < _HELLO.size:
            sock.settimeout(max(0.001, latest - time.monotonic()))
            try:
                more = sock.recv(_HELLO.size - len(hello))
            except OSError:
                break
            if not more:
                break
            hello += more
        return hello

    def _secret(self) -> bytes:
        return hashlib.sha256(f"{self.site.token}|{self.name}|{self.size}".encode()).digest()

    def _keep(self, sock: socket.socket, peer: int, channel: int) -> None:
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._changed:
            if self.halted:
                raise GenerationHalted(f"{self.name}: this generation is over")
            self.made[peer, channel] = sock

    # --- the end -----------------------------------------------------------------------------------------------

    def halt(self) -> None:
        """End every call that is blocked in a connection or waits for one; from any thread."""
        with self._changed:
            self.halted = True
            socks = [*self.made.values(), *self._passing]
            self._changed.notify_all()
        for sock in socks:
            hang_up(sock)

    def close(self) -> None:
        """Close all connections; no call may be in progress."""
        with self._changed:
            self.halted = True
            for sock in (*self.made.values(), *self._passing, self._listener, self._ring):
                if sock is not None:
                    sock.close()
            self.made.clear()
            self._passing.clear()
            self._listener = self._ring = None
