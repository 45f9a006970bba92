"""The agent's part in training data: it owns the cache of its node and runs producers that fill it.

It never reads an entry; the readers check them.
"""

import logging
from collections.abc import Callable
from pathlib import Path

from regrow.agent.data_folder import DataFolder
from regrow.agent.output import OutputPump
from regrow.agent.producers import Producers
from regrow.agent.workers.zygote_messages import SpawnRequest
from regrow.core.config import AgentConfig
from regrow.core.ids import Generation, WorkerId
from regrow.core.messages import orders
from regrow.core.messages.data import DataNoted, ProducerWanted
from regrow.core.messages.vocabulary import ErrorReport

_log = logging.getLogger("regrow.agent")


class NodeData:
    """The data cache of one node: its folder and its producers.

    Args:
        config: configuration of the agent; without `data_dir` there is no cache.
        output: receives the producers' output.
        request: makes the zygote's request for a worker with this order.
        spawn: sends a request to the zygote.
        report: sends a fact to the coordinator.
        bury: called with the id of an ended process, to end its child processes too.
    """

    def __init__(
        self,
        config: AgentConfig,
        *,
        output: OutputPump,
        request: Callable[[orders.SpawnWorker], SpawnRequest],
        spawn: Callable[[SpawnRequest, list[int]], None],
        report: Callable[[DataNoted], None],
        bury: Callable[[int], None],
    ) -> None:
        self._config = config
        self._report = report
        self._producers = Producers(config, output=output, request=request, spawn=spawn, note=self._note, bury=bury)
        self._folder: DataFolder | None = None

    @property
    def pids(self) -> list[int]:
        """Process ids of the producers."""
        return self._producers.pids

    def open(self) -> None:
        """Start to use the folder. If it cannot be used, a warning is logged and there is no cache."""
        config = self._config
        if not config.data_dir:
            return
        try:
            self._folder = DataFolder.share(Path(config.data_dir))
        except OSError as error:
            why = error.strerror or error
            _log.warning("%s has no data cache: %s cannot be used: %s", config.node, config.data_dir, why)

    async def close(self) -> None:
        """End the producers. May be called twice."""
        await self._producers.close()

    def remove(self) -> None:
        """Remove the folder, which no process may use any more."""
        folder, self._folder = self._folder, None
        if folder is not None:
            try:
                folder.remove()
            except OSError as error:
                _log.warning("the data cache %s cannot be removed: %s", folder.path, error)

    def wanted(self, fact: ProducerWanted, generation: Generation) -> None:
        """Start a producer, if there is none, for a loader from which a worker of this node reads."""
        if self._folder is not None:
            self._producers.wanted(fact.loader, generation)

    def spawned(self, worker: WorkerId, pid: int) -> bool:
        """Take the zygote's report that it has forked a process; False if this is no producer."""
        return self._producers.spawned(worker, pid)

    def spawn_failed(self, worker: WorkerId, error: ErrorReport) -> bool:
        """Take the zygote's report that it could not fork a process; False if this was to be no producer."""
        return self._producers.spawn_failed(worker, error)

    def _note(self, text: str) -> None:
        self._report(DataNoted(self._config.node, text))
