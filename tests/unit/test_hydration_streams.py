"""Transfer of state over a socket: checks that do not wait."""

import socket
import time

import pytest

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
