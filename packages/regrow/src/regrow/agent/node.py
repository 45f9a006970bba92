"""The agent: carries out the coordinator's orders on this node, and reports to it."""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from regrow.agent.checkpoints.writer_client import WriterClient, place_of
from regrow.agent.committed_steps import CommittedSteps, LastSeen, StepsFile
from regrow.agent.coordinator_link import CoordinatorLink
from regrow.agent.examiner import Examiner
from regrow.agent.held_tables import Feasible
from regrow.agent.log_tap import LogTap
from regrow.agent.metrics_site import NodeMetricsSite
from regrow.agent.node_workers import NodeWorkers
from regrow.agent.output import OutputPump
from regrow.agent.signals import Ending, NoticeSignals
from regrow.agent.state_copies.store import CopyStore
from regrow.agent.store.server import StoreServer
from regrow.agent.table_relay import TableRelay
from regrow.agent.worker_facts import WorkerFactRelay
from regrow.agent.workers.evidence import evidence
from regrow.agent.workers.fencing import end_children
from regrow.agent.workers.progress_watch import BoardView, Watcher
from regrow.core.background import Background
from regrow.core.config import AgentConfig
from regrow.core.errors import ProtocolError
from regrow.core.exit_codes import INTERNAL_ERROR
from regrow.core.ids import Instant, Seconds
from regrow.core.messages import facts, orders
from regrow.core.messages.checkpoints import AbandonCheckpoint, FinishCheckpoint, WriteCheckpoint
from regrow.core.messages.copies import ForgetCopies, PlaceCopies, ReportCopies, SnapshotStored
from regrow.core.messages.succession import ReportNode
from regrow.core.messages.tables import GenerationTable
from regrow.core.messages.vocabulary import FaultHow, FaultStage
from regrow.core.process.tasks import Tasks

_FLUSH_S: Seconds = 0.2
_END_S: Seconds = 5.0
_NOT_ACCEPTED = "socket.accept() out of system resource"
"""Message of asyncio when no file descriptor is free for a connection; asyncio retries by itself."""
_SIGNALS = {FaultHow.SIGKILL: signal.SIGKILL, FaultHow.SIGSTOP: signal.SIGSTOP}
_log = logging.getLogger("regrow.agent")


class Agent:
    """Agent of one node of a job.

    Args:
        config: the agent's whole configuration.
    """

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._tap = LogTap(config, report=lambda said: self._uplink.send(said))
        self._output = OutputPump(Path(config.log_dir), forward=config.forward_output, tap=self._tap)
        self._steps = StepsFile(Path(config.job_dir) / f"steps.{config.node}.jsonl")
        self._disk = Background("regrow-steps")
        self._ledger = CommittedSteps(self._steps)
        self._watcher = Watcher(config.node, config.spec.hang_bound, lambda: evidence(self._workers.watched()))
        self._store = StoreServer(config, lambda request: self._tables.answer(request))
        self._uplink = CoordinatorLink(config, self._fail)
        self._tables = TableRelay(
            config.node, do=self._carry_out, report=self._uplink.send, ask=self._store.peers.ask, start=self._start_task
        )
        self._copy_store = CopyStore(
            config,
            stored=lambda answer: self._from_thread(self._snapshot_stored, answer),
            streamed=lambda fact: self._from_thread(self._uplink.send, fact),
        )
        self._metrics = NodeMetricsSite(config, self._uplink.worker_states, lambda: self._copy_store.kept_bytes)
        self._writer = WriterClient(config.node, place_of(config), report=self._uplink.send)
        self._examiner = Examiner(config, report=self._uplink.send)
        self._workers = NodeWorkers(
            config,
            store=lambda: self._store.address,
            output=self._output,
            report=self._uplink.send,
            on_fact=lambda worker, fact: self._fact_relay.received(worker, fact),
            ended=self._worker_ended,
            others=lambda: (self._writer.pid, self._examiner.pid, self._tap.pid),
        )
        self._fact_relay = WorkerFactRelay(
            self._uplink.send,
            node=config.node,
            ledger=self._ledger,
            data=self._workers.data,
            copy_store=self._copy_store,
            writer=self._writer,
            output=self._output,
            step_took=self._watcher.step_took,
        )
        self._notice = NoticeSignals(config, self._uplink.send, self._end, self._workers.hold)
        self._ending: asyncio.Future[Ending] | None = None
        self._tasks = Tasks(self._fail)
        self._warned_at: Instant = -1.0

    async def run(self) -> int:
        """Serve until the job ends, this node is stopped, or the coordinator is lost. Returns the exit code."""
        loop = asyncio.get_running_loop()
        self._ending = loop.create_future()
        self._notice.open()
        loop.set_exception_handler(self._callback_failed)
        loop.add_signal_handler(signal.SIGCHLD, self._workers.sweep)
        self._output.start()
        self._tap.start()
        self._disk.start()
        self._workers.start()
        try:
            async with self._store, self._uplink, self._metrics:
                self._workers.data.open()
                self._uplink.register(store=self._store.address, copy_endpoint=self._copy_store.open())
                self._examiner.joined()
                self._writer.start()
                self._start_task(self._obey_all())
                self._start_task(self._watch())
                self._start_task(self._flush())
                ending = await self._ending
                await self._stop(ending)
                if ending.ordered:
                    self._uplink.send(facts.NodeStopped(self._config.node))
        finally:
            await self._clean_up()
        return ending.code

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.start(work, f"task {getattr(work, '__qualname__', work)}")

    def _callback_failed(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if context["message"] == _NOT_ACCEPTED:
            if (now := time.monotonic()) - self._warned_at >= 1.0:  # asyncio reports each waiting connection.
                self._warned_at = now
                _log.warning("a connection to this node has to wait: %s", context.get("exception"))
            return
        self._fail(context["message"], context.get("exception"))

    def _fail(self, place: str, error: BaseException | None) -> None:
        _log.error("the agent of node %s fails: %s", self._config.node, place, exc_info=error)
        self._end(Ending(INTERNAL_ERROR, 0.0, f"{place}: {error!r}"))

    def _from_thread(self, call: Callable[[Any], None], fact: object) -> None:
        if self._ending is not None:
            with contextlib.suppress(RuntimeError):  # The loop may be closed already.
                self._ending.get_loop().call_soon_threadsafe(call, fact)

    def _snapshot_stored(self, answer: SnapshotStored) -> None:
        if (worker := self._workers.get(answer.worker)) is not None and not worker.reported_exit:
            worker.order(answer)

    def _end(self, ending: Ending) -> None:
        if self._ending is not None and not self._ending.done():
            self._ending.set_result(ending)

    # --- orders --------------------------------------------------------------------------------------------------

    async def _obey_all(self) -> None:
        reason = "the connection to the coordinator was lost"
        try:
            async for order in self._uplink.orders():
                self._tables.obey(order)
        except ProtocolError as error:
            reason = str(error)
        self._end(Ending(1, 0.0, reason))

    def _carry_out(self, order: Feasible) -> None:
        self._uplink.carried_out(order)
        if isinstance(order, orders.FormGeneration | orders.NoteGeneration):
            self._ledger.formed(order.generation, order.step)
            self._copy_store.formed(order.step)
            self._examiner.formed(order)
        match order:
            case GenerationTable(head=head):
                self._store.generation_formed(head.generation, order.stores, head.world)
                return
            case orders.SpawnWorker() if self._ending is None or self._ending.done():
                _log.warning("worker %s is not spawned: this node ends", order.worker)
                return
            case orders.SpawnWorker():
                self._store.answers.learn(self._store.address, order.stores, order.world)
                self._store.spawned(order.generation)
                self._workers.spawn(order)
                return
            case orders.StopNode(reason=reason, grace=grace):
                self._end(Ending(0, grace, reason, ordered=True))
                return
            case orders.NoteGeneration() | ReportNode():
                return
            case WriteCheckpoint() | FinishCheckpoint() | AbandonCheckpoint():
                self._writer.obey(order)
                return
            case PlaceCopies():
                self._copy_store.place(order)
                return
            case ForgetCopies():
                self._copy_store.forget()
                return
            case ReportCopies():
                self._uplink.send(self._copy_store.report(order))
                return
        if (worker := self._workers.get(order.worker)) is None:
            if isinstance(order, orders.FenceWorker):
                self._workers.call_off(order.worker)
            _log.debug("%s is for worker %s, which has ended", type(order).__name__, order.worker)
            return
        match order:
            case orders.FenceWorker():
                self._start_task(self._workers.fence(worker, order))
            case orders.ArmFault(fault=fault) if fault.stage is FaultStage.NOW and fault.how in _SIGNALS:
                self._uplink.send(facts.FaultFired(worker.id, fault.fault, worker.step, time.monotonic()))
                worker.send_signal(_SIGNALS[fault.how])
            case orders.FormGeneration() | orders.StartScript():
                self._output.place(worker.id, order.rank)
                worker.order(order)
            case _:
                worker.order(order)

    def _worker_ended(self, last: LastSeen) -> None:
        self._ledger.died(last)
        self._copy_store.worker_ended(last.worker)

    # --- periodic tasks ------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._watcher.interval)
            alive = self._workers.watched()
            boards = {
                w.id: BoardView(w.board.read(), w.board.read_flight(), w.shown, w.board.read_counts) for w in alive
            }
            for worker in alive:
                worker.listen(self._workers.dying)
            with contextlib.suppress(OSError):  # No evidence can be read now; the next interval tries again.
                if (seen := self._watcher.look(boards, time.monotonic())) is not None:
                    self._uplink.send(seen)

    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(_FLUSH_S)
            self._disk.do(self._steps.flush)
            self._fact_relay.report_progress()
            self._tap.flush()

    # --- the end -------------------------------------------------------------------------------------------------

    async def _stop(self, ending: Ending) -> None:
        """End all workers and report their exits."""
        if not ending.ordered:
            _log.warning("node %s ends: %s", self._config.node, ending.reason)
        await self._workers.end(ending.grace)
        self._fact_relay.report_progress()

    async def _clean_up(self) -> None:
        self._tasks.cancel()
        await self._workers.close()
        self._copy_store.close()
        self._writer.close()
        self._examiner.close()
        self._tap.close()
        if left := end_children(within=_END_S):
            _log.error("these processes could not be ended: %s", left)
        self._ledger.end()
        self._disk.do(self._steps.flush)
        self._disk.close()
        self._output.close(within=2.0)
        # The launcher, which made the folder, removes it too unless it was killed.
        self._workers.data.remove()
