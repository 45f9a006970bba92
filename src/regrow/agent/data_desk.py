"""The agent's part in training data: it holds the cache of its node, and has producers fill it.

It never looks into an entry: who reads one checks it.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from regrow.agent.data_door import DataDoor
from regrow.agent.data_folder import DataFolder
from regrow.agent.data_warming import warm
from regrow.agent.output import OutputPump
from regrow.agent.producers import Producers
from regrow.agent.requests import SpawnRequest
from regrow.core.config import AgentConfig
from regrow.core.data_messages import PEERS_FILE, DataNoted, PeerList, PlaceData, ProducerWanted
from regrow.core.errors import UsageError
from regrow.core.ids import Generation, Seconds, WorkerId
from regrow.core.messages import ErrorReport, SpawnWorker

_END_S: Seconds = 1.0
_log = logging.getLogger("regrow.agent")


class DataDesk:
    """The cache of one node: its folder, its producers, its door to other nodes.

    Args:
        config: of the agent; without `data_dir` there is nothing to do.
        output: takes what producers print.
        request: what the zygote is asked for to get a worker in this place.
        spawn: asks the zygote.
        tell: takes what the coordinator should know.
        bury: told of a process that has ended: what it started is to end too.
    """

    def __init__(
        self,
        config: AgentConfig,
        *,
        output: OutputPump,
        request: Callable[[SpawnWorker], SpawnRequest],
        spawn: Callable[[SpawnRequest, list[int]], None],
        tell: Callable[[DataNoted], None],
        bury: Callable[[int], None],
    ) -> None:
        self._config = config
        self._tell = tell
        self._producers = Producers(config, output=output, request=request, spawn=spawn, note=self._note, bury=bury)
        self._folder: DataFolder | None = None
        self._door: DataDoor | None = None
        self._warming: asyncio.Task[None] | None = None

    @property
    def pids(self) -> list[int]:
        """The processes of the producers."""
        return self._producers.pids

    async def open(self) -> str:
        """Take the folder over; returns where other nodes find its entries, empty where nobody would look."""
        config = self._config
        if not config.data_dir:
            return ""
        try:
            self._folder = DataFolder.share(Path(config.data_dir))
        except OSError as error:
            why = error.strerror or error
            _log.warning("%s has no data cache: %s cannot be used: %s", config.node, config.data_dir, why)
            return ""
        if config.facts.node_limit == 1:
            return ""
        door = DataDoor(config)
        try:
            endpoint = await door.open()
        except (OSError, UsageError) as error:
            _log.warning("the data cache of %s is closed to other nodes: %s", config.node, error)
            return ""
        self._door = door
        return endpoint

    async def close(self) -> None:
        """End the producers and hang up on other nodes. May be called twice."""
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.wait({self._warming}, timeout=_END_S)
        await self._producers.close()
        if self._door is not None:
            await self._door.close()
            self._door = None

    def remove(self) -> None:
        """Remove the folder, when no process uses it any more."""
        folder, self._folder = self._folder, None
        if folder is not None:
            try:
                folder.remove()
            except OSError as error:
                _log.warning("the data cache %s cannot be removed: %s", folder.path, error)

    def wanted(self, fact: ProducerWanted, generation: Generation) -> None:
        """A worker of this node reads from this loader."""
        if self._folder is not None:
            self._producers.wanted(fact.loader, generation)

    def spawned(self, worker: WorkerId, pid: int) -> bool:
        """The zygote forked it; False where it is no producer."""
        return self._producers.spawned(worker, pid)

    def spawn_failed(self, worker: WorkerId, error: ErrorReport) -> bool:
        """There is no process; False where it is no producer."""
        return self._producers.spawn_failed(worker, error)

    def place(self, order: PlaceData) -> None:
        """Where this node's producers find entries, and leave them, from now on."""
        if self._folder is None:
            return
        listed = PeerList(order.mirror, self._config.data_mirror if order.mirror else 0, order.peers)
        path = self._folder.path / PEERS_FILE
        draft = path.with_suffix(".new")
        try:
            draft.write_bytes(msgspec.json.encode(listed))
            draft.replace(path)
        except OSError as error:
            _log.warning("%s cannot be written, so entries of other nodes are not used: %s", path, error)

        if order.mirror and self._warming is None:
            self._warming = asyncio.create_task(self._warm(order.mirror))

    async def _warm(self, mirror: str) -> None:
        """At the start of a job there is nothing to fetch. Where this agent replaces a lost one there is."""
        with contextlib.suppress(asyncio.CancelledError):
            if fetched := await warm(self._config, mirror):
                self._note(
                    f"{self._config.node} starts warm: {fetched} entries of its data cache came from another node"
                )

    def _note(self, text: str) -> None:
        self._tell(DataNoted(self._config.node, text))
