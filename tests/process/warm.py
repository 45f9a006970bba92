"""Jobs forked from a warm process: torch is imported once a test session instead of once a job.

    pytest ── server (everything imported, one thread)
              └── job: `python -m regrow …`, forked
                  └── agent seed, forked before the job begins; becomes an agent when the launcher starts one
                      └── zygote seed; becomes a zygote when that agent starts one

Who is whose parent, and who ends with whom, is as in a job started cold. A process for which there is no seed (a second
zygote, say) is started cold. Tests about starting itself use `Site.command`, which is always cold.

A process that ends by itself runs its `atexit` functions, joins its threads and flushes its streams, and then leaves
without taking its interpreter apart: that reads and copies all pages that it shares with the server, and costs half a
second of a processor for each process of a job. What only the interpreter's end does is for cold tests to see.
"""

import asyncio
import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

NETWORK = "REGROW_TEST_NETWORK"
"""The network namespace that a job is to run in."""
_CLONE_NEWNET = 0x40000000
_ZYGOTE = "regrow.agent.workers.zygote"
_AGENT = "regrow.agent"
_PACKET = 1 << 20
_PAD = "REGROW_TEST_PAD"
_PAD_BYTES = 16 << 10
_IMPORTS = "REGROW_TEST_IMPORTS"
_START_S = 180.0
_SEEDED = ("run", "agent")
_PR_SET_PDEATHSIG = 1


# --- the test's side ----------------------------------------------------------------------------------------------


class WarmServer:
    """The warm process, as pytest sees it. Started at first use; ends with pytest.

    Args:
        source: where regrow is imported from.
        imports: modules that it imports besides regrow's own and torch.
    """

    def __init__(self, source: str, imports: Sequence[str] = ()) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join([source, os.getcwd(), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}  # read as they are imported
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tests.process.warm", str(theirs.fileno()), "x" * _PAD_BYTES],
                env=environment | {_PAD: "x" * _PAD_BYTES, _IMPORTS: " ".join(imports)},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._control = ours

    def start(
        self, module: str, words: Sequence[str], *, cwd: str, env: Mapping[str, str], streams: tuple[int, int, int]
    ) -> "WarmProcess":
        """`python -m module words…`, forked. `streams`: what its standard input, output and error are."""
        report, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = json.dumps({"module": module, "words": list(words), "cwd": cwd, "env": dict(env)}).encode()
        with theirs:
            socket.send_fds(self._control, [request], [theirs.fileno(), *streams])
        report.settimeout(_START_S)
        return WarmProcess(report, int(report.recv(64)))

    def close(self) -> None:
        """End the server; jobs that still run are the tests' to end."""
        self._control.close()
        self._process.wait(_START_S)


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


# --- the server ---------------------------------------------------------------------------------------------------


def main() -> None:
    """Import everything, then fork jobs on request until pytest ends. Returns in the server only at its end."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    zygote = importlib.import_module(_ZYGOTE)
    for name in (
        *zygote._TORCH,
        *zygote._OWN,
        *zygote._TORCHS,
        "regrow.cli",
        "regrow.launch.local",
        "regrow.agent.node",
        *os.environ[_IMPORTS].split(),
    ):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    request, fds = _serve(control)
    if request is not None:
        _become_job(request, fds)


def _serve(control: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Fork on request and tell how each job ended. Returns the request in the job, None in the server."""
    waiting = selectors.DefaultSelector()
    waiting.register(control, selectors.EVENT_READ)
    reports: dict[int, tuple[int, int]] = {}
    while True:
        for key, _ in waiting.select():
            if key.fileobj is not control:
                pidfd = int(key.fd)
                waiting.unregister(pidfd)
                pid, report = reports.pop(pidfd)
                _, status = os.waitpid(pid, 0)
                os.close(pidfd)
                with socket.socket(fileno=report) as told, contextlib.suppress(ConnectionError):
                    told.send(str(os.waitstatus_to_exitcode(status)).encode())
                continue
            packet, fds, _, _ = socket.recv_fds(control, _PACKET, 8)
            if not packet:
                return None, []
            report, *streams = fds
            pid = os.fork()
            if pid == 0:
                waiting.close()
                control.close()
                for pidfd, (_, other) in reports.items():
                    os.close(pidfd)
                    os.close(other)
                os.close(report)
                return json.loads(packet), streams
            for fd in streams:
                os.close(fd)
            pidfd = os.pidfd_open(pid)
            reports[pidfd] = (pid, report)
            waiting.register(pidfd, selectors.EVENT_READ)
            os.set_inheritable(report, False)
            _tell(report, str(pid))


def _tell(report: int, text: str) -> None:
    with socket.socket(fileno=os.dup(report)) as told, contextlib.suppress(ConnectionError):
        told.send(text.encode())


# --- in a job -----------------------------------------------------------------------------------------------------


def _become_job(request: dict[str, Any], streams: list[int]) -> None:
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    _become(request["env"])
    if NETWORK in request["env"]:
        _enter(request["env"][NETWORK])
    os.chdir(request["cwd"])
    words = request["words"]
    if request["module"] == _AGENT:
        _seed_zygote()
    elif words and words[0] in _SEEDED:
        nodes = int(words[words.index("--local-nodes") + 1]) if "--local-nodes" in words else 1
        _seed_agents(nodes)
    _run(request["module"], words)


def _enter(network: str) -> None:
    """Go into a network namespace, and all that will be started with it."""
    with open(f"/run/netns/{network}") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network {network}")


def _become(env: Mapping[str, str]) -> None:
    """Environment and streams of a process of its own. Tests find processes by what `/proc/<pid>/environ` shows."""
    os.environ.clear()
    os.environ.update(env)
    _show(47, [f"{name}={value}" for name, value in sorted(env.items(), key=_marker_first)])
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout, __stderr__=sys.stderr)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _show(field: int, words: Sequence[str]) -> None:
    """Put words in the place of those with which the server was started, as the kernel shows them to others.

    Args:
        field: of `/proc/self/stat`, counted from the third, where that place begins; the next says where it ends.
    """
    with open("/proc/self/stat") as file:
        start, end = (int(place) for place in file.read().rsplit(")", 1)[1].split()[field : field + 2])
    block = b"\0".join(word.encode() for word in words)
    ctypes.memmove(start, block[: end - start - 1].ljust(end - start, b"\0"), end - start)


def _marker_first(item: tuple[str, str]) -> tuple[bool, str]:
    return item[0] != "REGROW_HOME", item[0]


def _run(module: str, words: Sequence[str]) -> NoReturn:
    """As `python -m module words…`, to the end of the process, whatever else is on the stack."""
    sys.argv = [module, *words]
    _show(45, [sys.executable, "-m", module, *words])
    sys.modules["__main__"] = ModuleType("__main__")
    sys.modules.pop(module if module == _ZYGOTE else f"{module}.__main__", None)
    code: object = 0
    try:
        runpy._run_module_as_main(module)  # type: ignore[attr-defined]  # what `-m` itself calls
    except SystemExit as end:
        code = end.code
    _end(code)


def _end(code: object) -> NoReturn:
    """The end of a process, as Python has it but for the interpreter's own."""
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit((code or 0) & 0xFF)


class _Seed:
    """A forked child that waits to become another process."""

    def __init__(self, pid: int, control: socket.socket) -> None:
        self.pid, self._control = pid, control

    def grow(self, words: Sequence[str], env: Mapping[str, str], fds: Sequence[int]) -> None:
        socket.send_fds(self._control, [json.dumps({"words": list(words), "env": dict(env)}).encode()], list(fds))
        self._control.close()


def _plant() -> "_Seed | socket.socket":
    """Fork a seed. Returns it in the parent; in the seed, where it hears what it is to become."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    pid = os.fork()
    if pid:
        theirs.close()
        return _Seed(pid, ours)
    ours.close()
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the launcher
    if os.getppid() != parent:
        os._exit(0)
    return theirs


def _await_growth(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    packet, fds, _, _ = socket.recv_fds(control, _PACKET, 8)
    control.close()
    if not packet:
        os._exit(0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)
    return json.loads(packet), fds


def _seed_agents(nodes: int) -> None:
    """Agents for the launcher that this process becomes."""
    seeds: list[_Seed] = []
    for _ in range(nodes):
        planted = _plant()
        if isinstance(planted, socket.socket):
            _grow_agent(planted)
        seeds.append(planted)
    child = importlib.import_module("regrow.launch.child")
    child.asyncio = _Instead(asyncio, create_subprocess_exec=_exec_seeds(seeds))  # type: ignore[attr-defined]


def _grow_agent(control: socket.socket) -> NoReturn:
    _seed_zygote()
    request, (stdin,) = _await_growth(control)
    os.dup2(stdin, 0)
    os.close(stdin)
    os.setsid()
    _become(request["env"])
    _run(_AGENT, request["words"])


def _seed_zygote() -> None:
    """A zygote for the agent that this process becomes."""
    planted = _plant()
    if isinstance(planted, socket.socket):
        request, (control,) = _await_growth(planted)
        os.setsid()
        with open(os.devnull) as null:
            os.dup2(null.fileno(), 0)
        _become(request["env"])
        _run(_ZYGOTE, [str(control)])
    client = importlib.import_module("regrow.agent.workers.zygote_client")
    client.subprocess = _Instead(subprocess, Popen=_popen_seed([planted]))  # type: ignore[attr-defined]


class _Instead:
    """A module with some names replaced."""

    def __init__(self, module: ModuleType, **names: Any) -> None:
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _popen_seed(seeds: list[_Seed]) -> Any:
    def popen(command: list[str], *, pass_fds: list[int], **options: Any) -> Any:
        if not seeds:
            return subprocess.Popen(command, pass_fds=pass_fds, **options)
        seed = seeds.pop()
        seed.grow([], os.environ, pass_fds)
        return _Child(seed.pid)

    return popen


class _Child:
    """The part of `subprocess.Popen` that an agent uses, for a child that has not been made by it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self.returncode = 0
                return 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a child", timeout)
            time.sleep(0.002)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _exec_seeds(seeds: list[_Seed]) -> Any:
    async def create_subprocess_exec(*command: str, **options: Any) -> Any:
        if not seeds or command[1:] != ("-m", _AGENT):
            return await asyncio.create_subprocess_exec(*command, **options)
        reader, writer = os.pipe()
        seed = seeds.pop(0)
        seed.grow([], os.environ, [reader])
        os.close(reader)
        return _AgentChild(seed.pid, writer)

    return create_subprocess_exec


class _AgentChild:
    """The part of `asyncio.subprocess.Process` that a launcher uses."""

    def __init__(self, pid: int, stdin: int) -> None:
        self.pid, self.stdin = pid, _Pipe(stdin)
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._pidfd = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        try:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        except ChildProcessError:
            self.returncode = 255  # as asyncio has it
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode


class _Pipe:
    def __init__(self, descriptor: int) -> None:
        self._file = io.FileIO(descriptor, "w")

    def write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) or 0 :]

    async def drain(self) -> None:
        pass

    def close(self) -> None:
        self._file.close()


if __name__ == "__main__":
    main()
