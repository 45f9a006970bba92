"""Jobs forked from a warm process: torch is imported once a test session instead of once a job.

    pytest's lanes ── server (everything imported, one thread)
              ├── server of a node, in the node's namespaces
              └── job: `python -m regrow …`, forked
                  ├── seeds that become what prepares data, if it is `regrow train`
                  └── agent seed, forked before the job begins; becomes an agent when the launcher starts one
                      ├── zygote seed; becomes a zygote when that agent starts one
                      └── writer seed; becomes the process that writes checkpoints, if there is to be one

Of jobs that `regrow try` starts, each has a seed likewise. Who is whose parent, and who ends with whom, is as in a job
started cold; but a command on a node of Slurm is a child of the node's server, and ends with the relay that has asked
for it (`tests/slurm/relay.py`). A process for which there is no seed (a second zygote, say) is started cold. Tests
about starting itself use `Site.command`, which is always cold.

A process that ends by itself runs its `atexit` functions, joins its threads and flushes its streams, and then leaves
without taking its interpreter apart: that reads and copies all pages that it shares with the server, and costs half a
second of a processor for each process of a job. What only the interpreter's end does is for cold tests to see.
"""

import asyncio
import atexit
import contextlib
import ctypes
import functools
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
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import IO, Any, NamedTuple, NoReturn, Protocol

from tests.forking import prepare_to_fork

NETWORK = "REGROW_TEST_NETWORK"
"""The network namespace that a job is to run in."""
MOUNT = "REGROW_TEST_MOUNT"
"""Folders that the shell is to mount first, for a job to see alone."""
AGENTS = "REGROW_TEST_AGENTS"
"""Most agents that a job starts, replacements included; more are started cold. 0: all else is."""
_CLONE_NEWNS = 0x00020000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_ZYGOTE = "regrow.agent.workers.zygote"
_AGENT = "regrow.agent"
_WRITER = "regrow.agent.checkpoints.writer"
_CHILDREN = {
    _ZYGOTE: "regrow.agent.workers.zygote_client",
    _WRITER: "regrow.agent.checkpoints.writer_client",
}
"""Children of an agent, and the module of each."""
_WORK = "regrow.hydration.durable.work"
_PACKET = 1 << 20
PAD = "REGROW_TEST_PAD"
PAD_BYTES = 16 << 10
SERVER = "a server"
NODE = "a server on a node"
"""It is in the namespaces of the process of which it is told the number, and ends with them."""
_START_S = 180.0
_PREPARING = "regrow_recipes.recipes.preparing"
_SEEDED = ("run", "agent", "train")
_TRIED = 4
"""Jobs of a trial in which nothing fails."""
_PREPARED = 2
"""Sets of rows of a recipe: to train on, and to evaluate with."""
_REPLACED = 2
"""Agents of a job of several nodes that may be replaced."""
_PR_SET_PDEATHSIG = 1


# --- the server ---------------------------------------------------------------------------------------------------


def main() -> None:
    """Import everything, then fork jobs on request until pytest ends. Returns in the server only at its end."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    listener.set_inheritable(False)
    gc.disable()
    zygote = importlib.import_module(_ZYGOTE)
    for name in (
        *zygote._TORCH,
        *zygote._OWN,
        *zygote._TORCHS,
        "regrow.cli",
        "regrow.launch.local",
        "regrow.agent.node",
        _WORK,
    ):
        importlib.import_module(name)
    _be_server(listener)


def _be_server(listener: socket.socket) -> None:
    _leave_operators()
    gc.enable()
    prepare_to_fork()
    asked = _Server(listener).serve()
    if asked is None:
        return
    request, fds = asked
    if request["module"] not in (SERVER, NODE):
        _become_job(request, fds)
        return
    *streams, mine = fds
    for fd in streams:
        os.close(fd)
    if request["module"] == NODE:
        _move(*request["words"])
        _be_server(socket.socket(fileno=mine))
        return
    gc.disable()
    for name in request["words"]:
        importlib.import_module(name)
    _be_server(socket.socket(fileno=mine))


def _move(node: str) -> None:
    """Into the namespaces of the process with this number, and below the first process there. Returns in a child."""
    with contextlib.ExitStack() as stack:
        kinds = ("net", "uts", "mnt", "pid_for_children")
        for file in [stack.enter_context(open(f"/proc/{node}/ns/{kind}")) for kind in kinds]:
            _enter(file)
    if os.fork():
        os._exit(0)
    os.setsid()
    _show(45, [NODE])


def _leave_operators() -> None:
    """Processes end without taking torch's operators apart, which takes up to a third of a second."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        if (held := finalizer.peek()) is not None and held[1].__module__ == "torch.library":
            finalizer.atexit = False


Request = tuple[dict[str, Any], list[int]]
"""Program to become, and the descriptors for it."""


class _Job(NamedTuple):
    """`report`: where to tell its end. `tied_to`: who asked for it, if it is to end with him."""

    pid: int
    report: int
    tied_to: socket.socket | None


class _Server:
    """Forks jobs on request, and tells whoever asked how each ended."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._waiting = selectors.DefaultSelector()
        self._waiting.register(listener, selectors.EVENT_READ)
        self._users: set[socket.socket] = set()
        self._jobs: dict[int, _Job] = {}
        """By their descriptors."""

    def serve(self) -> Request | None:
        """Returns the request in the job; in the server nothing, when all who have used it are gone."""
        while events := self._waiting.select(None if self._users else _START_S):
            for key, _ in events:
                if key.fileobj is self._listener:
                    new, _ = self._listener.accept()
                    self._users.add(new)
                    self._waiting.register(new, selectors.EVENT_READ)
                elif isinstance(key.fileobj, int):
                    self._reap(key.fileobj)
                elif isinstance(key.fileobj, socket.socket):
                    user = key.fileobj
                    packet, fds, _, _ = socket.recv_fds(user, _PACKET, 8)
                    if packet and (request := self._fork(user, packet, fds)) is not None:
                        return request
                    if not packet and self._last(user):
                        return None
        return None

    def _fork(self, user: socket.socket, packet: bytes, fds: list[int]) -> Request | None:
        report, *streams = fds
        request = json.loads(packet)
        pid = os.fork()
        if pid == 0:
            self._leave()
            os.close(report)
            return request, streams
        for fd in streams:
            os.close(fd)
        pidfd = os.pidfd_open(pid)
        self._jobs[pidfd] = _Job(pid, report, user if request.get("tied") else None)
        self._waiting.register(pidfd, selectors.EVENT_READ)
        os.set_inheritable(report, False)
        _tell(report, str(pid))
        return None

    def _leave(self) -> None:
        """In a job: what is the server's is closed."""
        self._waiting.close()
        for each in (self._listener, *self._users):
            each.close()
        for pidfd, job in self._jobs.items():
            os.close(pidfd)
            os.close(job.report)

    def _last(self, user: socket.socket) -> bool:
        """It has gone. Whether no other is left."""
        self._waiting.unregister(user)
        self._users.remove(user)
        for pidfd, job in self._jobs.items():
            if job.tied_to is user:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        user.close()
        return not self._users

    def _reap(self, pidfd: int) -> None:
        self._waiting.unregister(pidfd)
        job = self._jobs.pop(pidfd)
        _, status = os.waitpid(job.pid, 0)
        os.close(pidfd)
        with socket.socket(fileno=job.report) as told, contextlib.suppress(ConnectionError):
            told.send(str(os.waitstatus_to_exitcode(status)).encode())


def _tell(report: int, text: str) -> None:
    with socket.socket(fileno=os.dup(report)) as told, contextlib.suppress(ConnectionError):
        told.send(text.encode())


# --- in a job -----------------------------------------------------------------------------------------------------


def _take_streams(streams: list[int]) -> None:
    """As standard input, output and error."""
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)


def _become_job(request: dict[str, Any], streams: list[int]) -> None:
    _take_streams(streams)
    _become(request["env"])
    if request.get("tied"):
        os.setsid()
    if NETWORK in request["env"]:
        with open(f"/run/netns/{request['env'][NETWORK]}") as network:
            _enter(network)
    os.chdir(request["cwd"])
    if MOUNT in request["env"]:
        _mount(request["env"][MOUNT])
    words = request["words"]
    if request["module"] == _AGENT:
        _seed_agents_children(writer=False)
    elif words and words[0] in _SEEDED:
        if words[0] == "train" and os.environ.get(AGENTS) != "0":
            _seed_preparers()
        _seed_agents(words)
    elif words and words[0] == "try":
        _seed_jobs()
    _run(request["module"], words)


def _enter(namespace: IO[str]) -> None:
    """Go into a namespace, and all that will be started with it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace.fileno(), 0):
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace.name}")


def _mount(command: str) -> None:
    """Go into a namespace of mounts, with all that will be started, and run this there."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) or libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None):
        raise OSError(ctypes.get_errno(), "cannot have mounts of its own")
    subprocess.run(["sh", "-c", command], check=True)


def _become(env: Mapping[str, str]) -> None:
    """Environment and streams of a process of its own. Tests find processes by what `/proc/<pid>/environ` shows."""
    os.environ.clear()
    os.environ.update(env)
    _show(47, [f"{name}={value}" for name, value in sorted(env.items(), key=_marker_first)])
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout, __stderr__=sys.stderr)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tempfile.tempdir = None  # the environment may name another


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
    sys.modules.pop(module if module in _CHILDREN else f"{module}.__main__", None)
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


def _plant_some(count: int, grow: Callable[[socket.socket], NoReturn]) -> list["_Seed"]:
    """Plant `count` seeds, each of which waits in `grow`."""
    seeds: list[_Seed] = []
    for _ in range(count):
        planted = _plant()
        if isinstance(planted, socket.socket):
            grow(planted)
        seeds.append(planted)
    return seeds


def _await_growth(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    packet, fds, _, _ = socket.recv_fds(control, _PACKET, 8)
    control.close()
    if not packet:
        os._exit(0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)
    return json.loads(packet), fds


def _seed_jobs() -> None:
    """Jobs for the trial that this process becomes."""
    seeds = _plant_some(_TRIED, _grow_job)
    trial = importlib.import_module("regrow.launch.trial")
    trial.subprocess = _Instead(subprocess, Popen=_popen_jobs(seeds))  # type: ignore[attr-defined]


def _grow_job(control: socket.socket) -> NoReturn:
    request, (output,) = _await_growth(control)
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    _become(request["env"])
    _seed_agents(request["words"])
    _run("regrow", request["words"])


def _popen_jobs(seeds: list[_Seed]) -> Any:
    def popen(command: list[str], *, stdout: Any, **options: Any) -> Any:
        if not seeds or command[1:4] != ["-m", "regrow", "run"]:
            return subprocess.Popen(command, stdout=stdout, **options)
        seed = seeds.pop(0)
        seed.grow(command[3:], os.environ, [stdout.fileno()])
        return _Child(seed.pid)

    return popen


def _seed_agents(words: Sequence[str]) -> None:
    """Agents for the launcher that this process becomes."""
    nodes = int(words[words.index("--local-nodes") + 1]) if "--local-nodes" in words else 1
    most = int(os.environ.get(AGENTS, nodes + _REPLACED if nodes > 1 else 1))
    seeds = _plant_some(most, functools.partial(_grow_agent, writer="--checkpoint-dir" in words))
    child = importlib.import_module("regrow.launch.child")
    child.asyncio = _Instead(asyncio, create_subprocess_exec=_exec_seeds(seeds))  # type: ignore[attr-defined]
    supervisor = importlib.import_module("regrow.launch.agent_supervisor")
    children = supervisor.own_children  # all that it does not know it takes for what a lost agent has left
    supervisor.own_children = lambda: [  # type: ignore[attr-defined]
        pid for pid in children() if pid not in {seed.pid for seed in seeds}
    ]


def _grow_agent(control: socket.socket, *, writer: bool) -> NoReturn:
    request, (stdin,) = _await_growth(control)
    _seed_agents_children(writer)
    os.dup2(stdin, 0)
    os.close(stdin)
    os.setsid()
    _become(request["env"])
    _run(_AGENT, request["words"])


def _seed_preparers() -> None:
    """Plant processes that prepare data for the `regrow train` that this process becomes."""
    seeds = _plant_some(_PREPARED, _grow_preparer)

    def start(words: Sequence[str], streams: tuple[int, ...]) -> _Child | None:
        if not seeds:
            return None
        seed = seeds.pop(0)
        seed.grow(words, os.environ, streams)
        return _Child(seed.pid)

    preparing = importlib.import_module(_PREPARING)
    preparing.subprocess = _Instead(subprocess, run=run_forked(start))  # type: ignore[attr-defined]


def _grow_preparer(planted: socket.socket) -> NoReturn:
    request, streams = _await_growth(planted)
    _take_streams(streams)
    _become(request["env"])
    _run(_PREPARING, request["words"])


class Waited(Protocol):
    """A process whose end can be waited for."""

    def wait(self, timeout: float) -> int: ...


def run_forked(start: Callable[[Sequence[str], tuple[int, ...]], "Waited | None"]) -> Any:
    """`subprocess.run` of `python -m` what prepares data, forked; cold where `start` has nobody.

    Args:
        start: forks it with these words, standard input, output and error.
    """

    def run(command: Sequence[str], *, input: bytes, **options: Any) -> "subprocess.CompletedProcess[bytes]":
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            stdin.write(input)
            stdin.seek(0)
            child = None
            if command[1:3] == ["-m", _PREPARING]:
                child = start(command[3:], (stdin.fileno(), out.fileno(), err.fileno()))
            if child is None:
                return subprocess.run(command, input=input, **options)
            code = child.wait(_START_S)
            said = []
            for file in (out, err):
                file.seek(0)
                said.append(file.read())
            return subprocess.CompletedProcess(command, code, *said)

    return run


def _seed_agents_children(writer: bool) -> None:
    """A zygote for the agent that this process becomes, and a writer."""
    for module, client in _CHILDREN.items():
        if module == _WRITER and not writer:
            continue
        planted = _plant()
        if isinstance(planted, socket.socket):
            _grow_child(planted, module)
        name = importlib.import_module(client)
        name.subprocess = _Instead(subprocess, Popen=_popen_seed([planted]))  # type: ignore[attr-defined]


def _grow_child(planted: socket.socket, module: str) -> NoReturn:
    request, (stdin, control) = _await_growth(planted)
    os.setsid()
    os.dup2(stdin, 0)
    os.close(stdin)
    _become(request["env"])
    _run(module, [str(control)])


class _Instead:
    """A module with some names replaced."""

    def __init__(self, module: ModuleType, **names: Any) -> None:
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _popen_seed(seeds: list[_Seed]) -> Any:
    def popen(command: list[str], *, pass_fds: list[int], stdin: int, **options: Any) -> Any:
        if not seeds:
            return subprocess.Popen(command, pass_fds=pass_fds, stdin=stdin, **options)
        seed = seeds.pop()
        told = None
        if stdin == subprocess.PIPE:
            reader, writer = os.pipe()
            told = os.fdopen(writer, "wb")
        else:
            reader = os.open(os.devnull, os.O_RDONLY)
        seed.grow([], os.environ, [reader, *pass_fds])
        os.close(reader)
        return _Child(seed.pid, told)

    return popen


class _Child:
    """The part of `subprocess.Popen` that an agent uses, for a child that has not been made by it."""

    def __init__(self, pid: int, stdin: IO[bytes] | None = None) -> None:
        self.pid, self.stdin = pid, stdin
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
