"""Moves bytes between the ranks of a group, in one generation. Ends within milliseconds when it is halted.

gloo is not used for this: when a peer dies while a send is queued, gloo forgets to fail that send, and its thread waits
for it until the time-out of the whole group (see `docs/decisions/0003-own-cpu-transport.md`).
"""

import select
import socket
import time
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Protocol

from regrow.comm.links import COLLECTIVES, RECEIVING, Links
from regrow.core.errors import DeadlineExceeded, GenerationHalted
from regrow.core.ids import Seconds

_POLL_MS = 1000
_ANY_S: Seconds = 0.05


Pieces = list[memoryview]
"""Blocks of memory still to be sent or filled, in order."""
Socks = dict[int, socket.socket]
"""Sockets by peer."""
_MOST_PIECES = 1000
"""Most blocks of memory in one call; the kernel accepts 1,024."""


class Headers(Protocol):
    """Headers of exchanged bytes, as `regrow.comm.headers` makes them."""

    size: int

    def before(self, peer: int) -> bytes:
        """The header that is sent to a peer before its bytes."""
        ...

    def check(self, peer: int, header: bytearray | memoryview) -> None:
        """Check a received header. Raises if it does not match, and then the peer's bytes are not awaited."""
        ...


@dataclass(slots=True)
class Awaited:
    """Data expected from a peer: a header, if there is one, and bytes."""

    pieces: Pieces
    header: bytearray | memoryview = field(default_factory=bytearray)
    check: Callable[[int, bytearray | memoryview], None] | None = None
    arrived: int = 0


class SocketMesh:
    """Moves bytes between the ranks of one group.

    Args:
        links: the group's connections.
    """

    def __init__(self, links: Links) -> None:
        self._links = links
        self.rank, self.size, self.ranks = links.rank, links.size, links.ranks
        self.one_machine = links.site.socket_dir is not None
        """True if all ranks are on this machine, so that no message crosses a network."""
        self._name = links.name

    @property
    def halted(self) -> bool:
        """True if the generation is over."""
        return self._links.halted

    def form(self) -> None:
        """Listen for the other ranks. Raises `GenerationHalted` or `OSError`."""
        self._links.open()

    def exchange(
        self,
        out: Mapping[int, memoryview | Pieces],
        into: Mapping[int, memoryview | Pieces],
        *,
        headers: Headers | None = None,
        joined: bool = False,
        channel: int = COLLECTIVES,
        deadline: Seconds,
    ) -> None:
        """Send to some peers and receive from some, all at the same time, until every byte is moved.

        Only received data decides the outcome: a peer that accepts no more data does not fail the call, since this
        worker may have all that it needs for its update, and after a halt data that had arrived can still be read.

        Args:
            headers: makes the header before each peer's bytes, and checks the received ones.
            joined: the bytes begin with the headers, or with room for them: that saves a few microseconds.

        Raises `PeerLost`, `GenerationHalted` or `DeadlineExceeded`, or the error of a header's check; the connections
        cannot be used afterwards.
        """
        sending: dict[int, Pieces]
        if headers is not None and joined:
            size, check = headers.size, headers.check
            sending = {peer: _row(view) for peer, view in out.items()}
            coming = {peer: _row(view) for peer, view in into.items()}
            awaited = {peer: Awaited(pieces, pieces[0][:size], check) for peer, pieces in coming.items()}
        else:
            sending, awaited = _sending(out, headers), _awaited(into, headers)
        until = time.monotonic() + deadline
        socks = self._socks(sending.keys() | awaited.keys(), channel, until)
        self._move(sending, awaited, socks)
        if not sending and not awaited:
            return
        poller, by_descriptor = select.poll(), {}
        for peer in sending.keys() | awaited.keys():
            sock = socks[peer]
            by_descriptor[sock.fileno()] = peer
            poller.register(sock, _mask(peer, sending, awaited))
        while sending or awaited:
            ready = poller.poll(_POLL_MS)
            if not ready and time.monotonic() > until:
                raise DeadlineExceeded(f"{self._name}: a collective took longer than {deadline:g} s")
            for descriptor, event in ready:
                peer = by_descriptor[descriptor]
                before = (peer in sending, peer in awaited)
                if event & (select.POLLOUT | select.POLLERR) and peer in sending:
                    self._send(peer, sending, socks[peer])
                if event & (select.POLLIN | select.POLLHUP | select.POLLERR) and peer in awaited:
                    self._receive(peer, awaited, socks[peer])
                if event & select.POLLHUP:
                    sending.pop(peer, None)
                if (peer in sending, peer in awaited) != before:
                    mask = _mask(peer, sending, awaited)
                    if mask:
                        poller.modify(descriptor, mask)
                    else:
                        poller.unregister(descriptor)

    def await_any(self, peers: list[int], *, until: float) -> list[int]:
        """Wait a moment for any of the peers to send; returns those that have sent or whose connection has ended.

        May return none, so that the caller can check other peers. Raises `GenerationHalted` or `DeadlineExceeded`.
        """
        made = self._links.made
        known = [peer for peer in peers if (peer, RECEIVING) in made]
        now = time.monotonic()
        self._links.answer(now if known else now + _ANY_S)
        poller, by_descriptor = select.poll(), {}
        for peer in known:
            sock = self._socket(peer, RECEIVING)
            by_descriptor[sock.fileno()] = peer
            poller.register(sock, select.POLLIN)
        ready = poller.poll(1000 * _ANY_S) if known else []
        if not ready and time.monotonic() > until:
            raise DeadlineExceeded(f"{self._name}: no rank sent the awaited message")
        return [by_descriptor[descriptor] for descriptor, _ in ready]

    def _move(self, sending: dict[int, Pieces], awaited: dict[int, Awaited], socks: Socks) -> None:
        """Move the bytes that can be moved at once, without polling first."""
        for peer in list(sending):
            self._send(peer, sending, socks[peer])
        for peer in list(awaited):
            self._receive(peer, awaited, socks[peer])

    def _send(self, peer: int, sending: dict[int, Pieces], sock: socket.socket) -> None:
        pieces = sending[peer]
        try:
            sent = sock.send(pieces[0]) if len(pieces) == 1 else sock.sendmsg(pieces[:_MOST_PIECES])
        except BlockingIOError:
            return
        except OSError:
            del sending[peer]  # the peer is gone or this mesh halted: it only matters if awaited data stays away
            return
        if not _advance(pieces, sent):
            del sending[peer]

    def _receive(self, peer: int, awaited: dict[int, Awaited], sock: socket.socket) -> None:
        coming = awaited[peer]
        pieces = coming.pieces
        try:
            count = sock.recv_into(pieces[0]) if len(pieces) == 1 else sock.recvmsg_into(pieces[:_MOST_PIECES])[0]
        except BlockingIOError:
            return
        except OSError as error:
            raise self._links.lost(peer) from error
        if count == 0:
            raise self._links.lost(peer)
        coming.arrived += count
        left = _advance(pieces, count)
        if coming.check is not None and coming.arrived >= len(coming.header):
            check, coming.check = coming.check, None
            check(peer, coming.header)
        if not left:
            del awaited[peer]

    def _socks(self, peers: AbstractSet[int], channel: int, until: float) -> Socks:
        """The connections to these peers; missing connections are made first."""
        made = self._links.made
        try:
            return {peer: made[peer, channel] for peer in peers}
        except KeyError:
            self._links.need(peers, channel, until)
            return {peer: self._socket(peer, channel) for peer in peers}

    def _socket(self, peer: int, channel: int) -> socket.socket:
        sock = self._links.made.get((peer, channel))
        if sock is None:
            raise GenerationHalted(f"{self._name}: this generation is over")
        return sock

    def halt(self) -> None:
        """End every call that is blocked in a connection; from any thread."""
        self._links.halt()

    def close(self) -> None:
        """Close all connections; no call may be in progress."""
        self._links.close()


def _row(given: memoryview | Pieces) -> Pieces:
    """The non-empty blocks of memory for one peer."""
    return [given] if isinstance(given, memoryview) else list(given)


def _pieces(given: memoryview | Pieces, header: bytes | bytearray = b"") -> Pieces:
    """The header, if any, and the non-empty blocks of memory for one peer."""
    views = given if isinstance(given, list) else [given]
    return [memoryview(header), *filter(len, views)] if header else list(filter(len, views))


def _sending(out: Mapping[int, memoryview | Pieces], headers: Headers | None) -> dict[int, Pieces]:
    if headers is None:
        return {peer: pieces for peer, given in out.items() if (pieces := _pieces(given))}
    return {peer: _pieces(given, headers.before(peer)) for peer, given in out.items()}


def _awaited(into: Mapping[int, memoryview | Pieces], headers: Headers | None) -> dict[int, Awaited]:
    if headers is None:
        return {peer: Awaited(pieces) for peer, given in into.items() if (pieces := _pieces(given))}
    found = {}
    for peer, given in into.items():
        header = bytearray(headers.size)
        found[peer] = Awaited(_pieces(given, header), header, headers.check)
    return found


def _advance(pieces: Pieces, count: int) -> bool:
    """Remove the first `count` bytes, which were moved; True if there are more."""
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
