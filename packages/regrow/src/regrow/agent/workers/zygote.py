"""A process with torch imported and no threads, which forks workers.

Started as `python -m regrow.agent.workers.zygote DESCRIPTOR`.

It forks twice, so that the worker becomes a child of the agent: the agent waits for its workers itself, and the end of
the zygote harms none of them. If the agent is killed, the kernel ends the workers, and the zygote ends the processes
that they started and then itself.
"""

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
import time

import msgspec

from regrow.agent.workers.fencing import end_sessions
from regrow.agent.workers.imports import thread_names
from regrow.agent.workers.processes import call_process, die_with_parent, heed_nobody, threads
from regrow.agent.workers.seed import WorkerSeed
from regrow.agent.workers.tracebacks import report
from regrow.agent.workers.zygote_messages import (
    DESCRIPTORS,
    PACKET_BYTES,
    EndZygote,
    ForgetWorker,
    Spawned,
    SpawnFailed,
    SpawnRequest,
    ZygoteFact,
    ZygoteFailed,
    ZygoteOrder,
    ZygoteReady,
    ZygoteSetup,
)
from regrow.core.config import inherited_environment
from regrow.core.errors import ProtocolError
from regrow.core.ids import WorkerId
from regrow.core.process.shortage import short_of_processes
from regrow.core.process.streams import open_standard_streams
from regrow.core.wire import encoded

_TORCH = ("torch", "torch.distributed", "torch.nn.parallel", "torch.optim", "numpy", "torch.distributed.checkpoint")
_OWN = ("regrow.core.wire", "regrow.agent.workers.child", "regrow.agent.workers.link")
_TORCHS = ("regrow.train.init", "regrow.comm.rendezvous")
_GUARD_S = 3.0
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[ZygoteOrder] = msgspec.msgpack.Decoder(ZygoteOrder)


class _Control:
    """The zygote's end of the socket pair."""

    def __init__(self, descriptor: int) -> None:
        self._sock = socket.socket(fileno=descriptor)
        self._sock.set_inheritable(False)

    def receive(self) -> tuple[ZygoteOrder | None, list[int]]:
        """Receive the next order and its descriptors; no order when the agent has gone."""
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._sock, PACKET_BYTES, DESCRIPTORS)
        except ConnectionError:
            return None, []
        if not packet:
            return None, []
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        try:
            return _decoder.decode(packet), descriptors
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"the zygote does not understand its agent: {error}") from error

    def send(self, fact: ZygoteFact) -> None:
        """Send a fact to the agent; if the agent has gone, the next `receive` shows it."""
        with contextlib.suppress(ConnectionError):
            self._sock.send(encoded(_encoder, fact))

    def close(self) -> None:
        self._sock.close()


def main() -> None:
    """Import modules, then fork on request. Returns in the zygote at its end, and in a worker after its script."""
    open_standard_streams()
    die_with_parent(signal.SIGKILL)  # During imports only; later the zygote outlives its agent to clean up.
    call_process("regrow-zygote")
    heed_nobody()
    control = _Control(int(sys.argv[1]))
    setup, _ = control.receive()
    if not isinstance(setup, ZygoteSetup) or os.getppid() != setup.agent:
        return
    inherited = inherited_environment()
    try:
        _import_all(setup, control)
    except Exception as error:  # noqa: BLE001 - any exception of an imported module is reported
        error_report = report(error)
        control.send(ZygoteFailed(error_report.type, error_report.message, error_report.traceback))
        return
    seed = _serve(control, setup, inherited)
    if seed is not None:
        from regrow.agent.workers.child import run_worker

        run_worker(seed)


def _import_all(setup: ZygoteSetup, control: _Control) -> None:
    began = time.monotonic()
    # Libraries read these once when they load. A thread pool made in the zygote would not survive the fork.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # A module that checks for a GPU during its import would start CUDA, which is unusable in workers after a fork.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if setup.one_thread:
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ.setdefault("MKL_NUM_THREADS", "1")
    gc.disable()  # Imported objects stay, and collections among them would take a sixth of the time.
    for name in (*_TORCH, *_OWN):
        importlib.import_module(name)
    missing = _import_session()
    gc.enable()  # Before the user's modules, which may change this setting.
    if setup.path_entry is not None:
        sys.path.insert(0, setup.path_entry)
    started = []
    for name in setup.preload:
        before = threads()
        importlib.import_module(name)
        if threads() > before:
            started.append(f"{name} starts {' and '.join(thread_names())}")
    if setup.path_entry is not None:
        sys.path.remove(setup.path_entry)
    gc.collect()
    gc.freeze()  # So that a worker's collector does not write to, and thereby copy, pages shared with the zygote.
    die_with_parent(0)
    control.send(ZygoteReady(threads(), time.monotonic() - began, missing, "; ".join(started)))


def _import_session() -> str:
    """Import `regrow.train`; returns the reason if that fails. Only scripts that use it are affected."""
    try:
        for name in _TORCHS:
            importlib.import_module(name)
    except ImportError as error:
        return str(error)
    return ""


def _serve(control: _Control, setup: ZygoteSetup, inherited: dict[str, str]) -> WorkerSeed | None:
    guarded = set(setup.guarded)
    while True:
        order, descriptors = control.receive()
        match order:
            case SpawnRequest():
                seed = _spawn(
                    control, guarded, order, descriptors, WorkerSeed(order, descriptors, inherited, setup.agent, 0)
                )
                if seed is not None:
                    return seed
            case ForgetWorker(pid=pid):
                guarded.discard(pid)
            case EndZygote():
                return None
            case None:
                end_sessions(guarded, within=_GUARD_S)
                return None
            case ZygoteSetup():
                raise ProtocolError("the zygote was set up twice")


def _spawn(
    control: _Control, guarded: set[int], request: SpawnRequest, descriptors: list[int], seed: WorkerSeed
) -> WorkerSeed | None:
    """Fork a worker. Returns its seed in the worker, None in the zygote."""
    worker = request.env.worker
    reader, writer = os.pipe()
    try:
        middle = os.fork()
    except OSError as error:
        control.send(SpawnFailed(worker, _unforked(worker, error)))
        middle = -1
    if middle == 0:
        os.close(reader)
        return _between(control, writer, seed)
    os.close(writer)
    for descriptor in descriptors:
        os.close(descriptor)
    if middle > 0:
        with os.fdopen(reader, "rb") as pipe:
            pid = pipe.read()
        os.waitpid(middle, 0)
        if pid:
            guarded.add(int(pid))
    else:
        os.close(reader)
    return None


def _unforked(worker: WorkerId, error: OSError) -> str:
    return f"the zygote could not fork {worker}: {short_of_processes(error) or error}"


def _between(control: _Control, writer: int, seed: WorkerSeed) -> WorkerSeed:
    """Run the intermediate process: it forks the worker, reports its id and ends. Returns only in the worker."""
    middle = os.getpid()
    worker = seed.request.env.worker
    try:
        pid = os.fork()
    except OSError as error:
        control.send(SpawnFailed(worker, _unforked(worker, error)))
        os._exit(0)
    if pid == 0:
        os.setsid()
        control.close()
        os.close(writer)
        return seed._replace(middle=middle)
    control.send(Spawned(worker, pid))
    with contextlib.suppress(BrokenPipeError):  # The zygote was killed; the agent sends the next one the guarded ids.
        os.write(writer, str(pid).encode())
    os._exit(0)


if __name__ == "__main__":
    main()
