"""The seam for sockets: endpoints, whoever listens there, and threads that end."""

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from regrow.core.errors import UsageError
from regrow.core.net import (
    Listener,
    ThreadServer,
    connect,
    hang_up,
    listen,
    open_connection,
    same_secret,
    serve,
    sockets_home,
    unix_address,
)
from regrow.core.wire import FrameCodec

PATIENCE = 60.0


class Numbered(msgspec.Struct, frozen=True):
    number: int


@pytest.fixture(params=["abstract", "unix", "tcp"])
def listener(request: pytest.FixtureRequest, tmp_path: Path) -> Listener:
    homes: dict[str, str | Path | None] = {"abstract": sockets_home(), "unix": tmp_path, "tcp": None}
    return listen("test", homes[request.param], bind="127.0.0.1", advertise="127.0.0.1")


def echo(sock: socket.socket) -> None:
    while data := sock.recv(100):
        sock.sendall(data)


def test_whoever_connects_is_served_until_the_server_closes(listener: Listener) -> None:
    server = ThreadServer("echo", echo)
    endpoint = server.open(listener)
    with connect(endpoint, PATIENCE) as one, connect(endpoint, PATIENCE) as other:
        for sock in (one, other):
            sock.sendall(b"hello")
            assert sock.recv(100) == b"hello"
        server.close()
        assert (one.recv(1), other.recv(1)) == (b"", b"")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("echo")]
    with pytest.raises(OSError):
        connect(endpoint, 1.0)
    assert listener.path is None or not listener.path.exists()
    server.close()


def test_one_that_is_dismissed_is_served_no_more_and_others_are(listener: Listener) -> None:
    served: list[socket.socket] = []
    came = threading.Semaphore(0)

    def attend(sock: socket.socket) -> None:
        served.append(sock)
        came.release()
        echo(sock)

    server = ThreadServer("echo", attend)
    endpoint = server.open(listener)
    with connect(endpoint, PATIENCE) as one:
        assert came.acquire(timeout=PATIENCE)
        with connect(endpoint, PATIENCE) as other:
            assert came.acquire(timeout=PATIENCE)
            server.dismiss(served[:1])
            assert one.recv(1) == b""
            other.sendall(b"still")
            assert other.recv(100) == b"still"
    server.close()


def test_who_comes_when_no_thread_is_to_be_had_is_hung_up_on_and_the_next_is_served(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refused = threading.Thread.start, ["one"]

    def scarce(thread: threading.Thread) -> None:
        if thread.name == "echo-serves" and refused:
            raise RuntimeError(f"can't start new thread for {refused.pop()}")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    server = ThreadServer("echo", echo)
    endpoint = server.open(listener)
    with connect(endpoint, PATIENCE) as one:
        assert one.recv(100) == b""
    with connect(endpoint, PATIENCE) as other:
        other.sendall(b"hello")
        assert other.recv(100) == b"hello"
    server.close()


def test_a_server_that_gets_no_thread_can_be_closed(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    server = ThreadServer("echo", echo)
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="can't start new thread"):
        patched.setattr(threading.Thread, "start", never)
        server.open(listener)
    server.close()
    assert server.closed


def test_another_thread_can_end_what_has_been_opened(listener: Listener) -> None:
    opened: list[socket.socket] = []
    with connect(listener.endpoint, PATIENCE, opened=opened.append) as sock:
        assert opened == [sock]
        hang_up(opened[0])
        assert sock.recv(1) == b""
    listener.close()


@pytest.mark.parametrize("endpoint", ["", "http:x", "tcp:host", "tcp:host:port", "unix"])
def test_what_is_no_endpoint_is_said(endpoint: str) -> None:
    with pytest.raises((UsageError, OSError)):
        connect(endpoint, 1.0)


def test_a_folder_with_too_long_a_name_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="longer than 107 bytes"):
        listen("test", tmp_path / ("long" * 30))


def test_only_the_same_secret_is_the_same() -> None:
    assert same_secret("token", b"token")
    assert not same_secret("tokem", "token") and not same_secret("", "token") and not same_secret("töken", "token")


class Echo(asyncio.Protocol):
    """Says what it hears, to the other end where it serves, and to `heard`."""

    def __init__(self, *, serves: bool) -> None:
        self.serves = serves
        self.transport: asyncio.Transport
        self.heard: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.serves:
            self.transport.write(data)
            self.transport.close()
        self.heard.set_result(data)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_two_ends_meet_at_an_endpoint(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "server" if kind == "unix" else None
    server, endpoint = await serve(lambda: Echo(serves=True), path, bind="127.0.0.1", advertise="127.0.0.1")
    caller = await open_connection(lambda: Echo(serves=False), endpoint)
    caller.transport.write(b"hello")
    assert await asyncio.wait_for(caller.heard, PATIENCE) == b"hello"
    caller.transport.close()
    server.close()


def test_frames_are_taken_as_they_become_whole() -> None:
    codec: FrameCodec[Numbered] = FrameCodec(Numbered)
    sent = b"".join(codec.frame(Numbered(number)) for number in range(3))
    received, got = bytearray(), []
    for byte in sent:
        received.append(byte)
        got += [message.number for message in codec.take(received)]
    assert got == [0, 1, 2] and not received


# --- names without a file ------------------------------------------------------------------------------------------


def test_a_name_of_a_job_is_no_file_and_cannot_be_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    listener = listen("test", sockets_home())
    with connect(listener.endpoint, PATIENCE) as caller:
        served = listener.accept()
        caller.sendall(b"x")
        assert served.recv(1) == b"x"
        served.close()
    listener.close()
    assert list(tmp_path.iterdir()) == []
    assert sockets_home() != sockets_home()


def _as_another_user(work: Callable[[], bool]) -> bool:
    """Result in a process of another user."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 1)
    return code == 0


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@as_root
def test_another_user_who_knows_the_name_is_hung_up_on() -> None:
    server = ThreadServer("echo", echo)
    endpoint = server.open(listen("test", sockets_home()))

    def is_served() -> bool:
        with socket.socket(socket.AF_UNIX) as caller:
            caller.settimeout(PATIENCE)
            caller.connect(unix_address(endpoint.removeprefix("unix:")))
            try:
                caller.sendall(b"hello")
                return caller.recv(5) == b"hello"
            except ConnectionError:
                return False

    assert not _as_another_user(is_served)
    assert is_served()
    server.close()


@as_root
async def test_a_name_that_another_user_has_taken_is_not_spoken_to() -> None:
    name = f"{sockets_home()}/store"
    ready, told = os.pipe()
    done, end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setresuid(65534, 65534, 65534)
            thief = socket.socket(socket.AF_UNIX)
            thief.bind(unix_address(name))
            thief.listen()
            os.write(told, b"x")
            os.read(done, 1)
        finally:
            os._exit(0)
    os.read(ready, 1)
    try:
        with pytest.raises(PermissionError):
            connect(f"unix:{name}", PATIENCE)
        with pytest.raises(PermissionError):
            await open_connection(asyncio.Protocol, f"unix:{name}")
    finally:
        os.write(end, b"x")
        os.waitpid(pid, 0)
        for descriptor in (ready, told, done, end):
            os.close(descriptor)
