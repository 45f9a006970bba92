"""No more processes or threads: the errors that say so are told from others, with the cure."""

import asyncio
import errno
import os
import resource
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from regrow.agent.workers.tracebacks import report
from regrow.core.errors import RegrowError, passes
from regrow.core.process.shortage import short_of_processes
from regrow.launch.agent_supervisor import NodeAgents
from regrow.launch.child import AgentProcess

NO_THREAD = "can't start new thread"


def raised(work: Any) -> BaseException:
    with pytest.raises((OSError, RuntimeError)) as caught:
        work()
    return caught.value


def refuse(*_: Any, **__: Any) -> Any:
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def test_what_a_fork_and_a_thread_are_refused_with_is_told_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (7, 7))
    assert "this user may have 7 in all (ulimit -u)" in short_of_processes(RuntimeError(NO_THREAD))
    monkeypatch.setattr(subprocess, "_fork_exec", refuse)
    assert "(ulimit -u)" in short_of_processes(raised(lambda: subprocess.Popen(["true"])))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    told = short_of_processes(RuntimeError(NO_THREAD))
    assert "the container no more (pids.max)" in told and "ulimit" not in told


def test_a_socket_that_would_wait_and_other_errors_are_something_else() -> None:
    assert short_of_processes(raised(refuse)) == ""
    assert short_of_processes(RuntimeError("another")) == short_of_processes(FileNotFoundError("x")) == ""


def test_a_script_that_gets_no_thread_is_told_why() -> None:
    told = report(RuntimeError(NO_THREAD))
    assert "no more processes and threads can be started" in told.message
    assert told.traceback.endswith("raise the limit\n")


def test_an_agent_that_gets_no_thread_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(*_: Any) -> Any:
        raise RuntimeError(NO_THREAD)

    monkeypatch.setattr(AgentProcess, "start", start)
    agents = NodeAgents(["agent"], SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    with pytest.raises(RegrowError, match="no more processes and threads") as refused:
        asyncio.run(agents.start(SimpleNamespace()))  # type: ignore[arg-type]
    assert passes(refused.value)
