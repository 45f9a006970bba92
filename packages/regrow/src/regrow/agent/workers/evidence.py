"""The kernel's evidence on workers that make no progress: whether stopped or computing, and where they wait."""

import os
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from regrow.agent.workers.processes import processor_times
from regrow.core.ids import Seconds, WorkerId

_TEXT_BYTES = 256


class Evidence(NamedTuple):
    """One observation of a worker. `state`: of its main thread, one letter as in `/proc/<pid>/stat`.

    `cpu`: seconds used by the worker's processes so far, with loaders and subprocesses. `blocked`: place of its wait.
    """

    state: str
    cpu: Seconds
    blocked: str = ""


class Watched(Protocol):
    """A worker; `pid` is None before it has a process."""

    id: WorkerId
    pid: int | None


def evidence(workers: Iterable[Watched]) -> dict[WorkerId, Evidence]:
    """Evidence on those of these workers that have a process. Each worker leads its own session."""
    pids = {worker.id: worker.pid for worker in workers if worker.pid is not None}
    states: dict[int, str] = {}
    used = dict.fromkeys(pids.values(), 0.0)
    for pid, session, state, cpu in processor_times():
        if session in used:
            used[session] += cpu
        if pid in used:
            states[pid] = state
    return {
        worker: Evidence(states[pid], used[pid], _blocked(pid, states[pid]))
        for worker, pid in pids.items()
        if pid in states
    }


def _blocked(pid: int, state: str) -> str:
    if state in ("R", "T", "t"):
        return ""
    where = _read(f"/proc/{pid}/wchan").strip("\0\n ")
    if where not in ("", "0"):
        return where
    number = _read(f"/proc/{pid}/syscall").partition(" ")[0]
    return f"system call {number}" if number.strip().isdigit() else ""


def _read(path: str) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(descriptor, _TEXT_BYTES).decode("ascii", "replace")
    except OSError:
        return ""  # The kernel shows this only to some users.
    finally:
        os.close(descriptor)
