"""Transfer of state over a socket: checks that do not wait."""

import socket
import time
from typing import cast

import pytest

from regrow.hydration import streams
from regrow.hydration.streams import has_hung_up


@pytest.mark.parametrize("left", [False, True])
def test_whether_a_reader_has_hung_up_is_seen_at_once_however_patient_the_socket_is(left: bool) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(30.0)
        if left:
            theirs.close()
        began = time.monotonic()
        assert has_hung_up(ours) is left
        assert time.monotonic() - began < 15.0


def test_a_slow_peer_has_time_as_long_as_bytes_move() -> None:
    sent = bytearray()

    class Slow:
        """Takes a few bytes at once; each may take as long as the socket's timeout."""

        def send(self, data: memoryview) -> int:
            sent.extend(data[:7])
            return len(data[:7])

    streams.send(cast(socket.socket, Slow()), bytes(range(100)))
    assert sent == bytes(range(100))
