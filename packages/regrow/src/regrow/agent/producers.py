"""The processes that make batches in advance for the workers of this node: one for each cached loader.

A producer is forked and watched like a worker but is not part of the training: the coordinator does not know of it, and
only this module handles its end. Meanwhile workers that read from its loader make the batches themselves.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from regrow.agent.output import OutputPump
from regrow.agent.workers.worker import Worker
from regrow.agent.workers.zygote_messages import SpawnRequest
from regrow.core.config import AgentConfig
from regrow.core.exit_codes import exit_text
from regrow.core.ids import Generation, Instant, Rank, Seconds, WorkerId
from regrow.core.messages import facts, orders
from regrow.core.messages.data import ProducerServed, ProducerSettings, producer_given_up
from regrow.core.messages.unions import WorkerFact
from regrow.core.messages.vocabulary import ErrorReport, Role, Warmth

DEATHS = 3
"""After this many deaths in a row without an entry, no further producer is started."""
MOST = 8
"""Largest number of loaders with a producer, each of which is a process."""
_FIRST_PAUSE_S: Seconds = 0.1
_LONGEST_PAUSE_S: Seconds = 10.0
_LONG_LIFE_S: Seconds = 30.0
"""A producer that lived this long is replaced at once; after a shorter life there is a pause, which grows."""
_LOG_S: Seconds = 0.3
"""Time after a producer's end by which its last output is in its log."""
_TAIL_BYTES = 4096
_END_S: Seconds = 2.0
_log = logging.getLogger("regrow.agent")


@dataclass
class _Producer:
    """The producer of one loader, or its successor."""

    loader: int
    generation: Generation
    worker: Worker | None = None
    count: int = 0
    deaths: int = 0
    """Number of deaths in a row without an entry."""
    served: bool = False
    started: Instant = 0.0
    pause: Seconds = _FIRST_PAUSE_S
    error: str = ""
    """Error with which the producer's script ended."""
    over: bool = False


class Producers:
    """Starts, watches, replaces and gives up producers. Everything runs in the agent's loop.

    Args:
        config: configuration of the agent.
        output: receives their output, for a file of each.
        request: makes the zygote's request for a worker with this order.
        spawn: sends a request to the zygote.
        note: reports a note for people.
        bury: called with the id of an ended process, to end its child processes too.
    """

    def __init__(
        self,
        config: AgentConfig,
        *,
        output: OutputPump,
        request: Callable[[orders.SpawnWorker], SpawnRequest],
        spawn: Callable[[SpawnRequest, list[int]], None],
        note: Callable[[str], None],
        bury: Callable[[int], None],
    ) -> None:
        self._config = config
        self._output = output
        self._request = request
        self._spawn = spawn
        self._note = note
        self._bury = bury
        self._by_loader: dict[int, _Producer] = {}
        self._by_worker: dict[WorkerId, _Producer] = {}
        self._closing = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the producers."""
        workers = [producer.worker for producer in self._by_worker.values()]
        return [worker.pid for worker in workers if worker is not None and worker.pid is not None]

    def wanted(self, loader: int, generation: Generation) -> None:
        """Start a producer for a loader from which a worker of this generation reads, if there is none."""
        if loader in self._by_loader or self._closing:
            return
        self._by_loader[loader] = producer = _Producer(loader, generation)
        if len(self._by_loader) > MOST:
            self._give_up(producer, f"{MOST} other loaders have producers, and no more are started")
        else:
            self._start(producer)

    def spawned(self, name: WorkerId, pid: int) -> bool:
        """Take the zygote's report that it has forked a process; False if this is no producer."""
        producer = self._by_worker.get(name)
        if producer is None or producer.worker is None:
            return False
        self._output.head(name, f"producer {name} of loader {producer.loader}, pid {pid}")
        producer.started = time.monotonic()
        producer.worker.started(pid, self._ended)
        return True

    def spawn_failed(self, name: WorkerId, error: ErrorReport) -> bool:
        """Take the zygote's report that it could not fork a process; False if this was to be no producer."""
        producer = self._by_worker.pop(name, None)
        if producer is None or producer.worker is None:
            return False
        producer.worker.close()
        producer.worker = None
        self._output.keep(name, error.traceback)
        self._output.finish(name)
        self._give_up(producer, f"it cannot be started: {error.message}")
        return True

    async def close(self) -> None:
        """End all producers; returns when they have been reaped. May be called twice."""
        self._closing = True
        for producer in list(self._by_worker.values()):
            if producer.worker is not None:
                producer.worker.kill()
        deadline = time.monotonic() + _END_S
        while self.pids and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        for name, producer in list(self._by_worker.items()):
            if producer.worker is not None and producer.worker.pid is None:  # The producer was never forked.
                producer.worker.close()
                self._output.finish(name)
                del self._by_worker[name]

    # --- one producer ----------------------------------------------------------------------------------------------

    def _start(self, producer: _Producer) -> None:
        if self._closing:
            return
        config = self._config
        name = WorkerId(f"{config.node}.data{producer.loader}.{producer.count}")
        producer.count += 1
        producer.served, producer.error = False, ""
        order = orders.SpawnWorker(
            node=config.node,
            worker=name,
            role=Role.STANDBY,
            # A node that joined later has no place in the first world.
            rank=Rank(min(config.node_rank * config.spec.nproc, config.spec.world - 1)),
            local_rank=0,
            world=config.spec.world,
            generation=producer.generation,
            restarts=0,
            resume=False,
        )
        try:
            request = self._request(order)
            worker = Worker(order, on_fact=self._said)
            theirs, ours = worker.descriptors()
        except OSError as error:
            self._give_up(producer, f"its agent cannot start it: {error.strerror or error}")
            return
        producer.worker = worker
        self._by_worker[name] = producer
        self._output.add(name, None, ours, unranked=self._log_name(producer.loader), headed=True)
        env = msgspec.structs.replace(
            request.env,
            producer=ProducerSettings(producer.loader),
            warmth=Warmth.BUILT,
            checkpoint_dir=None,
            spec=msgspec.structs.replace(request.env.spec, buddy_every=0, digest_every=0),
        )
        self._spawn(msgspec.structs.replace(request, env=env), theirs)

    def _said(self, worker: Worker, fact: WorkerFact) -> None:
        producer = self._by_worker.get(worker.id)
        if producer is None:
            return
        match fact:
            case ProducerServed():
                producer.served, producer.deaths = True, 0
            case facts.WorkerFailed(error=error):
                producer.error = f"{error.type}: {error.message}"
                self._output.keep(worker.id, error.traceback)
            case _:
                _log.debug("producer %s sent %s, which is not used", worker.id, type(fact).__name__)

    def _ended(self, worker: Worker) -> None:
        code, at = worker.reap()
        producer = self._by_worker.pop(worker.id)
        producer.worker = None
        self._output.head(worker.id, f"producer {worker.id} ended with code {code}")
        self._output.finish(worker.id)
        if worker.pid is not None:
            self._bury(worker.pid)
        if self._closing:
            return
        loop = asyncio.get_running_loop()
        if code == 0 or (code > 0 and not producer.served):
            loop.call_later(_LOG_S, self._ended_itself, producer, code)
            return
        if not producer.served:
            producer.deaths += 1
        if producer.deaths >= DEATHS:
            self._give_up(producer, f"{DEATHS} in a row made no entry, the last one {exit_text(code)}")
            return
        lived = at - producer.started
        producer.pause = _FIRST_PAUSE_S if lived > _LONG_LIFE_S else min(_LONGEST_PAUSE_S, producer.pause * 2)
        loop.call_later(producer.pause, self._start, producer)

    def _ended_itself(self, producer: _Producer, code: int) -> None:
        """Give up a producer that had nothing to do or failed before it served, as the next one would do the same."""
        if not self._closing:
            self._give_up(producer, producer.error or self._last_words(producer.loader) or exit_text(code))

    def _give_up(self, producer: _Producer, why: str) -> None:
        if producer.over or self._closing:
            return
        producer.over = True
        try:
            Path(producer_given_up(self._config.data_dir, producer.loader)).write_text(why, encoding="utf-8")
        except OSError as error:
            _log.warning("cannot notify the workers that a producer was given up: %s", error)
        why = why.removeprefix("regrow: ").removeprefix("no batches are made ahead: ")
        self._note(
            f"no batches are made ahead for loader {producer.loader} on {self._config.node}, its workers make them "
            f"themselves: {why} (logs/{self._log_name(producer.loader)}.log)"
        )

    # --- its log ---------------------------------------------------------------------------------------------------

    def _log_name(self, loader: int) -> str:
        # With --local-nodes, the nodes of a job share the folder for logs.
        node = f"{self._config.node}-" if self._config.spec.node_limit > 1 else ""
        return f"producer-{node}{loader}"

    def _last_words(self, loader: int) -> str:
        path = Path(self._config.log_dir) / f"{self._log_name(loader)}.log"
        try:
            with path.open("rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        said = [line.strip() for line in lines if line.strip() and not line.startswith("=== ")]
        return said[-1] if said else ""
