"""An agent that cannot be started: tried again while something is short, else told at once."""

import errno
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from tests.unit.agent.test_agent_environment import config

from regrow.core.config import AgentConfig
from regrow.core.errors import UsageError
from regrow.core.ids import NodeId, StepNo
from regrow.launch import agent_supervisor
from regrow.launch.agent_supervisor import AgentSupervisor, NodeAgents, Outlook
from regrow.launch.cache import CacheHome, CachePlan
from regrow.launch.child import AgentProcess
from regrow.launch.console import Console


class _Done:
    """An agent that ends as it was ordered to."""

    obeyed = True
    running = False
    pid = 0

    async def wait(self) -> str:
        return "ended with exit code 0"


class _Agents(NodeAgents):
    failures: Iterator[BaseException | None]
    said: list[str]

    async def start(self, config: AgentConfig) -> AgentProcess:
        if (failure := next(self.failures)) is not None:
            raise failure
        return _Done()  # type: ignore[return-value]

    async def bury(self, agent: AgentProcess) -> None:
        return None


def supervisor(*failures: BaseException | None) -> tuple[AgentSupervisor, list[str]]:
    said: list[str] = []
    speaker = Console()
    speaker.say = said.append  # type: ignore[method-assign, assignment]
    agents = _Agents([], speaker, CacheHome(CachePlan(), 1, speaker))
    agents.failures = itertools.chain(failures, itertools.repeat(None))

    async def ask(_: NodeId) -> Outlook:
        return Outlook(StepNo(0), leaving=False)

    return AgentSupervisor(agents, config(), ask), said


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_supervisor, "_AGAIN_S", 0.001)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EAGAIN, errno.ENOSPC, errno.ENOMEM])
async def test_what_is_short_is_waited_for_and_said_once(number: int) -> None:
    keeper, said = supervisor(OSError(number, "short"), OSError(number, "short"))
    left = await keeper.keep()
    assert left.how == "ended with exit code 0"
    assert len(said) == 1 and "cannot be started now" in said[0]


@pytest.mark.parametrize("failure", [OSError(errno.EPERM, "refused"), UsageError("no way", hint="another")])
async def test_a_refusal_is_told_at_once(failure: Any) -> None:
    keeper, _ = supervisor(failure)
    left = await keeper.keep()
    assert not left.given_back
    assert left.how.startswith("cannot be started: ")


async def test_what_stays_short_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_supervisor, "_PASSES_S", 0.0)
    keeper, _ = supervisor(*(OSError(errno.EMFILE, "Too many open files") for _ in range(1000)))
    left = await keeper.keep()
    assert "Too many open files" in left.how
