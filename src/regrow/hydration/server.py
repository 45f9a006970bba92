"""The holder's side: lets newcomers read the state of this worker while it stands still."""

import hmac
import logging
import os
import secrets
import socket
import threading
import time
from pathlib import Path

from regrow.core.errors import HydrationError, ProtocolError, RegrowError, StateError
from regrow.core.ids import Generation, Instant, Seconds, StepNo
from regrow.hydration.inventory import Inventory, StateSource
from regrow.hydration.memory import Outgoing
from regrow.hydration.messages import AskState, SendSpans, StateOffered, StateRefused, holder_side
from regrow.hydration.plan import chunked
from regrow.hydration.streams import STRANGERS_BYTES, allow, checksum, hang_up, has_hung_up, read_frame, widen

_log = logging.getLogger(__name__)
_HANDSHAKE: Seconds = 10.0
_BETWEEN_REQUESTS: Seconds = 120.0
_LONGEST_PATIENCE: Seconds = 600.0
_GLANCE: Seconds = 0.5
"""So often a reader that has to wait is looked at: one that has hung up is waited for no more."""
_LARGEST_CHUNK = 64 << 20
_LONGEST_UNIX_PATH = 107


class HydrationServer:
    """Gives `state@step` to those who know the job's token, between `offer` and `withdraw` only.

    A reader that comes early waits; one of another generation or step is refused with the reason. Opening starts one
    thread, each reader another; after `close` none is left.

    Args:
        source: whose state.
        token: the job's secret.
        socket_dir: private folder for the unix socket.
        bind: address to listen on where the job has several nodes.
        advertise: the name under which other nodes reach this one.
        nodes: nodes in the job; with one, no port is opened at all.
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
    ) -> None:
        self._source = source
        self._token = token
        self._socket_dir = Path(socket_dir)
        self._bind = bind
        self._advertise = advertise
        self._nodes = nodes
        self._listener: socket.socket | None = None
        self._path: Path | None = None
        self._acceptor: threading.Thread | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._offered: tuple[Generation, StepNo] | None = None
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._reading: set[socket.socket] = set()
        self.endpoint = ""

    def __enter__(self) -> "HydrationServer":
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> str:
        """Listen; returns the endpoint, `unix:<path>` or `tcp:<host>:<port>`. Raises `HydrationError`."""
        try:
            self._listener = self._listen_unix() if self._nodes == 1 else self._listen_tcp()
        except OSError as error:
            cause = f"cannot listen at {self._path or self._bind}: {error.strerror}"
            raise HydrationError(cause, hint="does it exist, and is it writable?") from error
        acceptor = threading.Thread(target=self._accept, args=(self._listener,), name="regrow-hydrate", daemon=True)
        self._acceptor = acceptor
        acceptor.start()
        return self.endpoint

    def _listen_unix(self) -> socket.socket:
        self._path = self._socket_dir / f"hydrate-{os.getpid()}-{secrets.token_hex(4)}"
        if len(os.fsencode(self._path)) > _LONGEST_UNIX_PATH:
            cause = f"the socket path {self._path} is longer than {_LONGEST_UNIX_PATH} bytes"
            raise HydrationError(cause, hint="choose a shorter folder")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(self._path))
            listener.listen(128)
        except OSError:
            listener.close()
            raise
        self.endpoint = f"unix:{self._path}"
        return listener

    def _listen_tcp(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._bind else socket.AF_INET
        listener = socket.create_server((self._bind, 0), family=family, backlog=128)
        self.endpoint = f"tcp:{self._advertise}:{listener.getsockname()[1]}"
        return listener

    # --- what the session says ---

    def offer(self, generation: Generation, step: StepNo) -> None:
        """The state stands at `step` and stays there: members of `generation` may read it."""
        with self._changed:
            self._offered = (generation, step)
            self._changed.notify_all()

    def withdraw(self, deadline: Instant) -> int:
        """The state is about to change: let nobody new in, wait for those who read, hang up on them at the deadline.

        When this returns nobody reads. Returns how many were hung up on.
        """
        with self._changed:
            self._offered = None
        if self.wait_idle(deadline):
            return 0
        with self._changed:
            late = [(sock, self._connections[sock]) for sock in self._reading]
        for sock, _ in late:
            hang_up(sock)
        for _, thread in late:
            thread.join(_HANDSHAKE)
        return len(late)

    @property
    def offering(self) -> bool:
        """Whether anybody may read."""
        return self._offered is not None

    @property
    def readers(self) -> int:
        """How many newcomers are reading now."""
        with self._changed:
            return len(self._reading)

    def wait_idle(self, deadline: Instant) -> bool:
        """Wait until nobody reads; False when somebody still does at the deadline."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._reading, max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Hang up on everybody, end all threads, remove the socket. May be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            connections = dict(self._connections)
        if self._listener is not None:
            hang_up(self._listener)
            self._listener.close()
            self._listener = None
        for sock in connections:
            hang_up(sock)
        for thread in (self._acceptor, *connections.values()):
            if thread is not None and thread is not threading.current_thread():
                thread.join(_HANDSHAKE)
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    # --- threads ---

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                with self._changed:
                    if self._closed:
                        return
                    _log.warning("a reader of state could not be accepted: %s", error)
                    # Out of descriptors, most likely: give others the time to end.
                    self._changed.wait(0.05)
                continue
            thread = threading.Thread(target=self._attend, args=(sock,), name="regrow-hydrate-reader", daemon=True)
            with self._changed:
                if self._closed:
                    sock.close()
                    return
                self._connections[sock] = thread
                # Started under the lock, so that whoever finds it in the table can join it.
                thread.start()

    def _attend(self, sock: socket.socket) -> None:
        try:
            widen(sock)
            if (inventory := self._greet(sock)) is not None:
                self._send_all(sock, inventory)
        except (OSError, EOFError, RegrowError) as error:
            _log.info("a reader of state was lost: %s", error)
        finally:
            with self._changed:
                self._reading.discard(sock)
                self._connections.pop(sock, None)
                self._changed.notify_all()
            sock.close()

    def _greet(self, sock: socket.socket) -> Inventory | None:
        sock.settimeout(_HANDSHAKE)
        body = read_frame(sock, STRANGERS_BYTES)
        if body is None:
            return None
        ask = holder_side.decode(body)
        if not isinstance(ask, AskState) or not hmac.compare_digest(ask.token.encode(), self._token.encode()):
            _log.warning("a reader of state did not know the job's token")
            return None
        refusal = self._admit(sock, ask)
        if not refusal:
            try:
                inventory = self._source.inventory(ask.step)
            except StateError as error:
                refusal = str(error)
            else:
                sock.sendall(holder_side.frame(StateOffered(inventory)))
                return inventory
        sock.sendall(holder_side.frame(StateRefused(refusal)))
        return None

    def _admit(self, sock: socket.socket, ask: AskState) -> str:
        """Wait until this state is offered, count the reader; else why not."""

        def decided() -> bool:
            return self._closed or (self._offered is not None and self._offered[0] >= ask.generation)

        until = time.monotonic() + min(max(ask.patience, 0.0), _LONGEST_PATIENCE)
        with self._changed:
            while (left := until - time.monotonic()) > 0 and not self._changed.wait_for(decided, min(left, _GLANCE)):
                if has_hung_up(sock):
                    return "this reader is gone"
            if not decided() or self._closed:
                return f"generation {ask.generation} is not known here"
            generation, step = self._offered or (ask.generation, ask.step)
            if generation != ask.generation:
                return f"generation {ask.generation} is over, this is generation {generation}"
            if step != ask.step:
                return f"the state here stands at step {step}, not at {ask.step}"
            self._reading.add(sock)
            return ""

    def _send_all(self, sock: socket.socket, inventory: Inventory) -> None:
        sizes = {entry.name: entry.nbytes for entry in inventory.entries}
        while True:
            sock.settimeout(_BETWEEN_REQUESTS)
            body = read_frame(sock)
            if body is None:
                return
            wanted = holder_side.decode(body)
            if not isinstance(wanted, SendSpans) or not 0 < wanted.chunk <= _LARGEST_CHUNK:
                raise ProtocolError("a reader of state asked for something else than bytes")
            for name, offset, length in wanted.spans:
                if offset < 0 or length < 1 or offset + length > sizes.get(name, 0):
                    raise ProtocolError(f"bytes {offset} to {offset + length} of {name!r} do not exist")
            outgoing = Outgoing(self._source.tensor, wanted.chunk)
            for chunk in chunked(wanted.spans, wanted.chunk):
                data = outgoing.read(chunk)
                allow(sock, time.monotonic() + _BETWEEN_REQUESTS)
                sock.sendall(data)
                sock.sendall(checksum(data))
