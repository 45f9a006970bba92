"""The worker's end of the channel to its agent."""

import os
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from typing import ClassVar

import msgspec

from regrow.core.board import BOARD_FILE, Board
from regrow.core.config import WorkerEnv, inherited_environment
from regrow.core.early_reads import EarlyReads
from regrow.core.errors import AgentGone
from regrow.core.messages.unions import WorkerFact, WorkerOrder
from regrow.core.process.forks import hide_from_forks
from regrow.core.process.memory_file import is_memory_file
from regrow.core.process.priority import PromptThread
from regrow.core.process.stage_times import StageClock
from regrow.core.wire import BlockingChannel, FrameCodec


class WorkerLink:
    """A worker's connection to its agent: its description, the progress page, and the channel.

    Args:
        env: the agent's description of this worker.
        sock: the connected channel; the link owns it.
        board: the progress page.
    """

    _current: ClassVar["WorkerLink | None"] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, env: WorkerEnv, sock: socket.socket, board: Board) -> None:
        self.env = env
        self.board = board
        self.failed = False
        """True once the script has ended with an error, so that it need not wait for others any more."""
        self.ended_badly = False
        """True once the script has exited with another code than 0, or was interrupted."""
        self.advice: Callable[[], str] = lambda: ""
        """Returns advice by which an excused error would not end the script."""
        self.excused: Callable[[], bool] = lambda: False
        """Returns True if a fault elsewhere may have caused an error of the script."""
        self.failing: Callable[[BaseException], None] = lambda error: None
        """Ends this process if the script's error shows that its accelerator has failed."""
        self.early = EarlyReads()
        """The script's reads of its place before its loop."""
        self.modules = frozenset(sys.modules)
        """Modules imported before the script began."""
        self.environment = inherited_environment()
        """The environment before the script began."""
        self.prompt: PromptThread | None = None
        """Thread for work that others wait for, if this process has low priority; None: all work is prompt."""
        self.stages = StageClock()
        """Times of this worker's stages up to its loop."""
        self.pid = os.getpid()
        """Process that may use this link; forks of the process may not."""
        self._gone = self._closed = False
        codec: FrameCodec[WorkerOrder] = FrameCodec(WorkerOrder)
        self._channel = BlockingChannel(sock, codec)
        self._orders = self._until_gone()
        hide_from_forks(self)

    @classmethod
    def current(cls) -> "WorkerLink | None":
        """The link of this process; None if no agent started the process (a plain script, a loader, a subprocess).

        Raises `AgentGone` if the script has closed the channel.
        """
        with cls._lock:
            link = cls._current
            if link is not None:
                if link.pid != os.getpid():
                    return None
                link.check()
                return link
            env = WorkerEnv.read()
            if env is None or not _descriptors_are_ours(env):
                return None
            cls._current = cls(env, socket.socket(fileno=env.channel), Board.attach(env.board))
            return cls._current

    @property
    def gone(self) -> bool:
        """True if the agent has closed the channel."""
        return self._gone

    def check(self) -> None:
        """Raise `AgentGone` if the script has closed the channel, whose descriptor may be another file by now."""
        if not self._closed and (number := self._channel.replaced) is not None:
            raise AgentGone(
                f"the script has closed descriptor {number}, which connects worker {self.env.worker} to its agent",
                hint="close only the descriptors that the script has opened: os.closerange(3, ...) closes others too",
            )

    def complain(self) -> None:
        """Write a message to the output if the agent only seems gone because the script has closed the channel."""
        try:
            self.check()
        except AgentGone as closed:
            sys.stderr.write(f"regrow: {closed}\n")
            sys.stderr.flush()

    def take_place(self, env: WorkerEnv) -> None:
        """Take another rank or role from now on."""
        self.env = env

    def send(self, fact: WorkerFact) -> None:
        """Send a fact to the agent, from any thread. Raises `AgentGone`."""
        if os.getpid() != self.pid:
            raise AgentGone(
                f"process {os.getpid()} is a fork of worker {self.env.worker} and cannot send messages for it",
                hint="pass the data to the worker's process, which can send it",
            )
        self.check()
        try:
            self._channel.send(fact)
        except OSError as error:
            self._gone = True
            raise AgentGone(
                f"worker {self.env.worker} cannot send {type(fact).__name__} to its agent: {error}",
                hint="the agent of this node has ended; this worker should end too",
            ) from error

    def orders(self) -> Iterator[WorkerOrder]:
        """Blocking iterator over orders; ends when the agent has gone. Each call continues where the last one stopped.

        Only one thread may use it at a time.
        """
        return self._orders

    def _until_gone(self) -> Iterator[WorkerOrder]:
        try:
            yield from self._channel.messages()
        except OSError as error:
            raise AgentGone(f"the channel of worker {self.env.worker} broke: {error}") from error
        finally:
            self._gone = True

    def let_go(self) -> None:
        """Release the channel in a process that the worker has forked, as that process is no worker."""
        self._gone = self._closed = True
        self._channel.let_go()
        self.board.let_go()

    def close(self) -> None:
        """Close both ends; a blocked `orders` ends."""
        self._closed = True
        self._channel.close()
        self.board.close()


def placed(env: WorkerEnv, **changes: object) -> WorkerEnv:
    """The description of the same worker with some fields changed."""
    return msgspec.structs.replace(env, **changes)


def _descriptors_are_ours(env: WorkerEnv) -> bool:
    # A subprocess of a worker inherits the variable but not the descriptors, whose numbers may be other files there.
    try:
        is_socket = stat.S_ISSOCK(os.fstat(env.channel).st_mode)
        return is_socket and is_memory_file(env.board, BOARD_FILE)
    except OSError:
        return False
