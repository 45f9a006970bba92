"""The agent's part in durable checkpoints: it holds its workers' snapshots and passes them to a writer process."""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from regrow.agent.checkpoints.writer import PACKET_BYTES
from regrow.agent.workers.processes import held_back
from regrow.core.config import AgentConfig
from regrow.core.ids import NodeId, Rank, Seconds, StepNo
from regrow.core.messages.checkpoints import (
    AbandonCheckpoint,
    CheckpointFailed,
    CheckpointPlace,
    SnapshotForDisk,
    SnapshotHeld,
    WriteCheckpoint,
    WriterFact,
    WriterOrder,
)

_END_S: Seconds = 2.0
_log = logging.getLogger("regrow.agent")


def place_of(config: AgentConfig) -> CheckpointPlace | None:
    """Place of a job's checkpoints; None if the job writes none."""
    return None if config.checkpoint_dir is None else CheckpointPlace(config.checkpoint_dir, config.spec.lineage)


class _Held(NamedTuple):
    step: StepNo
    descriptor: int


class WriterClient:
    """Holds workers' snapshots, and has a writer process write them as parts of checkpoints.

    Args:
        node: this node.
        place: place of the checkpoints; None: there is none.
        report: sends a fact to the coordinator.
    """

    def __init__(
        self, node: NodeId, place: CheckpointPlace | None, *, report: Callable[[SnapshotHeld | WriterFact], None]
    ) -> None:
        self._node, self._place, self._report = node, place, report
        self._held: dict[Rank, _Held] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._working: WriterOrder | None = None
        self._decoder: msgspec.msgpack.Decoder[WriterFact] = msgspec.msgpack.Decoder(WriterFact)

    @property
    def pid(self) -> int | None:
        """The writer's process id; None while there is no writer."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start a writer early, so that its imports are done when a state must be saved, for example at a stop."""
        with contextlib.suppress(OSError):  # `obey` tries again and reports the error.
            self._start()

    def receive(self, fact: SnapshotForDisk, pid: int | None) -> None:
        """Keep the snapshot that a worker with this process id has taken, even if the worker ends."""
        error = fact.error
        if not error:
            try:
                descriptor = os.open(f"/proc/{pid}/fd/{fact.descriptor}", os.O_RDWR | os.O_CLOEXEC)
            except OSError as failure:
                error = f"the snapshot of rank {fact.rank} cannot be opened: {failure.strerror}"
            else:
                self._forget(fact.rank)
                self._held[fact.rank] = _Held(fact.step, descriptor)
                self.start()
        self._report(SnapshotHeld(fact.worker, fact.asked, fact.step, error))

    def obey(self, order: WriterOrder) -> None:
        """Pass an order to the writer process, whose answer is reported later."""
        descriptors: list[int] = []
        if isinstance(order, WriteCheckpoint):
            held = [self._held.get(rank) for rank in order.ranks]
            descriptors = [each.descriptor for each in held if each is not None and each.step == order.step]
            if len(descriptors) != len(order.ranks):
                self._fail(order, f"{self._node} has no snapshots of state@{order.step} any more")
                return
        try:
            self._start()
            if self._control is None:
                self._fail(order, "there is no place to write it to")
                return
            socket.send_fds(self._control, [msgspec.msgpack.encode(order)], descriptors)
        except OSError as error:
            self._fail(order, f"the writer process cannot be used: {error.strerror}")
        else:
            self._working = None if isinstance(order, AbandonCheckpoint) else order
        finally:
            if isinstance(order, WriteCheckpoint):
                for rank in order.ranks:
                    self._forget(rank)

    def close(self) -> None:
        """End the writer at once; an unfinished checkpoint is recognizable as torn."""
        self._working = None
        self._hang_up()
        for rank in list(self._held):
            self._forget(rank)
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
            self._process = None

    def _start(self) -> None:
        if self._process is not None or self._place is None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs, held_back():
            self._process = subprocess.Popen(
                # -P: a file in the user's working directory must not shadow a module of regrow.
                [sys.executable, "-P", "-m", "regrow.agent.checkpoints.writer", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:  # `_readable` notices its end.
                pipe.write(msgspec.json.encode(self._place))  # Not in its command line, as it may contain credentials.
        self._control = ours
        asyncio.get_running_loop().add_reader(ours, self._readable, ours)

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
            self._working = None
            self._report(self._decoder.decode(packet))

    def _ended(self) -> None:
        self._hang_up()
        process, self._process = self._process, None
        code: int | None = None
        if process is not None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(_END_S)
        working, self._working = self._working, None
        if working is not None:
            self._fail(working, f"the writer process ended with code {code}")
        else:
            _log.warning("the process that writes checkpoints ended with code %s; the next one starts another", code)

    def _fail(self, order: WriterOrder, reason: str) -> None:
        self._report(CheckpointFailed(order.node, order.attempt, order.step, reason))

    def _forget(self, rank: Rank) -> None:
        held = self._held.pop(rank, None)
        if held is not None:
            os.close(held.descriptor)

    def _hang_up(self) -> None:
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None
