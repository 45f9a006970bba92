"""Keepers in one event loop, connected in memory: the agents of a job without its sockets."""

import asyncio
import random
from collections import Counter

from regrow.agent.store.store_node import StoreNode
from regrow.core.errors import StoreNodeLost
from regrow.core.ids import Generation, Seconds
from regrow.core.messages.store import StoreMessage, StoreReply, StoreRequest


class Net:
    """Agents in generation 1; every message takes a time of its own, and they overtake one another.

    Args:
        seed: of the times that messages take; None: no time at all.
    """

    def __init__(self, nodes: int, *, world: int | None = None, seed: int | None = None) -> None:
        self._chance = None if seed is None else random.Random(seed)
        self.asked: Counter[str] = Counter()
        self.dead: set[str] = set()
        self.keepers = {
            f"a{node}": StoreNode(f"a{node}", _Peers(self, f"a{node}"), alone=False) for node in range(nodes)
        }
        self.stores = list(self.keepers)
        for keeper in self.keepers.values():
            keeper.learn(Generation(1), self.stores, world or nodes)

    async def ask(self, node: int, request: StoreRequest) -> StoreReply:
        """As a worker of this node."""
        return await self._answered(f"a{node}", request, "")

    async def _answered(self, agent: str, request: StoreRequest, caller: str) -> StoreReply:
        """As the agent's door does it."""
        keeper = self.keepers[agent]
        return keeper.at_once(request, caller) or await keeper.carry_out(request, caller)

    async def carry(self, sender: str, agent: str, request: StoreMessage, within: Seconds) -> StoreReply:
        """From one agent to another and back."""
        await self._travel()
        if agent in self.dead or sender in self.dead:
            raise StoreNodeLost(f"{agent} has ended")
        self.asked[agent] += 1
        reply = await asyncio.wait_for(self._answered(agent, request, sender), within)  # type: ignore[arg-type]
        await self._travel()
        if agent in self.dead:
            raise StoreNodeLost(f"{agent} has ended")
        return reply

    async def _travel(self) -> None:
        if self._chance is not None:
            for _ in range(self._chance.randrange(8)):
                await asyncio.sleep(0)


class _Peers:
    def __init__(self, net: Net, own: str) -> None:
        self._net, self._own = net, own

    async def ask(self, agent: str, request: StoreMessage, within: Seconds) -> StoreReply:
        return await self._net.carry(self._own, agent, request, within)

    def keep_only(self, agents: set[str]) -> None:
        pass
