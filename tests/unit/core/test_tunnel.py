"""Encrypted connections as plain sockets: what a thread may do with one, another may do with the other."""

import contextlib
import hashlib
import os
import select
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.unit.core.tls_files import Authority, encrypt

from regrow.core import tunnel
from regrow.core.net import Listener, ThreadServer, connect, hang_up, listen
from regrow.core.strangers import refused

PATIENCE = 60.0
_ALERT = 21


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    made = Authority(tmp_path).issue("one.example")
    encrypt(monkeypatch, *made)
    return made


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = listen("test", None, bind="127.0.0.1", advertise="127.0.0.1")
    yield made
    made.close()


def met(listener: Listener) -> tuple[socket.socket, socket.socket]:
    """The caller's end and the server's."""
    caller = connect(listener.endpoint, PATIENCE)
    server = listener.accept()
    server.settimeout(PATIENCE)
    return caller, server


def all_of(sock: socket.socket) -> bytes:
    got = bytearray()
    while part := sock.recv(1 << 16):
        got += part
    return bytes(got)


def test_megabytes_both_ways_at_once_arrive_as_they_were(listener: Listener) -> None:
    caller, server = met(listener)
    there, back = os.urandom(9_000_001), os.urandom(5_000_003)
    got: dict[str, bytes] = {}

    def hear(name: str, sock: socket.socket, count: int) -> None:
        room = bytearray()
        while len(room) < count:
            room += sock.recv(1 << 20)
        got[name] = hashlib.sha256(room).digest()

    sides = [
        threading.Thread(target=hear, args=("there", server, len(there))),
        threading.Thread(target=hear, args=("back", caller, len(back))),
        threading.Thread(target=caller.sendall, args=(there,)),
        threading.Thread(target=server.sendall, args=(back,)),
    ]
    for side in sides:
        side.start()
    for side in sides:
        side.join(PATIENCE)
    assert got == {"there": hashlib.sha256(there).digest(), "back": hashlib.sha256(back).digest()}
    caller.close()
    server.close()


def test_who_speaks_in_clear_is_not_heard(listener: Listener) -> None:
    caller = socket.create_connection(("127.0.0.1", listener.sock.getsockname()[1]))
    caller.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 300)
    server = listener.accept()
    server.settimeout(PATIENCE)
    assert server.recv(100) == b""
    caller.settimeout(PATIENCE)
    answer = b""
    with contextlib.suppress(ConnectionError):
        answer = all_of(caller)
    assert not answer or answer[0] == _ALERT, "nothing but a TLS alert comes back"


def test_a_call_waits_in_the_kernel_until_it_is_taken(listener: Listener) -> None:
    began = time.monotonic()
    caller = connect(listener.endpoint, PATIENCE)
    caller.sendall(b"said before anybody answered")
    assert time.monotonic() - began < PATIENCE / 4
    server = listener.accept()
    server.settimeout(PATIENCE)
    assert server.recv(100) == b"said before anybody answered"


def test_last_words_of_who_has_left_already_are_heard(listener: Listener) -> None:
    caller = connect(listener.endpoint, PATIENCE)
    caller.sendall(b"last words")
    caller.close()
    time.sleep(0.1)
    server = listener.accept()
    server.settimeout(PATIENCE)
    assert all_of(server) == b"last words"


def test_a_process_that_ends_leaves_its_last_words(listener: Listener) -> None:
    text = f"""
        from regrow.core.net import connect
        sock = connect({listener.endpoint!r}, 60)
        sock.sendall(b"last words" * 100_000)
    """
    ends = subprocess.Popen([sys.executable, "-c", textwrap.dedent(text)])
    server = listener.accept()
    server.settimeout(PATIENCE)
    assert all_of(server) == b"last words" * 100_000
    assert ends.wait(PATIENCE) == 0


@pytest.mark.parametrize("how", ["close", "hang_up"])
@pytest.mark.parametrize("who", ["caller", "server"])
def test_the_end_of_one_side_is_the_end_of_the_other(listener: Listener, who: str, how: str) -> None:
    caller, server = met(listener)
    caller.sendall(b"hello")
    assert server.recv(5) == b"hello"
    one, other = (caller, server) if who == "caller" else (server, caller)
    (one.close if how == "close" else lambda: hang_up(one))()
    assert other.recv(1) == b""


def test_who_is_blocked_is_woken_by_another_thread(listener: Listener) -> None:
    caller, server = met(listener)
    caller.sendall(b"hello")
    assert server.recv(5) == b"hello"
    caller.settimeout(None)
    woken = threading.Event()

    def wait() -> None:
        caller.recv(1)
        woken.set()

    threading.Thread(target=wait, daemon=True).start()
    time.sleep(0.05)
    hang_up(caller)
    assert woken.wait(PATIENCE)
    server.close()


def test_it_can_be_polled(listener: Listener) -> None:
    caller, server = met(listener)
    poller = select.poll()
    poller.register(server, select.POLLIN)
    assert poller.poll(50) == []
    caller.sendall(b"x")
    assert poller.poll(1000 * PATIENCE) != []


def test_a_silent_stranger_is_hung_up_on(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "HANDSHAKE_S", 0.2)
    stranger = socket.create_connection(("127.0.0.1", listener.sock.getsockname()[1]))
    server = listener.accept()
    server.settimeout(PATIENCE)
    assert server.recv(1) == b""
    stranger.settimeout(PATIENCE)
    assert stranger.recv(1) == b""


def test_who_shows_another_certificate_is_hung_up_on(listener: Listener, tmp_path: Path) -> None:
    before = refused.counts.get("tls", 0)
    cert, key = Authority(tmp_path, "strange").issue("one.example")
    around = os.environ | {"REGROW_TLS_CERT": cert, "REGROW_TLS_KEY": key}
    text = f"""
        from regrow.core.net import connect
        sock = connect({listener.endpoint!r}, 60)
        try:
            sock.sendall(b"the token")
            print(sock.recv(1))
        except ConnectionError:
            print(b"")
    """
    stranger = subprocess.Popen([sys.executable, "-c", textwrap.dedent(text)], env=around, stdout=subprocess.PIPE)
    server = listener.accept()
    server.settimeout(PATIENCE)
    assert server.recv(100) == b"", "nothing was said: he does not trust us either"
    assert stranger.communicate(timeout=PATIENCE)[0].strip() == b"b''"
    assert refused.counts["tls"] == before + 1


def test_a_thread_server_serves_and_its_connections_leave_nothing(listener: Listener) -> None:
    def echo(sock: socket.socket) -> None:
        while part := sock.recv(1 << 12):
            sock.sendall(part)

    served = ThreadServer("echo", echo)
    endpoint = served.open(listen("test", None, bind="127.0.0.1", advertise="127.0.0.1"))
    sock = connect(endpoint, PATIENCE)
    sock.sendall(b"ping")
    assert sock.recv(4) == b"ping"
    before = psutil.Process().num_fds()
    for _ in range(30):
        with connect(endpoint, PATIENCE) as more:
            more.sendall(b"ping")
            assert more.recv(4) == b"ping"
    deadline = time.monotonic() + PATIENCE
    while psutil.Process().num_fds() > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert psutil.Process().num_fds() <= before
    served.close()
    assert sock.recv(1) == b""


def test_who_waits_for_nothing_costs_nothing(listener: Listener) -> None:
    caller, server = met(listener)
    caller.sendall(b"x")
    assert server.recv(1) == b"x"
    server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
    caller.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:  # nobody reads: all buffers fill up
            caller.send(b"x" * 65536)
            time.sleep(0.001)
    time.sleep(0.3)
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.3
    hang_up(caller)
    server.close()
