"""One connection to every peer of a group, in one generation. Ends within milliseconds when it is halted.

gloo is not used for this: when a peer dies while a send is queued, gloo forgets to fail that send, and its thread waits
for it until the time-out of the whole group (see `docs/decisions/0003-own-cpu-transport.md`).
"""

import contextlib
import hashlib
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Protocol, Self

from regrow.comm.torch_private.internals import Store
from regrow.core.errors import DeadlineExceeded, GenerationHalted
from regrow.core.ids import Seconds
from regrow.core.messages.store import placed
from regrow.core.wire import connect

_HELLO = struct.Struct("!32sII")
_HELLO_S: Seconds = 10.0
_POLL_MS = 1000
_ANY_MS = 50
_BUFFER_BYTES = 4 << 20
COLLECTIVES, POINT_TO_POINT = 0, 1
_LANES = (COLLECTIVES, POINT_TO_POINT)


class PeerLost(ConnectionError):
    """The connection to a peer ended: a symptom, whose cause the coordinator knows."""


@dataclass(frozen=True)
class Site:
    """Where a worker may listen, and the secret that its peers know.

    `socket_dir`: private folder for unix sockets, used where all peers are on this node; else TCP on `host`.
    """

    socket_dir: str | None
    host: str
    token: str


Pieces = list[memoryview]
"""What is still to be sent or received, in order."""


class Headers(Protocol):
    """What stands before the bytes that are exchanged: `regrow.comm.headers`."""

    size: int

    def before(self, peer: int) -> bytes:
        """What a peer is told before its bytes."""
        ...

    def check(self, peer: int, header: bytearray | memoryview) -> None:
        """A peer's header has come. Raises where it does not fit; its bytes are not waited for then."""
        ...


@dataclass(slots=True)
class Awaited:
    """What comes from a peer: a header, if there is one, and bytes."""

    pieces: Pieces
    header: bytearray | memoryview = field(default_factory=bytearray)
    check: Callable[[int, bytearray | memoryview], None] | None = None
    arrived: int = 0


@dataclass
class SocketMesh:
    """The connections of one group.

    Args:
        store: the generation's store, to find the peers in.
        name: what the group is called there; the same on all ranks.
        rank: this worker's rank in the group.
        size: ranks in the group.
        ranks: the group's ranks in the world: each publishes its address with its own agent. Empty: anywhere.
    """

    store: Store
    name: str
    rank: int
    size: int
    site: Site
    ranks: Sequence[int] = ()
    _peers: dict[tuple[int, int], socket.socket] = field(default_factory=dict)
    _passing: set[socket.socket] = field(default_factory=set)
    """What `halt` shuts while the mesh is formed: its bell, and connections that have not said who they are."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    halted: bool = False

    def form(self, deadline: Seconds) -> Self:
        """Connect to every peer. Raises `GenerationHalted`, `DeadlineExceeded`, `OSError`."""
        until = time.monotonic() + deadline
        with contextlib.ExitStack() as stack:
            listener, address = self._listen(stack)
            bell, ring = (stack.enter_context(sock) for sock in socket.socketpair())
            stack.enter_context(self._passes(bell))
            self.store.set(self._published(self.rank), address)
            for peer in range(self.rank):
                for lane in _LANES:
                    self._call(peer, lane, until)
            expected = len(_LANES) * (self.size - 1 - self.rank)
            while expected:
                expected -= self._answer(listener, ring, until)
        return self

    def _published(self, peer: int) -> str:
        name = f"{self.name}/{peer}"
        return placed(name, self.ranks[peer]) if self.ranks else name

    def _listen(self, stack: contextlib.ExitStack) -> tuple[socket.socket, str]:
        if self.site.socket_dir is not None:
            path = Path(self.site.socket_dir) / f"mesh-{os.getpid()}-{secrets.token_hex(4)}"
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            stack.callback(path.unlink, missing_ok=True)
            listener.bind(str(path))
            address = f"unix:{path}"
        else:
            listener = stack.enter_context(socket.create_server((self.site.host, 0)))
            address = f"tcp:{self.site.host}:{listener.getsockname()[1]}"
        listener.listen(2 * self.size)
        listener.setblocking(False)
        return listener, address

    @contextlib.contextmanager
    def _passes(self, sock: socket.socket) -> Iterator[None]:
        """Within this, `halt` ends what is blocked in the socket. It is closed after it, unless it is a peer's then."""
        with self._lock:
            self._passing.add(sock)
            halted = self.halted
        try:
            if halted:
                raise GenerationHalted("halted while its groups were formed")
            yield
        finally:
            with self._lock:
                self._passing.discard(sock)
                if sock not in self._peers.values():
                    sock.close()

    def _call(self, peer: int, lane: int, until: float) -> None:
        left = max(0.001, until - time.monotonic())
        self.store.set_timeout(timedelta(seconds=left))
        address = self.store.get(self._published(peer)).decode()
        sock = connect(address, left)
        with self._passes(sock):
            sock.sendall(_HELLO.pack(self._secret(), self.rank, lane))
            self._keep(sock, peer, lane)

    def _answer(self, listener: socket.socket, ring: socket.socket, until: float) -> int:
        # Linux does not wake who polls a listening unix socket when that is shut: hence a bell beside it.
        poller = select.poll()
        for sock in (listener, ring):
            poller.register(sock, select.POLLIN)
        ready = poller.poll(max(1.0, 1000 * (until - time.monotonic())))
        if self.halted:
            raise GenerationHalted("halted while its groups were formed")
        if not ready:
            raise DeadlineExceeded(f"{self.name}: not all of {self.size} ranks connected in time", hint="is one hung?")
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return 0  # the caller has hung up
        with self._passes(sock):
            hello = self._hello(sock, until)
            if len(hello) < _HELLO.size:
                return 0
            secret, peer, lane = _HELLO.unpack(hello)
            stranger = not secrets.compare_digest(secret, self._secret())
            if stranger or not self.rank < peer < self.size or lane not in _LANES or (peer, lane) in self._peers:
                return 0
            self._keep(sock, peer, lane)
        return 1

    def _hello(self, sock: socket.socket, until: float) -> bytes:
        """What the caller says first; too short where it ends, or keeps the others waiting."""
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

    def _keep(self, sock: socket.socket, peer: int, lane: int) -> None:
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            if self.halted:
                raise GenerationHalted("halted while its groups were formed")
            self._peers[peer, lane] = sock

    def exchange(
        self,
        out: dict[int, memoryview],
        into: dict[int, memoryview],
        *,
        headers: Headers | None = None,
        joined: bool = False,
        lane: int = COLLECTIVES,
        deadline: Seconds,
    ) -> None:
        """Send to some peers and receive from some, all at the same time, until every byte has gone.

        What has arrived decides: a peer that takes nothing any more does not fail the call, for this worker may have
        all that it needs for its update, and a halt leaves what had arrived before it to be read.

        Args:
            headers: what stands before the bytes for each peer, and judges what stands before its own.
            joined: the headers are in the bytes already, in front, or have room there: that saves a few microseconds.

        Raises `PeerLost`, `GenerationHalted` or `DeadlineExceeded`, or what a header's check raises; the connections
        cannot be used afterwards.
        """
        sending: dict[int, Pieces]
        if headers is not None and joined:
            size, check = headers.size, headers.check
            sending = {peer: [view] for peer, view in out.items()}
            awaited = {peer: Awaited([view], view[:size], check) for peer, view in into.items()}
        else:
            sending, awaited = _sending(out, headers), _awaited(into, headers)
        self._move(sending, awaited, lane)
        if not sending and not awaited:
            return
        until = time.monotonic() + deadline
        poller, by_descriptor = select.poll(), {}
        for peer in sending.keys() | awaited.keys():
            sock = self._socket(peer, lane)
            by_descriptor[sock.fileno()] = peer
            poller.register(sock, _mask(peer, sending, awaited))
        while sending or awaited:
            ready = poller.poll(_POLL_MS)
            if not ready and time.monotonic() > until:
                raise DeadlineExceeded(f"{self.name}: a collective took longer than {deadline:.0f} s")
            for descriptor, event in ready:
                peer = by_descriptor[descriptor]
                before = (peer in sending, peer in awaited)
                if event & (select.POLLOUT | select.POLLERR) and peer in sending:
                    self._send(peer, sending, lane)
                if event & (select.POLLIN | select.POLLHUP | select.POLLERR) and peer in awaited:
                    self._receive(peer, awaited, lane)
                if event & select.POLLHUP:
                    sending.pop(peer, None)
                if (peer in sending, peer in awaited) != before:
                    mask = _mask(peer, sending, awaited)
                    if mask:
                        poller.modify(descriptor, mask)
                    else:
                        poller.unregister(descriptor)

    def await_any(self, peers: list[int], *, lane: int, until: float) -> list[int]:
        """Those of some peers from which something can be read, or whose connection has ended; waits a moment for it.

        May be empty, so that the caller can look at other peers. Raises `GenerationHalted` or `DeadlineExceeded`.
        """
        poller, by_descriptor = select.poll(), {}
        for peer in peers:
            sock = self._socket(peer, lane)
            by_descriptor[sock.fileno()] = peer
            poller.register(sock, select.POLLIN)
        ready = poller.poll(_ANY_MS)
        if not ready and time.monotonic() > until:
            raise DeadlineExceeded(f"{self.name}: nobody sent what was awaited from anyone")
        return [by_descriptor[descriptor] for descriptor, _ in ready]

    def _move(self, sending: dict[int, Pieces], awaited: dict[int, Awaited], lane: int) -> None:
        """What goes at once, without asking whether it would."""
        for peer in list(sending):
            self._send(peer, sending, lane)
        for peer in list(awaited):
            self._receive(peer, awaited, lane)

    def _send(self, peer: int, sending: dict[int, Pieces], lane: int) -> None:
        pieces, sock = sending[peer], self._socket(peer, lane)
        try:
            sent = sock.send(pieces[0]) if len(pieces) == 1 else sock.sendmsg(pieces)
        except BlockingIOError:
            return
        except OSError:
            del sending[peer]  # it is gone, or we are halted: whether that matters shows in what does not arrive
            return
        if not _advance(pieces, sent):
            del sending[peer]

    def _receive(self, peer: int, awaited: dict[int, Awaited], lane: int) -> None:
        coming, sock = awaited[peer], self._socket(peer, lane)
        pieces = coming.pieces
        try:
            count = sock.recv_into(pieces[0]) if len(pieces) == 1 else sock.recvmsg_into(pieces)[0]
        except BlockingIOError:
            return
        except OSError as error:
            raise self._lost(peer) from error
        if count == 0:
            raise self._lost(peer)
        coming.arrived += count
        left = _advance(pieces, count)
        if coming.check is not None and coming.arrived >= len(coming.header):
            check, coming.check = coming.check, None
            check(peer, coming.header)
        if not left:
            del awaited[peer]

    def _socket(self, peer: int, lane: int) -> socket.socket:
        sock = self._peers.get((peer, lane))
        if sock is None:
            raise GenerationHalted(f"{self.name}: this generation is over")
        return sock

    def _lost(self, peer: int) -> Exception:
        if self.halted:
            return GenerationHalted(f"{self.name}: this generation is over")
        return PeerLost(f"{self.name}: the connection to rank {peer} ended")

    def halt(self) -> None:
        """End every call that is blocked in a connection; from any thread."""
        with self._lock:
            self.halted = True
            socks = [*self._peers.values(), *self._passing]
        for sock in socks:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # closed, or never connected: nobody is blocked in it

    def close(self) -> None:
        """Close all connections; no call may be under way."""
        with self._lock:
            for sock in self._peers.values():
                sock.close()
            self._peers.clear()


def _sending(out: dict[int, memoryview], headers: Headers | None) -> dict[int, Pieces]:
    if headers is None:
        return {peer: [view] for peer, view in out.items() if len(view)}
    before = headers.before
    return {
        peer: [memoryview(before(peer)), view] if len(view) else [memoryview(before(peer))]
        for peer, view in out.items()
    }


def _awaited(into: dict[int, memoryview], headers: Headers | None) -> dict[int, Awaited]:
    if headers is None:
        return {peer: Awaited([view]) for peer, view in into.items() if len(view)}
    found = {}
    for peer, view in into.items():
        header = bytearray(headers.size)
        pieces = [memoryview(header), view] if len(view) else [memoryview(header)]
        found[peer] = Awaited(pieces, header, headers.check)
    return found


def _advance(pieces: Pieces, count: int) -> bool:
    """Leave out what has gone; whether there is more."""
    while pieces:
        length = len(pieces[0])
        if count < length:
            if count:
                pieces[0] = pieces[0][count:]
            return True
        count -= length
        del pieces[0]
    return False


def _mask(peer: int, sending: dict[int, Pieces], awaited: dict[int, Awaited]) -> int:
    return (select.POLLOUT if peer in sending else 0) | (select.POLLIN if peer in awaited else 0)
