"""Restarts all nodes of a job one after the other while it trains, for new drivers, kernels or images.

The ranks of a node move to a spare node, the operator's command restarts the node, and then it is the next spare.
A file lists the finished nodes, so that an interrupted rolling restart continues where it stopped.
"""

import contextlib
import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from regrow.core.errors import CoordinatorGone, DeadlineExceeded, RegrowError, UsageError
from regrow.core.exit_codes import REFUSED
from regrow.core.ids import NodeId, Seconds
from regrow.membership.orders import AnswerScale
from regrow.membership.server.requests import MoveRequest
from regrow.membership.view import JobView, NodeView

PROGRESS_FILE = "rolling-restart.json"
_LOOK_S: Seconds = 0.5
_TOO_LATE = 124
_END_S: Seconds = 10.0
"""Time for the kernel to end a command that was killed."""
"""Exit code for a command that took too long; the command `timeout` uses the same."""
_SETTLE_S: Seconds = 2.0
"""A returned node must be present for this long before it counts as back."""


class RestartProgress(msgspec.Struct, frozen=True):
    """Contents of the progress file. `done`: nodes that are finished. `wanted`: nodes that were named; empty: all."""

    done: list[NodeId] = []
    wanted: list[NodeId] = []


class AskedJob(Protocol):
    """The part of `CoordinatorClient` that a rolling restart needs."""

    def status(self) -> JobView:
        """The job's present state."""
        ...

    def move(self, request: MoveRequest) -> AnswerScale:
        """Ask for ranks to be moved."""
        ...


class RollingRestart:
    """Restarts nodes one after the other.

    Args:
        job: makes a client of the job; called before each request, as the coordinator may have moved.
        file: the progress file.
        restart: restarts a node; returns an exit code once the restart is under way.
        say: prints a line of progress.
        patience: seconds for a node's ranks to leave, and again for the node to be back.
    """

    def __init__(
        self,
        job: Callable[[], AskedJob],
        file: Path,
        *,
        restart: Callable[[NodeView], int],
        say: Callable[[str], None],
        patience: Seconds,
    ) -> None:
        self._job, self._file, self._restart, self._say, self._patience = job, file, restart, say, patience

    def run(self, wanted: Sequence[NodeId] = (), *, again: bool = False) -> int:
        """Restart all nodes, nodes without ranks first; returns the exit code.

        Args:
            wanted: only these, in this order.
            again: ignore the progress file and begin with the first.

        Raises:
            UsageError: the job has no such node.
        """
        before, nodes = RestartProgress() if again else self._read(), self._order(wanted)
        done = [node for node in before.done if node in nodes and before.wanted == [*wanted]]
        if done:
            self._say(f"goes on: {', '.join(done)} done before")
        for node in [node for node in nodes if node not in done]:
            try:
                problem = self._one(node, f"{len(done) + 1} of {len(nodes)}: {node}")
            except KeyboardInterrupt:
                self._say(f"{node}: stopped, run it again to go on here")
                raise
            if problem:
                self._say(f"{node}: {problem}; stopped, run it again to go on here")
                return REFUSED
            done = [*done, node]
            self._write(RestartProgress(done, [*wanted]))
        self._file.unlink(missing_ok=True)
        self._say(f"all {len(nodes)} nodes are restarted")
        return 0

    def _order(self, wanted: Sequence[NodeId]) -> list[NodeId]:
        view = self._job().status()
        there = [node.node for node in view.nodes if not node.left]
        if strange := [node for node in wanted if node not in there]:
            hint = f"its nodes are: {', '.join(there)}"
            raise UsageError(f"this job has no node {', '.join(strange)}", hint=hint)
        busy = {worker.node for worker in view.ranks}
        return list(wanted) or sorted(there, key=lambda node: node in busy)

    def _one(self, node: NodeId, title: str) -> str:
        """Restart one node; returns the reason if the restart failed, else an empty string."""
        began = time.monotonic()
        view = self._empty(node)
        if isinstance(view, str):
            return view
        self._say(f"{title} has no ranks after {time.monotonic() - began:.1f} s; it is restarted")
        if code := self._restart(view):
            return f"the command ended with {code}"
        if problem := self._back(view):
            return problem
        self._say(f"{title} is back after {time.monotonic() - began:.1f} s")
        return ""

    def _empty(self, node: NodeId) -> NodeView | str:
        """Move the ranks of a node away; returns the node, or the reason if ranks remain or the node has left."""
        until, refusal = time.monotonic() + self._patience, ""
        while time.monotonic() < until:
            view = self._status()
            if view is not None and node not in {worker.node for worker in view.ranks}:
                there = (each for each in view.nodes if each.node == node and not each.left)
                return next(there, "it has left the job")
            if view is not None:
                # A refusal may be temporary: workers that leave the former node still hold their slots.
                answer, known = self._ask(node), refusal
                refusal = "" if answer is None or answer.accepted else answer.reason
                if refusal not in ("", known):
                    self._say(f"{node}: waits, {self._patience:g} s at most: {refusal}")
            time.sleep(_LOOK_S)
        return refusal or f"its ranks have not left it within {self._patience:g} s"

    def _back(self, before: NodeView) -> str:
        """Wait for a node to leave and return; returns the reason if it is not back, else an empty string.

        The command may return before the node goes down, and the loss may be detected late: a node that was never seen
        away and still has its former agent has not restarted yet.
        """
        until, since, gone = time.monotonic() + self._patience, None, False
        while (now := time.monotonic()) < until:
            job = self._status()
            view = None if job is None else next((each for each in job.nodes if each.node == before.node), None)
            if view is not None:
                gone = gone or view.away or view.left or bool(before.agent and view.agent not in ("", before.agent))
            here = gone and view is not None and not view.away and not view.draining
            since = (now if since is None else since) if here else None
            if since is not None and now - since >= _SETTLE_S:
                return ""
            time.sleep(_LOOK_S)
        if gone:
            return f"it was not back within {self._patience:g} s"
        return (
            f"the command has ended with 0, but within {self._patience:g} s the node neither left the job nor came anew"
        )

    def _status(self) -> JobView | None:
        """The job's state; None if no coordinator answers at the moment, as during an election."""
        try:
            return self._job().status()
        except (CoordinatorGone, DeadlineExceeded):
            return None

    def _ask(self, node: NodeId) -> AnswerScale | None:
        try:
            return self._job().move(MoveRequest(node, reason="regrow rolling-restart"))
        except (CoordinatorGone, DeadlineExceeded):
            return None
        except UsageError as error:
            return AnswerScale(False, str(error))

    def _read(self) -> RestartProgress:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=RestartProgress)
        except FileNotFoundError:
            return RestartProgress()
        except msgspec.MsgspecError as error:
            raise UsageError(f"{self._file} is not understood: {error}", hint="give --again to begin anew") from error

    def _write(self, progress: RestartProgress) -> None:
        temporary = self._file.with_suffix(".new")
        try:
            temporary.write_bytes(msgspec.json.encode(progress))
            temporary.replace(self._file)
        except OSError as error:
            raise RegrowError(f"{self._file} cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Let no other rolling restart of the job run here within this context. Raises `UsageError` if one runs."""
    with contextlib.ExitStack() as held:
        held.callback(os.close, descriptor := os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            hint = "wait for it, or stop it with Ctrl-C"
            raise UsageError("another rolling restart of this job is under way", hint=hint) from None
        yield


_GUARDED = '((read -r _ <"/proc/self/fd/$1" || kill -9 0) >/dev/null 2>&1 &); exec sh -c "$0"'
"""Runs command $0 beside a guard that kills its process group if pipe $1 is closed without a line, by any death."""


def commanded(command: str, environment: Mapping[str, str], *, within: Seconds) -> Callable[[NodeView], int]:
    """Make a restart function from a shell command, which gets the node in `REGROW_NODE` and `REGROW_HOST`.

    The command's process group is killed after `within` seconds, and when the rolling restart ends before it.
    """

    def restart(node: NodeView) -> int:
        reported = {**environment, "REGROW_NODE": str(node.node), "REGROW_HOST": node.host}
        reads, writes = os.pipe()
        words = ["sh", "-c", _GUARDED, command, str(reads)]
        with (
            open(reads, "rb"),
            subprocess.Popen(words, env=reported, start_new_session=True, pass_fds=[reads]) as process,
            open(writes, "wb", buffering=0) as alive,
        ):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=within)
                alive.write(b"\n")
                return process.returncode
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_END_S)
            process.returncode = process.returncode or _TOO_LATE  # Wait no longer: another user's command may live on.
            return _TOO_LATE

    return restart
