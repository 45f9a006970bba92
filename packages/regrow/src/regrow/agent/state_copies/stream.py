"""Stream of one rank's copies to the buddy node's agent, in the background of the training."""

import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from regrow.agent.state_copies.versions import CopyVersion, CopyVersions
from regrow.core.errors import DamagedCopy, ProtocolError, RegrowError, Torn
from regrow.core.ids import Instant, NodeId, Rank, Seconds
from regrow.core.messages.copy_transfer import (
    CopyHello,
    CopyKept,
    CopyRefused,
    CopyReply,
    CopyWanted,
    CopyWhole,
    KeepCopy,
    caller_side,
)
from regrow.core.net import connect, hang_up, widen
from regrow.core.wire import read_frame
from regrow.hydration.streams import STALL

PATIENCE: Seconds = 20.0
"""Longest time without progress of a copy to a buddy that answered before; then training goes on without the copy."""
_SHORT_PATIENCE: Seconds = 2.0
_RETRY_S: Seconds = 0.2
_END_S: Seconds = 5.0
_log = logging.getLogger("regrow.agent")


class Placement(NamedTuple):
    """Destination of copies; an empty endpoint means that there is none."""

    buddy: NodeId
    endpoint: str


class StreamOutcome(NamedTuple):
    """Outcome for one version. `error`: reason why the buddy does not have it; empty: the buddy has it."""

    version: CopyVersion
    placement: Placement
    seconds: Seconds
    error: str = ""


class _Refused(RegrowError):
    """Error: the buddy refuses this copy, so that a retry is pointless."""


class RankStream:
    """Thread that checksums each new version of a rank and sends it to the buddy: one at a time, the newest next.

    Args:
        node: node of the rank.
        token: the job's secret.
        versions: the present versions, which are sent when the buddy changes.
        done: called from the thread when a version has arrived or failed. Not called for one that a newer replaced.
        patience: see `PATIENCE`.
    """

    def __init__(
        self,
        rank: Rank,
        *,
        node: NodeId,
        token: str,
        versions: CopyVersions,
        done: Callable[[StreamOutcome], None],
        patience: Seconds = PATIENCE,
    ) -> None:
        self._rank = rank
        self._node = node
        self._token = token
        self._versions = versions
        self._done = done
        self._patience = patience
        self._changed = threading.Condition()
        self._placement = Placement(NodeId(""), "")
        self._queue: list[CopyVersion] = []
        self._closed = False
        self._sock: socket.socket | None = None
        self._failing = False
        self._deadline: Instant = 0.0
        self._codec = caller_side()
        self._thread = threading.Thread(target=self._run, name=f"regrow-copies-{rank}", daemon=True)
        self._thread.start()

    def push(self, version: CopyVersion) -> None:
        """Send a new version to the buddy."""
        with self._changed:
            # The worker no longer waits for an older version that is still queued.
            self._queue = [version]
            self._changed.notify_all()

    def place(self, placement: Placement) -> None:
        """Send versions to this buddy from now on, also the present ones. A transfer under way starts anew there."""
        with self._changed:
            if placement == self._placement:
                return
            self._placement = placement
            self._failing = False
            if placement.endpoint:
                own = [
                    version for version in self._versions.all() if version.rank == self._rank and not version.received
                ]
                self._queue = own + [version for version in self._queue if version not in own]
            if self._sock is not None:
                hang_up(self._sock)
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            if self._sock is not None:
                hang_up(self._sock)
            self._changed.notify_all()
        self._thread.join(_END_S)

    # --- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or bool(self._queue))
                if self._closed:
                    break
                version = self._queue.pop(0)
            if version in self._versions and (outcome := self._attempt(version)) is not None:
                self._done(outcome)
        self._hang_up()

    def _attempt(self, version: CopyVersion) -> StreamOutcome | None:
        try:
            return self._deliver(version)
        except Torn as error:
            self._hang_up()  # In the middle of a copy the connection cannot be used for anything else.
            self._versions.discard(version)
            level = logging.ERROR if isinstance(error, DamagedCopy) else logging.DEBUG
            _log.log(level, "%s; it is not sent", error)
            return StreamOutcome(version, self._placement, 0.0, str(error))

    def _deliver(self, version: CopyVersion) -> StreamOutcome | None:
        """Try to send a version until it has arrived or its time is over. None if this agent ends."""
        began = time.monotonic()
        placement: Placement | None = None
        while True:
            with self._changed:
                if self._closed:
                    return None
                if placement != self._placement:
                    placement = self._placement
                    self._extend()
            if not placement.endpoint:
                for _ in version.chunks():  # Computes the checksums while the copy is new.
                    pass
                return StreamOutcome(version, placement, time.monotonic() - began)
            try:
                self._send(version, placement)
            except (OSError, EOFError, ProtocolError, _Refused) as error:
                self._hang_up()
                if (time.monotonic() >= self._deadline or isinstance(error, _Refused)) and self._stays(placement):
                    return self._given_up(version, placement, time.monotonic() - began, error)
                self._pause(placement)
            else:
                self._failing = False
                return StreamOutcome(version, placement, time.monotonic() - began)

    def _extend(self) -> None:
        self._deadline = time.monotonic() + (_SHORT_PATIENCE if self._failing else self._patience)

    def _pause(self, placement: Placement) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or placement != self._placement, _RETRY_S)

    def _stays(self, placement: Placement) -> bool:
        with self._changed:
            return placement == self._placement

    def _given_up(
        self, version: CopyVersion, placement: Placement, seconds: Seconds, error: Exception
    ) -> StreamOutcome:
        copy = f"the copy of rank {self._rank}'s state@{version.step}"
        why = f"node {placement.buddy} did not take {copy}: {_text(error)}"
        if not self._failing:
            _log.info("%s; training goes on", why)
        self._failing = True
        return StreamOutcome(version, placement, seconds, why)

    def _send(self, version: CopyVersion, placement: Placement) -> None:
        sock = self._connected(placement)
        codec = self._codec
        ask = KeepCopy(
            self._node, self._rank, version.step, version.holding, version.name, version.payload, version.inventory()
        )
        self._allow(sock, stall=self._patience)
        sock.sendall(codec.frame(ask))
        reply = self._reply(sock)  # The buddy allocates memory first, which may take a while.
        if not isinstance(reply, CopyWanted):
            raise ProtocolError(f"a {type(reply).__name__} out of turn")
        for data, digest in version.chunks(reply.chunk):
            self._allow(sock)
            sock.sendall(data)
            sock.sendall(digest)
            self._extend()
        if not version.whole:
            raise Torn(f"the copy of rank {self._rank}'s state@{version.step} was written over while it was sent")
        sock.sendall(codec.frame(CopyWhole()))
        reply = self._reply(sock)
        if not isinstance(reply, CopyKept):
            raise ProtocolError(f"a {type(reply).__name__} out of turn")

    def _allow(self, sock: socket.socket, *, stall: Seconds = STALL) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the time for a copy is over")
        sock.settimeout(min(left, stall))

    def _reply(self, sock: socket.socket) -> CopyReply:
        body = read_frame(sock)
        if body is None:
            raise EOFError("it hung up")
        reply = self._codec.decode(body)
        if isinstance(reply, CopyRefused):
            raise _Refused(reply.reason)
        return reply

    def _connected(self, placement: Placement) -> socket.socket:
        if self._sock is not None:
            return self._sock
        left = max(0.05, self._deadline - time.monotonic())
        sock = connect(placement.endpoint, min(left, STALL))
        widen(sock)
        with self._changed:
            if self._closed or placement != self._placement:
                sock.close()
                raise ConnectionAbortedError("another buddy was given")
            self._sock = sock
        sock.sendall(self._codec.frame(CopyHello(self._token)))
        return sock

    def _hang_up(self) -> None:
        with self._changed:
            sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()


def _text(error: Exception) -> str:
    return f"it accepted no data for {STALL:.0f} s" if isinstance(error, TimeoutError) else str(error) or "it hung up"
