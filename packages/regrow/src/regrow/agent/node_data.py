"""The agent's part in training data: it holds the cache of its node, and has producers fill it.

It never looks into an entry: who reads one checks it.
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
    """The cache of one node: its folder and its producers.

    Args:
        config: of the agent; without `data_dir` there is nothing to do.
        output: takes what producers print.
        request: what the zygote is asked for to get a worker in this place.
        spawn: asks the zygote.
        report: takes what the coordinator should know.
        bury: told of a process that has ended: what it started is to end too.
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
        """The processes of the producers."""
        return self._producers.pids

    def open(self) -> None:
        """Take the folder over. Where it cannot be used, that is said, and there is no cache."""
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

    def _note(self, text: str) -> None:
        self._report(DataNoted(self._config.node, text))
