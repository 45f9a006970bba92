"""The warm process as tests see it: who needs it first starts it, and all lanes of a test session share it."""

import contextlib
import fcntl
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.process.warm import NODE, PAD, PAD_BYTES, SERVER

START_S = 180.0
FOLDER = "REGROW_TEST_WARM"
"""Folder of the servers: a test session's, which its lanes have in common."""


class WarmServer:
    """The process that jobs are forked from. It ends with the last of pytest's processes that uses it.

    Args:
        control: a connection of this process's own.
        door: where the server listens.
    """

    def __init__(self, control: socket.socket, door: Path) -> None:
        self._control, self._door = control, door

    @classmethod
    def of_session(cls, source: str) -> "WarmServer":
        """The test session's, started if there is none. `source`: where regrow is imported from."""
        door = Path(os.environ[FOLDER]) / "door"
        with _only_one(door):
            if (control := _connected(door)) is None:
                with _listening(door) as listener:
                    _start(source, listener)
                control = _connected(door)
        assert control is not None
        return cls(control, door)

    def importing(self, modules: Sequence[str]) -> "WarmServer":
        """A server forked from this one, if there is none yet, with modules imported besides regrow's own and torch."""
        door = self._door.with_name(hashlib.sha256(" ".join(modules).encode()).hexdigest()[:16])
        with _only_one(door):
            if (control := _connected(door)) is not None:
                return WarmServer(control, door)
            server, _ = self._fork_server(SERVER, modules, door)
        return server

    def on_node(self, pid: int, door: Path) -> "WarmServer":
        """A server forked from this one into the namespaces of a process. It ends with them, or with its last user."""
        server, moving = self._fork_server(NODE, [str(pid)], door)
        assert moving.wait(START_S) == 0, "it could not enter the namespaces"
        return server

    def _fork_server(self, kind: str, words: Sequence[str], door: Path) -> tuple["WarmServer", "WarmProcess"]:
        with _listening(door) as listener:
            process = self.start(kind, words, cwd=os.getcwd(), env={}, streams=(0, 1, 2, listener.fileno()))
            control = _connected(door)
        assert control is not None
        return WarmServer(control, door), process

    def start(
        self, module: str, words: Sequence[str], *, cwd: str, env: Mapping[str, str], streams: tuple[int, ...]
    ) -> "WarmProcess":
        """`python -m module words…`, forked. `streams`: what its standard input, output and error are."""
        report, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = json.dumps({"module": module, "words": list(words), "cwd": cwd, "env": dict(env)}).encode()
        with theirs:
            socket.send_fds(self._control, [request], [theirs.fileno(), *streams])
        report.settimeout(START_S)
        return WarmProcess(report, int(report.recv(64)))

    def close(self) -> None:
        """Use it no more. Jobs that still run are the tests' to end."""
        self._control.close()


@contextlib.contextmanager
def _only_one(door: Path) -> Iterator[None]:
    with open(f"{door}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _connected(door: Path) -> socket.socket | None:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        made.connect(str(door))
    except (FileNotFoundError, ConnectionRefusedError):
        made.close()
        return None
    return made


def _listening(door: Path) -> socket.socket:
    door.unlink(missing_ok=True)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.bind(str(door))
    made.listen()
    return made


def _start(source: str, listener: socket.socket) -> None:
    path = os.pathsep.join([source, os.getcwd(), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}  # read as they are imported
    subprocess.Popen(
        [sys.executable, "-P", "-m", "tests.process.warm", str(listener.fileno()), "x" * PAD_BYTES],
        env=environment | {PAD: "x" * PAD_BYTES},
        pass_fds=[listener.fileno()],
        stdin=subprocess.DEVNULL,
    )


class WarmProcess:
    """The part of `subprocess.Popen` that tests use, for a process whose parent is the server."""

    def __init__(self, report: socket.socket, pid: int) -> None:
        self._report, self.pid = report, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        if self.returncode is None:
            self._report.settimeout(timeout)
            try:
                told = self._report.recv(64)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("a warm job", timeout) from None
            self.returncode = int(told)
            self._report.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)
