"""The agent's side of its zygote: starts it, restarts it when it dies, and requests workers from it."""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import msgspec

from regrow.agent.workers.processes import held_back
from regrow.agent.workers.zygote_messages import (
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
from regrow.core.ids import Instant, Seconds, WorkerId
from regrow.core.messages.vocabulary import ErrorReport

_STARTS = 3
_WINDOW_S: Seconds = 60.0
_END_S: Seconds = 2.0
AGAIN_S: Seconds = 1.0
"""Pause before another try when the system lacked resources."""
TRIES = 10
"""Number of tries to start a worker before it is reported as failed."""
_log = logging.getLogger("regrow.agent")


class ZygoteListener(Protocol):
    """Listener to the outcome of spawn requests."""

    def worker_spawned(self, worker: WorkerId, pid: int) -> None:
        """Take the report that the worker's process exists: a child of this one, or about to become one."""

    def spawn_failed(self, worker: WorkerId, error: ErrorReport) -> None:
        """Take the report that the worker will have no process."""


@dataclass(eq=False)
class _Pending:
    request: SpawnRequest
    descriptors: list[int]
    asked: bool = False
    """True if a zygote has received the request and has not refused it."""
    refusals: int = 0


class ZygoteClient:
    """Requests workers from a zygote that may die at any time.

    Args:
        listener: receives the outcome of every request, once.
        guarded: returns the process ids of living workers, whose descendants a zygote ends if this process is killed.
    """

    def __init__(
        self,
        listener: ZygoteListener,
        *,
        preload: list[str],
        path_entry: str | None,
        one_thread: bool,
        guarded: Callable[[], Collection[int]],
    ) -> None:
        self._listener = listener
        self._preload = preload
        self._path_entry = path_entry
        self._one_thread = one_thread
        self._guarded = guarded
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ready = False
        self._ending = False
        self._broken: ErrorReport | None = None
        self._starts: deque[Instant] = deque(maxlen=_STARTS)
        self._pending: dict[WorkerId, _Pending] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ZygoteFact] = msgspec.msgpack.Decoder(ZygoteFact)

    @property
    def pid(self) -> int | None:
        """The zygote's process id; None while there is none."""
        return None if self._process is None else self._process.pid

    @property
    def busy(self) -> bool:
        """True if there may be a forked worker that was not reported yet."""
        return bool(self._pending)

    def start(self) -> None:
        """Start the zygote; it imports in the background while requests queue up.

        If the system lacks resources for it, the start is tried again.
        """
        if self._ending:
            return
        self._starts.append(time.monotonic())
        try:
            self._process, self._control = self._launch()
        except OSError as error:
            self._starts.pop()  # The zygote did not die; the missing resource may soon be available again.
            _log.warning("the zygote could not be started, which is tried again: %s", error.strerror or error)
            asyncio.get_running_loop().call_later(AGAIN_S, self.start)
            return
        self._ready = False
        asyncio.get_running_loop().add_reader(self._control, self._readable, self._control)
        setup = ZygoteSetup(os.getpid(), self._preload, self._path_entry, self._one_thread, list(self._guarded()))
        self._send(setup)

    def _launch(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs, held_back(), contextlib.ExitStack() as unless_started:
            unless_started.callback(ours.close)
            process = subprocess.Popen(
                # -P: a file in the user's working directory must not shadow a module of regrow.
                [sys.executable, "-P", "-m", "regrow.agent.workers.zygote", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            unless_started.pop_all()
        return process, ours

    def spawn(self, request: SpawnRequest, descriptors: list[int]) -> None:
        """Request a worker. The descriptors belong to this client from now on."""
        pending = _Pending(request, descriptors)
        self._pending[request.env.worker] = pending
        if self._broken is not None:
            self._give_up(request.env.worker, self._broken)
        elif self._ready:
            self._request(pending)

    def forget(self, pid: int) -> None:
        """Inform the zygote that a worker and its session are gone."""
        if self._ready:
            self._send(ForgetWorker(pid))

    async def close(self) -> None:
        """End the zygote: by an order, and by SIGKILL if that takes too long."""
        self._ending = True
        for worker in list(self._pending):
            self._drop(worker)
        process = self._process
        if process is None:
            return
        self._send(EndZygote())
        if not self._ready:
            process.terminate()
        deadline = time.monotonic() + _END_S
        while process.poll() is None:
            if time.monotonic() > deadline:
                process.kill()
            await asyncio.sleep(0.005)
        self._hang_up()

    def _request_again(self, pending: _Pending) -> None:
        if pending in self._pending.values() and self._ready and not pending.asked:  # Else a new zygote was asked.
            self._request(pending)

    def _request(self, pending: _Pending) -> None:
        pending.asked = True
        try:
            self._send(pending.request, pending.descriptors)
        except OSError as error:  # A packet may have some 200 kB, and the number of descriptors is limited.
            reason = f"the zygote could not be asked for a worker: {error}"
            self._give_up(pending.request.env.worker, ErrorReport("OSError", reason, f"{reason}\n"))

    def _send(self, order: ZygoteOrder, descriptors: list[int] | None = None) -> None:
        if self._control is None:
            return
        try:
            socket.send_fds(self._control, [self._encoder.encode(order)], descriptors or [])
        except (BrokenPipeError, ConnectionError):
            return  # `_readable` notices the zygote's end and handles pending requests.
        except BlockingIOError:
            _log.warning("the zygote does not take orders any more; starting another")
            if self._process is not None:
                self._process.kill()

    def _readable(self, control: socket.socket) -> None:
        while True:
            try:
                packet = control.recv(PACKET_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # It has left orders unread; the kernel reports that before its last messages.
            if not packet:
                self._ended()
                return
            self._receive(self._decoder.decode(packet))

    def _receive(self, fact: ZygoteFact) -> None:
        match fact:
            case ZygoteReady(threads=threads, missing=missing, started=started):
                if missing:
                    _log.warning("workers start slower than they could, and cannot use regrow: %s", missing)
                if threads != 1:
                    _log.warning(
                        "the zygote has %d threads, so a fork from it may hang: %s; leave that out of --preload",
                        threads,
                        started or "does a module in --preload start some?",
                    )
                self._ready = True
                for pending in list(self._pending.values()):
                    self._request(pending)
            case ZygoteFailed(kind=kind, message=message, traceback=text):
                self._break(ErrorReport(kind, message, text))
            case Spawned(worker=worker, pid=pid):
                self._drop(worker)
                self._listener.worker_spawned(worker, pid)
            case SpawnFailed(worker=worker, reason=reason) if worker in self._pending:
                self._refused(self._pending[worker], reason)

    def _refused(self, pending: _Pending, reason: str) -> None:
        pending.asked, pending.refusals = False, pending.refusals + 1
        if pending.refusals >= TRIES:
            self._give_up(pending.request.env.worker, ErrorReport("OSError", reason, f"{reason}\n"))
            return
        _log.warning("%s; it is tried again", reason)
        asyncio.get_running_loop().call_later(AGAIN_S, self._request_again, pending)

    def _ended(self) -> None:
        """Handle the zygote's end: all processes have closed the control socket, so no worker is being forked."""
        self._hang_up()
        process = self._process
        self._process = None
        if process is not None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # Do not wait longer for the kernel.
                process.wait(_END_S)
        if self._ending or self._broken is not None:
            return
        code = None if process is None else process.returncode
        if len(self._starts) == _STARTS and time.monotonic() - self._starts[0] < _WINDOW_S:
            text = f"the zygote died {_STARTS} times within {_WINDOW_S:g} s, last with code {code}"
            self._break(ErrorReport("ZygoteLost", text, f"{text}\n"))
            return
        _log.warning("the zygote died (code %s); starting another", code)
        self.start()

    def _break(self, error: ErrorReport) -> None:
        self._broken = error
        for worker in list(self._pending):
            self._give_up(worker, error)

    def _give_up(self, worker: WorkerId, error: ErrorReport) -> None:
        self._drop(worker)
        self._listener.spawn_failed(worker, error)

    def _drop(self, worker: WorkerId) -> None:
        pending = self._pending.pop(worker, None)
        for descriptor in pending.descriptors if pending is not None else []:
            os.close(descriptor)

    def _hang_up(self) -> None:
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None
        self._ready = False
