"""Receives state from an agent's copy store, for a worker whose shards no living worker has."""

import socket
import threading
import time
from collections.abc import Callable

import msgspec
import torch

from regrow.core.errors import GenerationHalted, HydrationError, ProtocolError, RegrowError
from regrow.core.ids import Instant
from regrow.core.messages.copies import CopySource
from regrow.core.messages.copy_transfer import (
    AskCopy,
    CopyHello,
    CopyOffered,
    CopyRefused,
    CopyReply,
    CopyWhole,
    SendCopy,
    caller_side,
)
from regrow.core.net import connect, hang_up, widen
from regrow.core.wire import UNREADABLE, read_frame, receive_into
from regrow.hydration.client import HydrationReport
from regrow.hydration.copies.segment import chunks_of, layout
from regrow.hydration.inventory import Inventory, StateSink
from regrow.hydration.memory import Incoming
from regrow.hydration.plan import CHUNK_BYTES
from regrow.hydration.streams import DIGEST_BYTES, allow, checksum


def restore(sink: StateSink, source: CopySource, *, token: str, deadline: Instant) -> HydrationReport:
    """Run `Restoration(...).run()`, for callers that never cancel."""
    return Restoration(sink, source, token=token, deadline=deadline).run()


class Restoration:
    """One reception of a copy. Call `run` once, in one thread; `cancel` may be called in any other.

    Args:
        sink: receives the state. When `run` fails after `prepare`, its state is torn.
        source: the copy, and the endpoint of its store.
        token: the job's secret.
        deadline: on the monotonic clock; a store that moves nothing for 5 s is given up before.
    """

    def __init__(self, sink: StateSink, source: CopySource, *, token: str, deadline: Instant) -> None:
        self._sink = sink
        self._source = source
        self._token = token
        self._deadline = deadline
        self._lock = threading.Lock()
        self._cancelled = False
        self._sock: socket.socket | None = None
        self._codec = caller_side()

    def cancel(self) -> None:
        """End `run` within milliseconds; `run` then raises `GenerationHalted`."""
        with self._lock:
            self._cancelled = True
            if self._sock is not None:
                hang_up(self._sock)

    def run(self) -> HydrationReport:
        """Receive the copy.

        Raises:
            HydrationError: the store no longer has the copy, or the copy is damaged or did not come in time.
            StateError: the copy does not fit this worker.
            GenerationHalted: `cancel` was called.
        """
        began = time.monotonic()
        try:
            try:
                sock = self._connect()
                inventory = self._fetch(sock)
            except (OSError, EOFError, ProtocolError) as error:
                raise HydrationError(self._cannot(str(error) or type(error).__name__)) from error
            return HydrationReport(inventory.nbytes, time.monotonic() - began, 1)
        except RegrowError as error:
            if self._cancelled:
                raise GenerationHalted("the return to a copy was cancelled") from error
            raise
        finally:
            self._hang_up()

    def _cannot(self, why: str) -> str:
        source = self._source
        return (
            f"the copy of rank {source.rank}'s state@{source.step} could not be received from {source.endpoint}: {why}"
        )

    def _connect(self) -> socket.socket:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise HydrationError(self._cannot("the deadline has passed"))
        sock = connect(self._source.endpoint, min(left, 5.0))
        widen(sock)
        with self._lock:
            if self._cancelled:
                sock.close()
                raise GenerationHalted("the return to a copy was cancelled")
            self._sock = sock
        return sock

    def _hang_up(self) -> None:
        with self._lock:
            sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()

    def _fetch(self, sock: socket.socket) -> Inventory:
        allow(sock, self._deadline)
        ask = AskCopy(self._source.rank, self._source.step)
        sock.sendall(self._codec.frame(CopyHello(self._token)) + self._codec.frame(ask))
        offer = self._reply(sock)
        if isinstance(offer, CopyRefused):
            raise HydrationError(self._cannot(offer.reason))
        if not isinstance(offer, CopyOffered):
            raise ProtocolError("the agent's answer does not match the request")
        inventory = self._read_inventory(offer)
        incoming = Incoming(self._sink.prepare(inventory))
        sock.sendall(self._codec.frame(SendCopy()))
        self._receive(sock, inventory, incoming)
        if not isinstance(self._reply(sock), CopyWhole):
            raise HydrationError(self._cannot("it was changed while it was read"))
        incoming.copy_straightened()
        self._sink.finish()
        return inventory

    def _read_inventory(self, offer: CopyOffered) -> Inventory:
        try:
            inventory = msgspec.msgpack.decode(offer.inventory, type=Inventory)
        except UNREADABLE as error:
            raise HydrationError(self._cannot(f"its inventory cannot be read: {error}")) from error
        if (
            inventory.step != self._source.step
            or layout(entry.nbytes for entry in inventory.entries)[1] != offer.payload
        ):
            raise HydrationError(self._cannot("its inventory is that of another copy"))
        return inventory

    def _reply(self, sock: socket.socket) -> CopyReply:
        hung_up = "it hung up: another job's token, a copy that is damaged, or the agent ended"
        try:
            body = read_frame(sock)
        except ConnectionResetError as error:
            raise EOFError(hung_up) from error
        if body is None:
            raise EOFError(hung_up)
        return self._codec.decode(body)

    def _receive(self, sock: socket.socket, inventory: Inventory, incoming: Incoming) -> None:
        pieces = _Pieces(inventory, incoming)
        stage = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
        staging = stage.numpy().data
        digest = bytearray(DIGEST_BYTES)
        for start, end in chunks_of(pieces.payload):
            direct = pieces.direct(start, end)
            room = direct if direct is not None else staging[: end - start]
            allow(sock, self._deadline)
            receive_into(sock, room)
            receive_into(sock, memoryview(digest))
            if checksum(room) != digest:
                raise HydrationError(self._cannot(f"bytes {start} to {end} did not match their checksum"))
            if direct is None:
                pieces.scatter(start, end, stage)


class _Pieces:
    """Maps ranges of the payload to bytes of tensors; ranges must be requested in ascending order."""

    def __init__(self, inventory: Inventory, incoming: Incoming) -> None:
        offsets, self.payload = layout(entry.nbytes for entry in inventory.entries)
        self._spans = [
            (offset, offset + entry.nbytes, entry.name)
            for offset, entry in zip(offsets, inventory.entries, strict=True)
            if entry.nbytes
        ]
        self._flat: Callable[[str], torch.Tensor] = incoming.flat
        self._at = 0

    def _first(self, start: int) -> int:
        while self._at < len(self._spans) and self._spans[self._at][1] <= start:
            self._at += 1
        return self._at

    def direct(self, start: int, end: int) -> memoryview | None:
        """The range in place, if it is within one tensor in host memory; else None."""
        at = self._first(start)
        if at == len(self._spans):
            return None
        begins, ends, name = self._spans[at]
        flat = self._flat(name)
        if begins > start or ends < end or flat.device.type != "cpu":
            return None
        view: memoryview = flat[start - begins : end - begins].numpy().data
        return view

    def scatter(self, start: int, end: int, stage: torch.Tensor) -> None:
        """Copy a staged range to its tensors; bytes between the tensors are padding."""
        for begins, ends, name in self._spans[self._first(start) :]:
            if begins >= end:
                return
            low, high = max(begins, start), min(ends, end)
            self._flat(name)[low - begins : high - begins].copy_(stage[low - start : high - start])
