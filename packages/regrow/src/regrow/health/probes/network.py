"""Tests a loopback exchange, and a connection to each given peer."""

import socket
import threading
import time
from collections.abc import Iterator

from regrow.core.ids import Seconds
from regrow.health.readings import NetworkReading, ProbeAt, ProbeSettings, Reading

LOOPBACK = "loopback"
_BLOCK = bytes(range(256)) * 4096  # 1 MiB
_TIMEOUT_S: Seconds = 2.0


def read(settings: ProbeSettings) -> Iterator[ProbeAt | Reading]:
    """Readings of the loopback, then of each peer."""
    if LOOPBACK not in settings.skip:
        yield ProbeAt("network", LOOPBACK)
        try:
            yield _loopback()
        except OSError as error:
            yield NetworkReading(LOOPBACK, error=str(error))
    for peer in settings.peers:
        if peer not in settings.skip:
            yield ProbeAt("network", peer)
            yield _connect(peer)


def _loopback() -> NetworkReading:
    """Send 1 MiB over loopback, and compare the received data."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_TIMEOUT_S)
        start = time.perf_counter()
        with socket.create_connection(server.getsockname(), timeout=_TIMEOUT_S) as sender:
            receiver, _ = server.accept()
            connected = time.perf_counter()
            received = bytearray()
            reader = threading.Thread(target=_receive, args=(receiver, received), daemon=True)
            reader.start()
            sender.sendall(_BLOCK)
            sender.shutdown(socket.SHUT_WR)
            reader.join(_TIMEOUT_S)
        seconds = time.perf_counter() - connected
    return NetworkReading(LOOPBACK, connected - start, len(received) / seconds, wrong=bytes(received) != _BLOCK)


def _receive(receiver: socket.socket, received: bytearray) -> None:
    with receiver:
        receiver.settimeout(_TIMEOUT_S)
        while block := receiver.recv(1 << 16):
            received += block


def _connect(peer: str) -> NetworkReading:
    """Measure the time of a TCP handshake. No data is sent, so as not to disturb the listener."""
    host, _, port = peer.rpartition(":")
    try:
        start = time.perf_counter()
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_TIMEOUT_S):
            return NetworkReading(peer, time.perf_counter() - start)
    except (OSError, ValueError, OverflowError) as error:
        return NetworkReading(peer, error=str(error))
