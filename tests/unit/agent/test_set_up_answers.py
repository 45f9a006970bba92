"""Answers of the first workers are on two nodes, whichever agents are lost one after the other."""

import asyncio

import pytest

from regrow.agent.store.set_up_answers import SetUpAnswers
from regrow.core.errors import StoreNodeLost
from regrow.core.ids import Seconds
from regrow.core.messages.store import AnswersAsked, AnswersNoted, StoreMessage, StoreReply

BUILD = 1


class Agents:
    """The agents that there are, by address; who asks another reaches its answers at once."""

    def __init__(self) -> None:
        self.there: dict[str, SetUpAnswers] = {}
        self.silent = asyncio.Event()
        """Set once it is known of agents that are lost that they answer nothing."""
        self.silent.set()

    def start(self, address: str) -> SetUpAnswers:
        self.there[address] = SetUpAnswers(self)
        return self.there[address]

    async def ask(self, agent: str, request: StoreMessage, within: Seconds) -> StoreReply:
        await asyncio.sleep(0)
        if agent not in self.there:
            await self.silent.wait()
            raise StoreNodeLost(agent)
        if isinstance(request, AnswersNoted):
            self.there[agent].note(request)
            return StoreReply()
        assert isinstance(request, AnswersAsked)
        return self.there[agent].at_once(request) or StoreReply()

    def keep_only(self, agents: set[str]) -> None: ...

    async def stand(self, *addresses: str) -> None:
        """A generation has these agents; what follows from that is done."""
        self.there = {each: self.there[each] for each in addresses}
        for each in addresses:
            self.there[each].learn(each, addresses, world=4)
        for _ in range(50):
            await asyncio.sleep(0)

    def who_has(self, name: str) -> set[str]:
        asked = AnswersAsked(BUILD, 0, [name], 0.0, here=True)
        return {each for each, answers in self.there.items() if (answers.at_once(asked) or StoreReply()).also}


@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_agents_that_are_lost_one_after_the_other_take_nothing_with_them(nodes: int) -> None:
    async def play() -> None:
        agents, names = Agents(), [f"node{at}" for at in range(nodes)]
        for each in names:
            agents.start(each)
        agents.there["node0"].note(AnswersNoted(BUILD, 0, {"r0/end": b"rank 0's"}))
        await agents.stand(*names)
        assert len(agents.who_has("r0/end")) == 2
        for turn in range(3 * nodes):
            lost = turn % nodes
            names[lost] = f"node{lost} once more {turn}"
            agents.start(names[lost])
            await agents.stand(*names)
            assert len(agents.who_has("r0/end")) >= 2, f"after the loss of node{lost}"

    asyncio.run(play())


def test_a_copy_that_is_on_its_way_to_a_lost_agent_goes_to_another_where_a_generation_has_begun_since() -> None:
    async def play() -> None:
        agents = Agents()
        for each in ("node0", "node1", "node2"):
            agents.start(each)
        await agents.stand("node0", "node1", "node2")
        agents.silent.clear()
        del agents.there["node1"]
        agents.there["node0"].note(AnswersNoted(BUILD, 0, {"r0/end": b"rank 0's"}))
        for _ in range(50):
            await asyncio.sleep(0)
        await agents.stand("node0", "node2")
        assert agents.who_has("r0/end") == {"node0"}
        agents.silent.set()
        for _ in range(50):
            await asyncio.sleep(0)
        assert agents.who_has("r0/end") == {"node0", "node2"}

    asyncio.run(play())
