"""The agents that are the homes of each generation's keys, as one agent knows them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from regrow.agent.store.keys import generation_of
from regrow.agent.store.routing import home, next_hop
from regrow.core.errors import StoreRefusal
from regrow.core.ids import Generation, Seconds

_NEWS_S: Seconds = 30.0


@dataclass(frozen=True)
class Agents:
    """The agents of one generation, in the order of nodes. `own`: this agent's index; None if it is not among them."""

    stores: tuple[str, ...]
    world: int
    own: int | None


@dataclass(frozen=True)
class KeyRoute:
    """Route to a key on another agent: by way of agent `hop` to agent `home`."""

    hop: str
    home: str


class KeyOwnership:
    """The agents of the generations whose keys are kept.

    Args:
        address: address of this agent.
        alone: the job has only this agent, which keeps every key.
    """

    def __init__(self, address: str, *, alone: bool) -> None:
        self._address = address
        self._alone = alone
        self._oldest = Generation(0)
        self._agents: dict[Generation, Agents] = {}
        self._news: asyncio.Future[None] | None = None

    def learn(self, generation: Generation, stores: Sequence[str], world: int) -> None:
        """Enter the agents over which the keys of this generation are distributed; all agents enter the same."""
        if not stores:
            return
        own = stores.index(self._address) if self._address in stores else None
        self._agents[generation] = Agents(tuple(stores), world, own)
        self._announce()

    def drop_before(self, oldest: Generation) -> set[str]:
        """Forget earlier generations; returns the agents of the remaining ones."""
        self._oldest = max(oldest, self._oldest)
        self._agents = {known: agents for known, agents in self._agents.items() if known >= oldest}
        self._announce()
        return {store for agents in self._agents.values() for store in agents.stores}

    async def agents(self, key: str) -> Agents | None:
        """The agents over which the keys of this key's generation are distributed; None if this agent keeps it anyway.

        Waits a while for a generation that others may have entered already. Raises `StoreRefusal`.
        """
        generation = generation_of(key)
        if self._alone or generation is None:
            return None
        until = asyncio.get_running_loop().time() + _NEWS_S
        while (agents := self._agents.get(generation)) is None:
            left = until - asyncio.get_running_loop().time()
            if generation < self._oldest:
                raise StoreRefusal(f"the generation of {key!r} is over: the oldest kept is {self._oldest}")
            if left <= 0:
                raise StoreRefusal(
                    f"this node's agent has not received the generation of {key!r} within {_NEWS_S:.0f} s"
                )
            if self._news is None:
                self._news = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._news}, timeout=left)
        return agents

    def is_here(self, key: str) -> bool | None:
        """True if this agent keeps the key; None if its generation is not known yet, or not any more."""
        generation = generation_of(key)
        if self._alone or generation is None:
            return True
        agents = self._agents.get(generation)
        return None if agents is None else home(key, len(agents.stores), agents.world) == agents.own

    async def to(self, key: str) -> KeyRoute | None:
        """Route to the key; None if this agent keeps it. Raises `StoreRefusal`."""
        agents = await self.agents(key)
        if agents is None:
            return None
        nodes, stores = len(agents.stores), agents.stores
        root = home(key, nodes, agents.world)
        if root == agents.own:
            return None
        return KeyRoute(stores[next_hop(key, agents.own, nodes, agents.world)], stores[root])

    def _announce(self) -> None:
        if self._news is not None:
            self._news.set_result(None)
            self._news = None
