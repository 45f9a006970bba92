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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Self

from regrow.comm.private import Store
from regrow.core.errors import DeadlineExceeded, GenerationHalted
from regrow.core.ids import Seconds
from regrow.core.store_messages import placed
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


@dataclass
class Mesh:
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
        lane: int = COLLECTIVES,
        deadline: Seconds,
    ) -> None:
        """Send to some peers and receive from some, all at the same time, until every byte has gone.

        What has arrived decides: a peer that takes nothing any more does not fail the call, for this worker may have
        all that it needs for its update, and a halt leaves what had arrived before it to be read.

        Raises `PeerLost`, `GenerationHalted` or `DeadlineExceeded`; the connections cannot be used afterwards.
        """
        out = {peer: view for peer, view in out.items() if len(view)}
        into = {peer: view for peer, view in into.items() if len(view)}
        self._move(out, into, lane)
        if not out and not into:
            return
        until = time.monotonic() + deadline
        poller, by_descriptor = select.poll(), {}
        for peer in out.keys() | into.keys():
            sock = self._socket(peer, lane)
            by_descriptor[sock.fileno()] = peer
            poller.register(sock, _mask(peer, out, into))
        while out or into:
            ready = poller.poll(_POLL_MS)
            if not ready and time.monotonic() > until:
                raise DeadlineExceeded(f"{self.name}: a collective took longer than {deadline:.0f} s")
            for descriptor, event in ready:
                peer = by_descriptor[descriptor]
                before = (peer in out, peer in into)
                if event & (select.POLLOUT | select.POLLERR) and peer in out:
                    self._send(peer, out, lane)
                if event & (select.POLLIN | select.POLLHUP | select.POLLERR) and peer in into:
                    self._receive(peer, into, lane)
                if event & select.POLLHUP:
                    out.pop(peer, None)
                if (peer in out, peer in into) != before:
                    mask = _mask(peer, out, into)
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

    def _move(self, out: dict[int, memoryview], into: dict[int, memoryview], lane: int) -> None:
        """What goes at once, without asking whether it would."""
        for peer in list(out):
            self._send(peer, out, lane)
        for peer in list(into):
            self._receive(peer, into, lane)

    def _send(self, peer: int, out: dict[int, memoryview], lane: int) -> None:
        try:
            sent = self._socket(peer, lane).send(out[peer])
        except BlockingIOError:
            return
        except OSError:
            del out[peer]  # it is gone, or we are halted: whether that matters shows in what does not arrive
            return
        if sent == len(out[peer]):
            del out[peer]
        else:
            out[peer] = out[peer][sent:]

    def _receive(self, peer: int, into: dict[int, memoryview], lane: int) -> None:
        try:
            count = self._socket(peer, lane).recv_into(into[peer])
        except BlockingIOError:
            return
        except OSError as error:
            raise self._lost(peer) from error
        if count == 0:
            raise self._lost(peer)
        if count == len(into[peer]):
            del into[peer]
        else:
            into[peer] = into[peer][count:]

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


def _mask(peer: int, out: dict[int, memoryview], into: dict[int, memoryview]) -> int:
    return (select.POLLOUT if peer in out else 0) | (select.POLLIN if peer in into else 0)
