"""The holder's side of hydration: lets newcomers read this worker's state while the state does not change."""

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from regrow.core.errors import HydrationError, ProtocolError, StateError, UsageError
from regrow.core.ids import NO_STATE, Generation, Instant, Seconds, StepNo
from regrow.core.net import ThreadServer, hang_up, listen, same_secret
from regrow.core.strangers import HELLO_S
from regrow.core.wire import read_frame
from regrow.devices.stream_points import StreamPoint
from regrow.hydration.direct import NOWHERE, place_of
from regrow.hydration.direct_kinds import SOCKETS, exposed
from regrow.hydration.inventory import Inventory, StateSource
from regrow.hydration.memory import Outgoing
from regrow.hydration.messages import (
    AskFlow,
    AskState,
    AskTrace,
    FlowOpened,
    SendSpans,
    StateOffered,
    StateRefused,
    TraceGiven,
    holder_side,
)
from regrow.hydration.plan import chunked
from regrow.hydration.proofs import ProofRequests
from regrow.hydration.streams import STRANGERS_BYTES, allow, checksum, has_hung_up, send

_log = logging.getLogger(__name__)
_HANDSHAKE: Seconds = HELLO_S
_BETWEEN_REQUESTS: Seconds = 120.0
_LONGEST_PATIENCE: Seconds = 600.0
_GLANCE: Seconds = 0.5
"""Interval of checks whether a waiting reader has closed its connection."""
_LARGEST_CHUNK = 64 << 20
_GONE = "this reader is gone"


@dataclass
class _Reader:
    """A newcomer with its offer and its connections. `done`: called when the last connection has ended."""

    inventory: Inventory
    connections: list[socket.socket]
    kind: str = ""
    done: Callable[[], None] = lambda: None


class HydrationServer:
    """Sends `state@step` to peers that know the job's token, only between `offer` and `withdraw`.

    A reader that comes early waits; one of another generation or step is refused with the reason. Opening starts one
    thread, and each reader gets another; after `close` none is left.

    Args:
        source: the state.
        token: the job's secret.
        socket_dir: private folder for the unix socket.
        bind: address to listen on if the job has several nodes.
        advertise: the host name by which other nodes reach this one.
        nodes: number of nodes in the job; with one node, no port is opened at all.
        ways: further addresses of this node at which its state may be read, if the job has several nodes.
        hydration: the kind of reads of its memory that it allows (`--hydration`, see `direct`).
    """

    def __init__(
        self,
        source: StateSource,
        *,
        token: str,
        socket_dir: str | Path,
        bind: str = "127.0.0.1",
        advertise: str = "127.0.0.1",
        nodes: int = 1,
        ways: Sequence[str] = (),
        hydration: str = SOCKETS,
    ) -> None:
        self._source = source
        self._token = token
        self._socket_dir = Path(socket_dir)
        self._bind = bind
        self._advertise = advertise
        self._addresses = list(ways) if nodes > 1 else []
        self._nodes = nodes
        self._hydration = hydration
        self._servers = [ThreadServer("regrow-hydrate", self._attend)]
        self._changed = threading.Condition()
        self._closed = False
        self._offered: tuple[Generation, StepNo] | None = None
        self._behind: StreamPoint | None = None
        self._reading: set[socket.socket] = set()
        self._tickets: dict[str, _Reader] = {}
        self._proofs = ProofRequests()
        self.endpoint = ""
        self.ways: list[str] = []
        """Endpoints at the further addresses of this node."""
        self.failed_addresses: list[str] = []
        """Further addresses at which listening failed, with the reason."""

    def __enter__(self) -> "HydrationServer":
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> str:
        """Listen; returns the endpoint, `unix:<path>` or `tcp:<host>:<port>`. Raises `HydrationError`."""
        folder = self._socket_dir if self._nodes == 1 else None
        try:
            listener = listen("hydrate", folder, bind=self._bind, advertise=self._advertise)
        except OSError as error:
            cause = f"cannot listen at {folder or self._bind}: {error.strerror}"
            raise HydrationError(cause, hint="does it exist, and is it writable?") from error
        except UsageError as error:
            raise HydrationError(error.cause, hint=error.hint) from error
        self.endpoint = self._servers[0].open(listener)
        for address in self._addresses:
            try:
                further = listen("hydrate", None, bind=address, advertise=address)
            except OSError as error:
                self.failed_addresses.append(f"state cannot be read at {address}: {error.strerror or error}")
                continue
            self._servers.append(ThreadServer("regrow-hydrate", self._attend))
            self.ways.append(self._servers[-1].open(further))
        return self.endpoint

    # --- called by the session ---

    def offer(self, generation: Generation, step: StepNo, behind: StreamPoint | None = None) -> None:
        """Offer the state, which is at `step` and does not change: workers of `generation` may read it.

        Args:
            behind: point in the devices' work after which the state is complete; None: readers wait for all work.
        """
        with self._changed:
            self._behind = behind
            self._proofs.publish(None)
            self._offered, stale = (generation, step), self._proofs.readers()
            self._changed.notify_all()
        self._dismiss(stale)  # else they would read the newly offered state

    @property
    def proof_wanted(self) -> str:
        """Level of detail that a waiting newcomer requests for the next step; empty: none waits."""
        return self._proofs.wanted  # without the lock, at each step: one that is missed now is seen at the next

    def offer_proof(self, generation: Generation, step: StepNo, behind: StreamPoint | None = None) -> None:
        """Offer the state to the newcomers that wait for a proof, at whatever step it is; `publish` must follow."""
        with self._changed:
            self._behind = behind
            self._offered = (generation, step)
            self._reading.update(self._proofs.offer(generation, step))
            self._changed.notify_all()

    def publish(self, trace: bytes | None) -> None:
        """Publish the trace of a proof's step; None if the step was given up."""
        with self._changed:
            self._proofs.publish(trace)
            self._changed.notify_all()

    def withdraw(self, deadline: Instant) -> int:
        """Before the state changes: admit no readers, wait for the present ones, disconnect those left at the deadline.

        No reader is left when this returns. Returns the number of connections that were cut.
        """
        with self._changed:
            self._offered = None
        if self.wait_idle(deadline):
            return 0
        with self._changed:
            late = list(self._reading)
            self._tickets.clear()  # else another flow of the same reader could begin to read
        self._dismiss(late)
        return len(late)

    @property
    def offering(self) -> bool:
        """True while state may be read."""
        return self._offered is not None

    @property
    def for_proofs(self) -> bool:
        """True if all present readers read for a proof."""
        with self._changed:
            return self._reading <= set(self._proofs.readers())

    @property
    def readers(self) -> int:
        """Number of connections over which newcomers are reading now."""
        with self._changed:
            return len(self._reading)

    def wait_idle(self, deadline: Instant) -> bool:
        """Wait until no reader is left; False if there still is one at the deadline."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._reading, max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Close all connections, end all threads, remove the socket. May be called twice."""
        with self._changed:
            self._closed = True
            self._proofs.publish(None)
            self._changed.notify_all()
        for server in self._servers:
            server.close()

    # --- threads ---

    def _dismiss(self, connections: Iterable[socket.socket]) -> None:
        for server in self._servers:
            server.dismiss(connections)

    def _attend(self, sock: socket.socket) -> None:
        ticket, reader = secrets.token_hex(16), None
        try:
            if (reader := self._greet(sock, ticket)) is not None:
                self._send_all(sock, reader)
        finally:
            if reader is not None:
                self._leave(sock, reader)
            with self._changed:
                self._tickets.pop(ticket, None)
                self._reading.discard(sock)
                self._proofs.leave(sock)
                self._changed.notify_all()

    def _leave(self, sock: socket.socket, reader: _Reader) -> None:
        with self._changed:
            reader.connections.remove(sock)
            over = not reader.connections
        if over:
            reader.done()

    def _greet(self, sock: socket.socket, ticket: str) -> _Reader | None:
        sock.settimeout(_HANDSHAKE)
        body = read_frame(sock, STRANGERS_BYTES)
        if body is None:
            return None
        ask = holder_side.decode(body)
        if isinstance(ask, SendSpans) or not same_secret(ask.token, self._token):
            raise ProtocolError("a reader of state did not know the job's token")
        for server in self._servers:
            server.known(sock)
        if isinstance(ask, AskTrace):
            self._give_trace(sock, ask)
            return None
        if isinstance(ask, AskFlow):
            return self._add_flow(sock, ask.ticket)
        refusal = self._admit_prover(sock, ask) if ask.proof else self._admit(sock, ask)
        if not refusal:
            try:
                inventory = self._source.inventory(self._proofs.step_for(sock) if ask.proof else ask.step)
            except StateError as error:
                refusal = str(error)
            else:
                if ask.proof:  # provers are disconnected separately, and have one connection each
                    sock.sendall(holder_side.frame(StateOffered(inventory)))
                    return _Reader(inventory, [sock])
                direct, done = exposed(ask.direct, self._hydration, self._source, inventory)
                reader = _Reader(inventory, [sock], direct.kind, done)
                with self._changed:
                    self._tickets[ticket] = reader
                try:
                    sock.sendall(holder_side.frame(StateOffered(inventory, ticket, self.ways, direct)))
                except OSError:
                    self._leave(sock, reader)
                    raise
                return reader
        sock.sendall(holder_side.frame(StateRefused(refusal)))
        return None

    def _add_flow(self, sock: socket.socket, ticket: str) -> _Reader | None:
        with self._changed:
            reader = self._tickets.get(ticket)
            if reader is not None:
                self._reading.add(sock)
                reader.connections.append(sock)
        opened = StateRefused(_GONE) if reader is None else FlowOpened()
        sock.sendall(holder_side.frame(opened))
        return reader

    def _admit(self, sock: socket.socket, ask: AskState) -> str:
        """Wait until this state is offered, and count the reader; returns the reason if it is refused."""

        def decided() -> bool:
            return self._closed or (self._offered is not None and self._offered[0] >= ask.generation)

        with self._changed:
            if self._wait_for(sock, decided, ask.patience) == _GONE:
                return _GONE
            if not decided() or self._closed:
                return f"generation {ask.generation} is not known here"
            generation, step = self._offered or (ask.generation, ask.step)
            if generation != ask.generation:
                return f"generation {ask.generation} is over, this is generation {generation}"
            if step != ask.step:
                return f"the state here is at step {step}, not at {ask.step}"
            self._reading.add(sock)
            return ""

    def _admit_prover(self, sock: socket.socket, ask: AskState) -> str:
        """Wait for the next step, for a proof; returns the reason if there is no such step."""
        with self._changed:
            self._proofs.wait(sock, ask)

            def decided() -> bool:
                return self._closed or self._proofs.step_for(sock) != NO_STATE

            why = self._wait_for(sock, decided, ask.patience)
            if why or self._closed:
                self._proofs.leave(sock)
                return why or "this worker ends"
        return ""

    def _give_trace(self, sock: socket.socket, ask: AskTrace) -> None:
        with self._changed:
            self._wait_for(
                sock, lambda: self._closed or not self._proofs.expects(ask.generation, ask.step), ask.patience
            )
            trace = self._proofs.answer(ask.generation, ask.step)
        sock.settimeout(_BETWEEN_REQUESTS)
        gone = StateRefused(f"step {ask.step} was given up, or what it computed is not known any more")
        sock.sendall(holder_side.frame(gone if trace is None else TraceGiven(trace)))

    def _wait_for(self, sock: socket.socket, decided: Callable[[], bool], patience: Seconds) -> str:
        """Wait, holding the lock, until `decided`; returns the reason if the wait was given up, else empty."""
        until = time.monotonic() + min(max(patience, 0.0), _LONGEST_PATIENCE)
        while (left := until - time.monotonic()) > 0 and not self._changed.wait_for(decided, min(left, _GLANCE)):
            if has_hung_up(sock):
                return _GONE
        return "" if decided() else "it did not come in time"

    def _send_all(self, sock: socket.socket, reader: _Reader) -> None:
        sizes = {entry.name: entry.nbytes for entry in reader.inventory.entries}
        while True:
            sock.settimeout(_BETWEEN_REQUESTS)
            body = read_frame(sock)
            if body is None:
                return
            wanted = holder_side.decode(body)
            if not isinstance(wanted, SendSpans) or not 0 < wanted.chunk <= _LARGEST_CHUNK:
                raise ProtocolError("a reader of state asked for something else than bytes")
            if not wanted.spans:  # the reader is done; a connection over a dead address would not show its end
                for each in list(reader.connections):
                    hang_up(each)
                return
            for name, offset, length in wanted.spans:
                if offset < 0 or length < 1 or offset + length > sizes.get(name, 0):
                    raise ProtocolError(f"bytes {offset} to {offset + length} of {name!r} do not exist")
            chunks = chunked(wanted.spans, wanted.chunk)
            outgoing = Outgoing(self._source.tensor, wanted.chunk, self._behind)
            kind = reader.kind if wanted.direct else ""
            for chunk, data in zip(chunks, outgoing.read_all(chunks), strict=True):
                place = place_of(chunk, self._source.tensor, kind)
                allow(sock, time.monotonic() + _BETWEEN_REQUESTS)
                if wanted.direct:
                    send(sock, place.pack() + checksum(data))
                if place == NOWHERE:
                    send(sock, data)
                if not wanted.direct:
                    send(sock, checksum(data))
