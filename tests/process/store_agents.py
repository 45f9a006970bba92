"""The stores of several agents, served from a thread, each as its own process would."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from tests.unit.agent.test_agent_environment import config

from regrow.agent.store.server import StoreServer
from regrow.comm.store import AgentStore
from regrow.core.ids import Generation

TOKEN = "t"
GENERATION = Generation(1)
Result = TypeVar("Result")


class Agents:
    """Agents that know one another."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.servers: list[StoreServer] = []

    def client(self, node: int, prefix: str = "g1/") -> AgentStore:
        """A store as a worker of that node has it."""
        return AgentStore(self.servers[node].address, TOKEN, prefix)

    def at(self, do: Callable[[], Result]) -> Result:
        """Run something in the agents' thread."""

        async def run() -> Result:
            return do()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(20.0)

    def stop(self, node: int) -> None:
        """End one agent, as its death would."""
        leaving = self.servers[node].__aexit__(None, None, None)
        asyncio.run_coroutine_threadsafe(leaving, self.loop).result(20.0)

    def form(self, generation: Generation) -> None:
        """All of them enter a generation."""
        stores = [server.address for server in self.servers]
        for server in self.servers:
            self.at(partial(server.generation_formed, generation, stores, 2 * len(stores)))


@contextmanager
def agents(folder: Path, count: int, *, local: bool = False) -> Iterator[Agents]:
    """Run `count` agents that have entered generation 1."""
    loop = asyncio.new_event_loop()
    made, ready, over = Agents(loop), threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with AsyncExitStack() as stack:
            for node in range(count):
                (folder / str(node)).mkdir()
                server = StoreServer(
                    config(job={"nodes": count}, bind="127.0.0.1", socket_dir=str(folder / str(node)), local=local)
                )
                made.servers.append(await stack.enter_async_context(server))
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert ready.wait(20.0)
        made.form(GENERATION)
        yield made
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(20.0)
        loop.close()
