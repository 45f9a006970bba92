"""One worker as its agent sees it, from the order to spawn it until it is reaped."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable

import msgspec

from regrow.agent.workers.channel import WorkerChannel
from regrow.agent.workers.early_exit import EarlyExit
from regrow.agent.workers.fencing import kill_worker, signal_group
from regrow.agent.workers.processes import catches, exit_code_of, is_in_signal, ring, stat_of
from regrow.core.board import BatchShown, Board
from regrow.core.errors import ProtocolError
from regrow.core.ids import NO_STATE, Generation, Instant, Rank, Seconds, StepNo, WorkerId
from regrow.core.messages import facts, orders
from regrow.core.messages.replicas import OwnValues
from regrow.core.messages.unions import WorkerFact, WorkerOrder
from regrow.core.messages.vocabulary import Role
from regrow.core.process.ends import ChildEnd

_DUMP_S: Seconds = 0.3
_DUMP_AT_MOST_S: Seconds = 1.5
_LOOK_S: Seconds = 0.02
_ADOPTION_S: Seconds = 0.0005
_log = logging.getLogger("regrow.agent")
RING_S: Seconds = 1.5
"""Time after an order to halt within which a worker must itself begin to abort its groups."""

_RANKS_KEPT = 64


class Worker:
    """One worker: its place, channel, board and process.

    Args:
        order: the coordinator's order.
        on_fact: called with every fact that the worker sends.

    Raises `OSError` if the system lacks resources for the worker.
    """

    def __init__(self, order: orders.SpawnWorker, *, on_fact: Callable[["Worker", WorkerFact], None]) -> None:
        self.id: WorkerId = order.worker
        self.rank: Rank = order.rank
        self.local_rank = order.local_rank
        self.generation: Generation = order.generation
        self._ranks: dict[Generation, Rank] = {order.generation: order.rank}
        """The worker's rank from each generation on that gave it a rank, the oldest first."""
        self.proves = order.role is Role.PROVER
        """True if the worker exists only for a proof, so that nothing waits for its end."""
        self.shown = order.role.placed
        """True if the worker holds a rank; the rank of a standby is provisional."""
        self.pid: int | None = None
        self.doomed = False
        """True once the worker is fenced: nothing that its process does counts any more."""
        self._signal_due = 0
        """A signal that was requested before there was a process; 0: none was."""
        self.reported_exit = False
        """True once the worker's end is reported to the coordinator; the kernel may still be releasing its memory."""
        self.staged: list[facts.WorkerStaged] = []
        """Staged metrics of the newest two steps, the older one first: the worker may be in the newer one and not have
        reported the commit of the older one."""
        self.shown_batch: BatchShown | None = None
        """The batch read for the worker's last step; known when the worker has ended."""
        self.left: list[OwnValues] = []
        """Values that only the worker's rank had; known when the worker has ended."""
        self.committed: tuple[Generation, StepNo] | None = None
        self.announced: Generation | None = None
        """Newest generation in which a commit of this worker was reported at once."""
        self._on_fact = on_fact
        self._end: ChildEnd | None = None
        with contextlib.ExitStack() as unless_made:
            ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            unless_made.callback(ours.close)
            unless_made.callback(self._theirs.close)
            self.board, self._board_descriptor = Board.create()
            unless_made.callback(self.board.close)
            unless_made.callback(os.close, self._board_descriptor)
            self._pulse = EarlyExit(self._board_descriptor)
            unless_made.pop_all()
        self._channel = WorkerChannel(ours, on_fact=self._receive, on_garbage=self._distrust)

    def descriptors(self) -> tuple[list[int], tuple[int, int]]:
        """The worker's descriptors (channel, board, output, errors), and the agent's ends of its output. Call it once.

        Raises `OSError`, after closing everything.
        """
        pipes: list[int] = []
        try:
            for _ in range(2):
                pipes += os.pipe()
        except OSError:
            for descriptor in (*pipes, self._board_descriptor):
                os.close(descriptor)
            self.close()
            raise
        output, output_theirs, errors, errors_theirs = pipes
        return [self._theirs.detach(), self._board_descriptor, output_theirs, errors_theirs], (output, errors)

    def started(self, pid: int, on_exit: Callable[["Worker"], None]) -> None:
        """Note that the worker's process exists; `on_exit` is called when it has ended."""
        self.pid = pid
        try:
            self._end = ChildEnd(pid)
        except ProcessLookupError:
            raise
        except OSError:  # Too many files are open.
            asyncio.get_running_loop().call_later(_LOOK_S, self.started, pid, on_exit)
            return
        self._channel.open()
        self._await_adoption(on_exit)
        if self.doomed:
            self.kill()
        elif self._signal_due:
            self.send_signal(self._signal_due)

    def _await_adoption(self, on_exit: Callable[["Worker"], None]) -> None:
        # The agent can reap the worker only after the process that forked it has ended, which it does at once.
        if self.pid is None or self._end is None:
            return
        loop = asyncio.get_running_loop()
        try:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            loop.call_later(_ADOPTION_S, self._await_adoption, on_exit)
        else:
            self._follow(self._end, on_exit)

    def _follow(self, end: ChildEnd, on_exit: Callable[["Worker"], None]) -> None:
        loop = asyncio.get_running_loop()
        if end.descriptor is not None:
            loop.add_reader(end.descriptor, on_exit, self)
            return

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # The loop may be closed already.
                loop.call_soon_threadsafe(on_exit, self)

        try:
            end.watch(wake)
        except RuntimeError:  # No thread can be started now.
            loop.call_later(_LOOK_S, self._follow, end, on_exit)

    def rank_in(self, generation: Generation) -> Rank:
        """The worker's rank in a generation; it may enter a new one before it has reported everything of the last."""
        since = max((known for known in self._ranks if known <= generation), default=min(self._ranks))
        return self._ranks[since]

    @property
    def step(self) -> StepNo:
        """The step that the worker's board shows."""
        reading = self.board.read()
        return StepNo(reading.step) if reading.beats else NO_STATE

    @property
    def stopped(self) -> bool:
        """True if the worker's process is stopped (SIGSTOP)."""
        stat = None if self.pid is None else stat_of(self.pid)
        return stat is not None and stat.state in ("T", "t")

    def order(self, order: WorkerOrder) -> None:
        """Send an order to the worker, and note its changes to the worker's place."""
        match order:
            case orders.StartScript() | orders.FormGeneration():
                self.rank, self.local_rank = order.rank, order.local_rank
                self.generation = order.generation
                self._ranks[order.generation] = order.rank
                if len(self._ranks) > _RANKS_KEPT:
                    del self._ranks[min(self._ranks)]
                self.shown = True
            case orders.HaltGeneration(at=None) if order.generation >= self.generation and all(
                bell := self.board.read_bell()
            ):
                asyncio.get_running_loop().call_later(RING_S, self._ring, bell)
        try:
            self._channel.send(order)
        except ProtocolError as error:
            self._distrust(error)

    def _ring(self, bell: tuple[int, ...]) -> None:
        """Abort the groups of a worker that has not begun to halt on order, because a thread there keeps the GIL."""
        if self._end is None or self.stopped or self.board.read_bell() != bell:
            return
        if ring(self._end.pid, *bell):
            why = "something keeps Python's lock there, as an extension's launch into a full queue may"
            message = (
                "worker %s (rank %d) did not begin to halt within %.1f s, in %s of step %d: %s. Groups were aborted"
            )
            _log.warning(message, self.id, self.rank, RING_S, self.board.read().phase.name.lower(), self.step, why)

    def signal(self, number: int) -> None:
        """Signal the worker's process group, so that it may end by itself."""
        if self.pid is not None:
            signal_group(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL to all of the worker's processes; if it has no process yet, as soon as it has one."""
        self.doomed = True
        if self._end is not None:
            kill_worker(self._end)

    def send_signal(self, number: int) -> None:
        """Signal only the worker's own process, as soon as there is one, for a fault on demand."""
        if self._end is not None:
            self._end.signal(number)
        else:
            self._signal_due = number

    async def dump_stacks(self) -> None:
        """Order the worker to write its threads' stacks into its output; returns when done, or after a short time.

        Does nothing for a stopped worker, which cannot, and for an exiting one, which the signal would end.
        """
        if self.pid is None or self.stopped or not catches(self.pid, signal.SIGUSR2):
            return
        self.send_signal(signal.SIGUSR2)
        until = time.monotonic() + _DUMP_AT_MOST_S
        await asyncio.sleep(_DUMP_S)
        # On a busy machine the worker first has to wait for a processor.
        while is_in_signal(self.pid, signal.SIGUSR2) and time.monotonic() < until:
            await asyncio.sleep(_LOOK_S)

    def listen(self, on_dying: Callable[["Worker"], None]) -> None:
        """Have `on_dying` called as soon as the worker's end begins, if that can be detected. Call this regularly."""
        loop = asyncio.get_running_loop()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # The loop may be closed already.
                loop.call_soon_threadsafe(on_dying, self)

        self._pulse.listen(wake)

    def dying(self) -> tuple[int, Instant] | None:
        """The result that `reap` will have, if the worker's end has begun; else None. First handles late facts."""
        if self.pid is None or self._end is None:
            return None
        seen = time.monotonic()
        code = exit_code_of(self.pid)
        if code is None:
            return None
        signal_group(self.pid, signal.SIGKILL)
        self._channel.drain()
        self.left = self.board.read_own()
        return code, seen

    def reap(self) -> tuple[int, Instant]:
        """Reap the ended worker: exit code as from `waitpid`, and time of this call. Handles its last facts first."""
        if self.pid is None or self._end is None:
            return 0, time.monotonic()
        seen = time.monotonic()
        signal_group(self.pid, signal.SIGKILL)  # Before the worker's process id, which names the group, is free again.
        self._channel.drain()
        _, status = os.waitpid(self.pid, 0)
        self.shown_batch, self.left = self.board.read_batch(), self.board.read_own()
        self.close()
        return os.waitstatus_to_exitcode(status), seen

    def close(self) -> None:
        """Close the worker's pidfd, channel and board, when it has ended, was never forked, or is given up."""
        if self._end is not None:
            if self._end.descriptor is not None:
                asyncio.get_running_loop().remove_reader(self._end.descriptor)
            self._end.close()
            self._end = None
        self._pulse.close()
        self._channel.close()
        self._theirs.close()
        self.board.close()

    def _receive(self, fact: WorkerFact) -> None:
        if fact.worker != self.id:
            raise ProtocolError(f"it sent a message of worker {fact.worker}")
        match fact:
            case facts.WorkerStaged():
                before = [each for each in self.staged if (each.generation, each.step) != (fact.generation, fact.step)]
                self.staged = [*before[-1:], fact]
            case facts.WorkerHalted():
                fact = msgspec.structs.replace(fact, left=self.board.read_own())
            case facts.WorkerCommitted():
                self.committed = (fact.generation, fact.step)
        self._on_fact(self, fact)

    def _distrust(self, error: ProtocolError) -> None:
        if not self.doomed:
            _log.error("worker %s (rank %d) is ended: %s", self.id, self.rank, error)
        self.kill()
