"""The vault's door: workers fetch copies here, other agents leave theirs."""

import hmac
import logging
import os
import secrets
import socket
import threading
from pathlib import Path

from regrow.agent.state_copies.versions import CopyVersion, CopyVersions, DamagedCopy
from regrow.core.errors import ProtocolError, RegrowError, UsageError
from regrow.core.ids import Rank, Seconds
from regrow.core.messages.copy_transfer import (
    AskCopy,
    CopyHello,
    CopyKept,
    CopyOffered,
    CopyRefused,
    CopyWanted,
    CopyWhole,
    KeepCopy,
    SendCopy,
    VaultRequest,
    vault_side,
)
from regrow.core.wire import MAX_FRAME_BYTES
from regrow.hydration.copies.segment import NoMemoryForCopy, Segment, Torn, chunk_count, chunks_of
from regrow.hydration.streams import (
    DIGEST_BYTES,
    STALL,
    STRANGERS_BYTES,
    checksum,
    hang_up,
    read_frame,
    receive_into,
    widen,
)

_HELLO_S: Seconds = 10.0
_IDLE_S: Seconds = 600.0
_END_S: Seconds = 5.0
_LONGEST_UNIX_PATH = 107
_log = logging.getLogger("regrow.agent")


class CopyServer:
    """Listens between `open` and `close`; a thread accepts, one more serves each that comes.

    Args:
        shelf: what there is.
        token: the job's secret.
        folder: where the unix socket is made; None: TCP.
        bind: the address to listen on then.
        advertise: the name under which other nodes reach this one.
    """

    def __init__(self, shelf: CopyVersions, *, token: str, folder: Path | None, bind: str, advertise: str) -> None:
        self._shelf = shelf
        self._token = token.encode()
        self._folder = folder
        self._bind = bind
        self._advertise = advertise
        self._listener: socket.socket | None = None
        self._path: Path | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._acceptor: threading.Thread | None = None
        self._serving: dict[socket.socket, threading.Thread] = {}
        self._partial: dict[Rank, _Partial] = {}

    def open(self) -> str:
        """Listen; returns the endpoint. Raises `OSError`, or `UsageError` where the folder's path is too long."""
        if self._folder is None:
            family = socket.AF_INET6 if ":" in self._bind else socket.AF_INET
            self._listener = socket.create_server((self._bind, 0), family=family, backlog=128)
            endpoint = f"tcp:{self._advertise}:{self._listener.getsockname()[1]}"
        else:
            self._path = self._folder / f"vault-{os.getpid()}-{secrets.token_hex(4)}"
            if len(os.fsencode(self._path)) > _LONGEST_UNIX_PATH:
                raise UsageError(f"the socket path {self._path} is too long", hint="choose a shorter XDG_RUNTIME_DIR")
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(str(self._path))
            self._listener.listen(128)
            endpoint = f"unix:{self._path}"
        self._acceptor = threading.Thread(target=self._accept, args=(self._listener,), name="regrow-vault", daemon=True)
        self._acceptor.start()
        return endpoint

    def close(self) -> None:
        """Hang up on everybody, end all threads, remove the socket. May be called twice."""
        with self._lock:
            self._closed.set()
            serving = dict(self._serving)
        if self._listener is not None:
            hang_up(self._listener)
            self._listener.close()
            self._listener = None
        for sock in serving:
            hang_up(sock)
        for thread in (self._acceptor, *serving.values()):
            if thread is not None:
                thread.join(_END_S)
        self._partial.clear()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                # Out of descriptors, most likely: others are given the time to end.
                if self._closed.wait(0.05):
                    return
                _log.warning("a connection to the vault could not be accepted: %s", error)
                continue
            thread = threading.Thread(target=self._attend, args=(sock,), name="regrow-vault-serves", daemon=True)
            with self._lock:
                if self._closed.is_set():
                    sock.close()
                    return
                self._serving[sock] = thread
                thread.start()  # under the lock, so that who finds it in the table can join it

    def _attend(self, sock: socket.socket) -> None:
        try:
            widen(sock)
            _Conversation(self, sock).run()
        except (OSError, EOFError, RegrowError) as error:
            if not self._closed.is_set():
                _log.info("a connection to the vault ended: %s", error)
        finally:
            with self._lock:
                self._serving.pop(sock, None)
            sock.close()

    # --- what conversations ask ---

    def knows(self, token: str) -> bool:
        """Whether this is the job's secret."""
        return hmac.compare_digest(token.encode(), self._token)

    @property
    def shelf(self) -> CopyVersions:
        """What there is."""
        return self._shelf

    def take_partial(self, copy: KeepCopy) -> "_Partial | None":
        """What arrived of this very copy over a connection that was lost; whatever else there is of its rank goes."""
        with self._lock:
            found = self._partial.pop(copy.rank, None)
        return found if found is not None and found.version.name == copy.version else None

    def leave_partial(self, partial: "_Partial") -> None:
        """The connection was lost in the middle of this copy."""
        with self._lock:
            if not self._closed.is_set():
                self._partial[partial.version.rank] = partial


class _Partial:
    """A copy that is on its way here. `chunks`: how many have arrived and were right."""

    def __init__(self, copy: KeepCopy, segment: Segment) -> None:
        self.copy = copy
        self.room = segment.begin(copy.rank, copy.holding, copy.inventory, copy.payload)
        self.chunks = 0
        self.version = CopyVersion(
            segment,
            rank=copy.rank,
            step=copy.step,
            holding=copy.holding,
            payload=copy.payload,
            received=True,
            name=copy.version,
        )


class _Conversation:
    """One connection: requests served in order."""

    def __init__(self, server: CopyServer, sock: socket.socket) -> None:
        self._server = server
        self._sock = sock
        self._codec = vault_side()

    def run(self) -> None:
        """Serve until the peer leaves. Raises `ProtocolError` where it has no business here."""
        hello = self._next(_HELLO_S, STRANGERS_BYTES)
        if hello is None:
            return
        if not isinstance(hello, CopyHello) or not self._server.knows(hello.token):
            raise ProtocolError("it does not know the job's token")
        while (request := self._next(_IDLE_S)) is not None:
            match request:
                case AskCopy():
                    self._give(request)
                case KeepCopy():
                    self._take(request)
                case _:
                    raise ProtocolError(f"a {type(request).__name__} out of turn")

    def _next(self, within: Seconds, most: int = MAX_FRAME_BYTES) -> VaultRequest | None:
        self._sock.settimeout(within)
        body = read_frame(self._sock, most)
        self._sock.settimeout(STALL)
        return None if body is None else self._codec.decode(body)

    def _say(self, reply: CopyOffered | CopyRefused | CopyWanted | CopyWhole | CopyKept) -> None:
        self._sock.sendall(self._codec.frame(reply))

    # --- a worker fetches ---

    def _give(self, ask: AskCopy) -> None:
        with self._server.shelf.borrow(ask.rank, ask.step) as version:
            if version is None:
                self._say(CopyRefused(f"there is no whole copy of rank {ask.rank}'s state@{ask.step} here"))
                return
            try:
                self._send(version)
            except DamagedCopy as error:
                _log.error("%s; it is thrown away", error)
                self._server.shelf.discard(version)
                raise
            except Torn:
                self._server.shelf.discard(version)
                raise

    def _send(self, version: CopyVersion) -> None:
        self._say(CopyOffered(version.holding, version.payload, version.inventory()))
        # The worker makes room first, which may take its time.
        match self._next(_IDLE_S):
            case None:
                return
            case SendCopy():
                pass
            case other:
                raise ProtocolError(f"a {type(other).__name__} out of turn")
        for data, digest in version.chunks():
            self._sock.sendall(data)
            self._sock.sendall(digest)
        if not version.whole:
            raise Torn(f"the copy of rank {version.rank}'s state@{version.step} was written over while it was sent")
        self._say(CopyWhole())

    # --- another agent leaves a copy ---

    def _take(self, copy: KeepCopy) -> None:
        count = chunk_count(copy.payload)
        if self._server.shelf.named(copy.rank, copy.version) is not None:
            self._say(CopyWanted(count))
            self._expect_whole()
            self._say(CopyKept())
            return
        partial = self._server.take_partial(copy)
        if partial is None:
            try:
                partial = _Partial(copy, self._server.shelf.room(copy.rank, copy.step))
            except NoMemoryForCopy as error:
                self._say(CopyRefused(str(error)))
                return
        try:
            self._say(CopyWanted(partial.chunks))
            self._receive(partial)
            self._expect_whole()
        except (OSError, EOFError):
            self._server.leave_partial(partial)
            raise
        partial.version.segment.publish(copy.step)
        self._server.shelf.put(partial.version)
        self._say(CopyKept())

    def _receive(self, partial: _Partial) -> None:
        digest = bytearray(DIGEST_BYTES)
        for chunk, (start, end) in enumerate(chunks_of(partial.copy.payload)):
            if chunk < partial.chunks:
                continue
            room = partial.room[start:end]
            receive_into(self._sock, room)
            receive_into(self._sock, memoryview(digest))
            if checksum(room) != digest:
                self._server.leave_partial(partial)
                raise ProtocolError(f"bytes {start} to {end} of a copy from node {partial.copy.node} were damaged")
            partial.version.learn(chunk, digest)
            partial.chunks = chunk + 1

    def _expect_whole(self) -> None:
        if not isinstance(self._next(STALL), CopyWhole):
            raise ProtocolError("a copy was given up by its sender")
