"""Server of the agent's copies of state: workers fetch copies, other agents store theirs."""

import logging
import socket
import threading
from pathlib import Path

from regrow.agent.state_copies.versions import CopyVersion, CopyVersions
from regrow.core.errors import DamagedCopy, NoMemoryForCopy, ProtocolError, Torn
from regrow.core.ids import Rank, Seconds
from regrow.core.messages.copy_transfer import (
    AskCopy,
    CopyHello,
    CopyKept,
    CopyOffered,
    CopyRefused,
    CopyRequest,
    CopyWanted,
    CopyWhole,
    KeepCopy,
    SendCopy,
    store_side,
)
from regrow.core.net import ThreadServer, listen, same_secret
from regrow.core.strangers import HELLO_S
from regrow.core.wire import MAX_FRAME_BYTES, read_frame, receive_into
from regrow.hydration.copies.segment import Segment, chunk_count, chunks_of
from regrow.hydration.streams import DIGEST_BYTES, STALL, STRANGERS_BYTES, checksum

_HELLO_S: Seconds = HELLO_S
_IDLE_S: Seconds = 600.0
_log = logging.getLogger("regrow.agent")


class CopyServer:
    """Listens between `open` and `close`; one thread accepts connections, and one more serves each of them.

    Args:
        versions: the copies.
        token: the job's secret.
        folder: folder of the unix socket; None: TCP.
        bind: with TCP, the address to listen on.
        advertise: with TCP, the name under which other nodes reach this one.
    """

    def __init__(self, versions: CopyVersions, *, token: str, folder: Path | None, bind: str, advertise: str) -> None:
        self._versions = versions
        self._token = token
        self._folder = folder
        self._bind = bind
        self._advertise = advertise
        self._server = ThreadServer("regrow-copies", lambda sock: _Conversation(self, sock).run())
        self._lock = threading.Lock()
        self._partial: dict[Rank, _Partial] = {}

    def open(self) -> str:
        """Listen; returns the endpoint. Raises `OSError`, or `UsageError` if the folder's path is too long."""
        return self._server.open(listen("vault", self._folder, bind=self._bind, advertise=self._advertise))

    def close(self) -> None:
        """Close all connections, end all threads, remove the socket. May be called twice."""
        self._server.close()
        self._partial.clear()

    # --- for conversations ---

    def greeted(self, sock: socket.socket) -> None:
        """Note that this caller has shown the job's token."""
        self._server.known(sock)

    def knows(self, token: str) -> bool:
        """True if `token` is the job's secret."""
        return same_secret(token, self._token)

    @property
    def versions(self) -> CopyVersions:
        """The copies that this agent keeps."""
        return self._versions

    def take_partial(self, copy: KeepCopy) -> "_Partial | None":
        """Take the part of this copy that arrived over a lost connection; drop parts of the rank's other copies."""
        with self._lock:
            found = self._partial.pop(copy.rank, None)
        return found if found is not None and found.version.name == copy.version else None

    def leave_partial(self, partial: "_Partial") -> None:
        """Keep the part that has arrived of a copy whose connection was lost."""
        with self._lock:
            if not self._server.closed:
                self._partial[partial.version.rank] = partial


class _Partial:
    """A copy that is being received. `chunks`: number of chunks that have arrived with the right checksum."""

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
    """One connection, whose requests are served in order."""

    def __init__(self, server: CopyServer, sock: socket.socket) -> None:
        self._server = server
        self._sock = sock
        self._codec = store_side()

    def run(self) -> None:
        """Serve requests until the peer leaves. Raises `ProtocolError` on a wrong token or an invalid request."""
        hello = self._next(_HELLO_S, STRANGERS_BYTES)
        if hello is None:
            return
        if not isinstance(hello, CopyHello) or not self._server.knows(hello.token):
            raise ProtocolError("it does not know the job's token")
        self._server.greeted(self._sock)
        while (request := self._next(_IDLE_S)) is not None:
            match request:
                case AskCopy():
                    self._give(request)
                case KeepCopy():
                    self._take(request)
                case _:
                    raise ProtocolError(f"a {type(request).__name__} out of turn")

    def _next(self, within: Seconds, most: int = MAX_FRAME_BYTES) -> CopyRequest | None:
        self._sock.settimeout(within)
        body = read_frame(self._sock, most)
        self._sock.settimeout(STALL)
        return None if body is None else self._codec.decode(body)

    def _say(self, reply: CopyOffered | CopyRefused | CopyWanted | CopyWhole | CopyKept) -> None:
        self._sock.sendall(self._codec.frame(reply))

    # --- a worker fetches a copy ---

    def _give(self, ask: AskCopy) -> None:
        with self._server.versions.borrow(ask.rank, ask.step) as version:
            if version is None:
                self._say(CopyRefused(f"there is no whole copy of rank {ask.rank}'s state@{ask.step} here"))
                return
            try:
                self._send(version)
            except DamagedCopy as error:
                _log.error("%s; it is thrown away", error)
                self._server.versions.discard(version)
                raise
            except Torn:
                self._server.versions.discard(version)
                raise

    def _send(self, version: CopyVersion) -> None:
        self._say(CopyOffered(version.holding, version.payload, version.inventory()))
        # The worker allocates memory first, which may take a while.
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

    # --- another agent stores a copy ---

    def _take(self, copy: KeepCopy) -> None:
        count = chunk_count(copy.payload)
        if self._server.versions.named(copy.rank, copy.version) is not None:
            self._say(CopyWanted(count))
            self._expect_whole()
            self._say(CopyKept())
            return
        partial = self._server.take_partial(copy)
        if partial is None:
            try:
                partial = _Partial(copy, self._server.versions.room(copy.rank, copy.step))
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
        self._server.versions.put(partial.version)
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
