"""Connections over which a newcomer reads: several to one holder, over all its addresses, each at its own rate."""

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from regrow.core.errors import DeadlineExceeded
from regrow.core.ids import Instant, Seconds
from regrow.core.messages.state_ways import StateWay
from regrow.core.net import hang_up
from regrow.hydration.direct import NOWHERE, PLACE_BYTES, DirectReads, MemoryPlace
from regrow.hydration.memory import Incoming, Landing
from regrow.hydration.messages import SendSpans, StateOffered, receiver_side
from regrow.hydration.plan import CHUNK_BYTES, ByteSpan, Chunk, FlowDealer, chunked
from regrow.hydration.streams import DIGEST_BYTES, STALL, allow, checksum, receive

FLOWS = 4
"""Number of connections over which a newcomer reads from all holders together, if it has two cores for each."""
MOST_FLOWS = 16
"""Most connections to holders with several addresses, unless there are more holders than this."""
FLOW_WORTH = 32 << 20
"""Number of bytes that justify one further connection."""
FIRST_PART = 16 << 20
"""Bytes that each flow gets before any rate is known."""
_AHEAD = 2
"""Number of chunks still to come at which the next chunks are requested."""
_FEW_SPANS = 64
"""Most spans in a request that is sent while bytes still arrive: its frame fits into the connection's buffers."""


@dataclass(eq=False)
class Flow:
    """One connection to a holder."""

    endpoint: str
    sock: socket.socket
    further: bool = False
    """True if it is not the first connection to its holder: it is given up if it is slow."""
    direct: DirectReads | None = None
    """Reads from the holder's memory; None: the bytes come over the connection."""
    fallback: str = ""
    """Reason why the bytes come over the connection although reads were requested; empty if there is none."""
    missing: list[ByteSpan] = field(default_factory=list)
    """Spans that the flow is to fetch; after the round, those that it did not fetch."""
    failure: str = ""
    bad: int = 0
    """Number of chunks in the last round that did not match their checksum."""
    received: int = 0
    seconds: Seconds = 0.0

    @property
    def rate(self) -> float:
        """Bytes per second so far; 0: not known."""
        return self.received / self.seconds if self.seconds > 0 else 0.0

    def way(self) -> StateWay:
        """The flow's entry in the report."""
        by = self.direct.kind if self.direct is not None else ""
        return StateWay(address_of(self.endpoint), 1, self.received, self.rate / 1e9, self.failure, by, self.fallback)

    def fall_back(self, why: str) -> None:
        """Let all further bytes be sent over the connection, for the reason `why`."""
        if self.direct is not None:
            self.fallback = f"{self.direct.kind}: {why}"
        self.direct = None


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def address_of(endpoint: str) -> str:
    """Host of an endpoint; empty for a socket within the node."""
    kind, _, place = endpoint.partition(":")
    return place.rpartition(":")[0] if kind == "tcp" else ""


def reason(error: object) -> str:
    """Text for an error of a connection, for people."""
    if isinstance(error, TimeoutError):
        return f"it sent nothing for {STALL:.0f} s"
    return str(error) or type(error).__name__


def further(endpoints: Sequence[str], offers: Sequence[StateOffered]) -> list[tuple[str, str]]:
    """Endpoint and ticket of each connection to make beside the first to every holder; none if the state is small."""
    nbytes, holders = offers[0].inventory.nbytes, len(offers)
    calls: list[tuple[str, str]] = []
    for at, (endpoint, offer) in enumerate(zip(endpoints, offers, strict=True)):
        wanted = max(min(FLOWS, cores() // 2) // holders, min(1 + len(offer.ways), MOST_FLOWS // holders))
        shift = at % len(offer.ways) if offer.ways else 0
        order = [*offer.ways[shift:], *offer.ways[:shift], endpoint]
        for number in range(min(wanted, nbytes // (FLOW_WORTH * holders)) - 1 if offer.ticket else 0):
            calls.append((order[number % len(order)], offer.ticket))
    return calls


class Round:
    """One pass over the missing bytes: each flow gets a first part, and requests the rest.

    Args:
        pending: the missing bytes.
        flows: the open flows; others may join until the last flow has nothing more to do.
    """

    def __init__(self, pending: Sequence[ByteSpan], flows: Sequence[Flow]) -> None:
        self._lock = threading.Lock()
        self._dealer = FlowDealer(pending)
        for flow, part in zip(flows, self._dealer.first(len(flows), FIRST_PART), strict=True):
            flow.missing, flow.bad = part, 0
        self._at_work = list(flows)
        self._joining: dict[int, socket.socket] = {}
        """Connecting sockets by their thread; another socket may replace the first."""
        self.flows = list(flows)
        self.hurries = any(not flow.further for flow in flows)
        """True if a further flow is given up when a chunk takes longer than `STALL`: first flows can do without it."""

    @property
    def over(self) -> bool:
        """True if no flow can join any more."""
        return not self._at_work

    def take(self, flow: Flow) -> list[ByteSpan]:
        """Take more bytes for a flow to request."""
        with self._lock:
            return self._dealer.take(flow.rate, [other.rate for other in self._at_work if other is not flow])

    def begins(self, sock: socket.socket) -> None:
        """Note that a further flow connects. Raises `EOFError` if it is not needed any more."""
        with self._lock:
            self._refuse_late()
            self._joining[threading.get_ident()] = sock

    def join(self, flow: Flow) -> None:
        """Add the connected flow to the round. Raises `EOFError` if it is not needed any more."""
        with self._lock:
            self._refuse_late()
            self._joining.pop(threading.get_ident(), None)
            self._at_work.append(flow)
            self.flows.append(flow)

    def leave(self, flow: Flow) -> None:
        """Remove a flow that has nothing more to do; the last one ends all attempts to connect further flows."""
        with self._lock:
            self._at_work.remove(flow)
            late = list(self._joining.values()) if not self._at_work else []
        for sock in late:
            hang_up(sock)

    def missing(self) -> list[ByteSpan]:
        """Bytes that have not arrived, once all flows have left."""
        return [span for flow in self.flows for span in flow.missing] + self._dealer.rest()

    def _refuse_late(self) -> None:
        if not self._at_work:
            raise EOFError("all was there already")


def fetch(flow: Flow, turn: Round, incoming: Incoming, deadline: Instant) -> None:
    """Fetch a flow's part, then more, until none is left; results are in `flow`. Raises errors of a device."""
    landing = Landing(incoming, CHUNK_BYTES)
    chunks: deque[tuple[Chunk, bool]] = deque()
    bad: list[Chunk] = []
    again: list[Chunk] = []
    wanted, flow.missing = flow.missing, []
    since, before = time.monotonic(), flow.seconds
    hurries = flow.further and turn.hurries
    try:
        while True:
            if not wanted and len(chunks) <= _AHEAD:
                wanted, again = [span for chunk in again for span in chunk] or turn.take(flow), []
            allow(flow.sock, deadline)
            if wanted and (not chunks or len(wanted) <= _FEW_SPANS):
                direct = flow.direct is not None
                flow.sock.sendall(receiver_side.frame(SendSpans(wanted, CHUNK_BYTES, direct)))
                chunks += [(chunk, direct) for chunk in chunked(wanted, CHUNK_BYTES)]
                wanted = []
            if not chunks:
                break
            chunk, direct = chunks[0]
            room = landing.room(chunk)
            until = min(deadline, time.monotonic() + STALL) if hurries else deadline
            if right := (_take if direct else _bring)(flow, room, until):
                landing.land(chunk)
            else:
                (again if direct else bad).append(chunk)
            chunks.popleft()
            flow.received += len(room) if right else 0
            flow.seconds = before + time.monotonic() - since
    except (OSError, EOFError, DeadlineExceeded) as error:
        slow = hurries and isinstance(error, TimeoutError | DeadlineExceeded) and time.monotonic() < deadline
        flow.failure = f"it sent no {CHUNK_BYTES >> 20} MiB in {STALL:.0f} s" if slow else reason(error)
    finally:
        left = (*bad, *again, *(chunk for chunk, _ in chunks))
        flow.missing = [*(span for chunk in left for span in chunk), *wanted]
        flow.bad = len(bad)
        turn.leave(flow)
        landing.await_landed()


def _bring(flow: Flow, room: memoryview, until: Instant) -> bool:
    """Receive a chunk, then its checksum; False if they do not match."""
    digest = bytearray(DIGEST_BYTES)
    receive(flow.sock, room, until)
    receive(flow.sock, memoryview(digest), until)
    return checksum(room) == digest


def _take(flow: Flow, room: memoryview, until: Instant) -> bool:
    """Receive a chunk's place and checksum, and read it there; False if it must be sent instead.

    A flow whose read has failed once does not try again: each failure may last until its timeout.
    """
    head = bytearray(PLACE_BYTES + DIGEST_BYTES)
    receive(flow.sock, memoryview(head), until)
    place, digest = MemoryPlace.unpack(head[:PLACE_BYTES]), head[PLACE_BYTES:]
    if place == NOWHERE:
        receive(flow.sock, room, until)
    elif flow.direct is None:
        return False
    else:
        try:
            flow.direct.read(place, room, until)
        except OSError as error:
            flow.fall_back(error.strerror or str(error))
            return False
    if checksum(room) == digest:
        return True
    flow.fall_back("bytes did not match their checksum")
    return False
