"""Relay of the facts from this node's workers to other parts of the agent and to the coordinator."""

import time
from collections.abc import Callable

from regrow.agent.checkpoints.writer_client import WriterClient
from regrow.agent.committed_steps import CommittedSteps
from regrow.agent.node_data import NodeData
from regrow.agent.output import OutputPump
from regrow.agent.state_copies.store import CopyStore
from regrow.agent.workers.worker import Worker
from regrow.core.ids import NodeId, Seconds, WorkerId
from regrow.core.messages import facts
from regrow.core.messages.checkpoints import SnapshotForDisk
from regrow.core.messages.copies import SnapshotTaken, StateKept
from regrow.core.messages.data import OrderDeclared, ProducerServed, ProducerWanted
from regrow.core.messages.observations import StacksTaken
from regrow.core.messages.unions import AgentFact, WorkerFact


class WorkerFactRelay:
    """Passes workers' facts on to the part of the agent that needs them.

    Args:
        report: sends a fact to the coordinator.
        node: this node.
        ledger, data, copy_store, writer, output: each receives its own facts.
        step_took: called with the duration of each step.
    """

    def __init__(
        self,
        report: Callable[[AgentFact], None],
        *,
        node: NodeId,
        ledger: CommittedSteps,
        data: NodeData,
        copy_store: CopyStore,
        writer: WriterClient,
        output: OutputPump,
        step_took: Callable[[Seconds], None],
    ) -> None:
        self._report = report
        self._node = node
        self._ledger = ledger
        self._data = data
        self._copy_store = copy_store
        self._writer = writer
        self._output = output
        self._step_took = step_took
        self._commits: dict[WorkerId, facts.WorkerCommitted] = {}

    def received(self, worker: Worker, fact: WorkerFact) -> None:
        """Pass on a fact that a worker has sent."""
        match fact:
            case facts.WorkerStaged() | ProducerServed():
                pass  # `Worker` keeps the staged step, which counts only if others commit it and this worker dies.
            case OrderDeclared():
                self._ledger.stated(fact, time.monotonic())
            case ProducerWanted():
                self._data.wanted(fact, worker.generation)
            case SnapshotTaken():
                error = self._copy_store.snapshot_taken(fact, worker.pid or 0)
                if fact.asked:
                    self._report(StateKept(fact.worker, fact.step, error))
            case facts.WorkerCommitted():
                self._committed(worker, fact)
            case _ if worker.reported_exit:
                pass  # Another thread of the worker sent this before its end but after the report of its exit.
            case StacksTaken():
                self._output.keep(worker.id, fact.text)
            case SnapshotForDisk():
                self._writer.receive(fact, worker.pid)
            case facts.WorkerFailed(error=error):
                self._output.keep(worker.id, error.traceback)
                self._report(fact)
            case _:
                self._report(fact)

    def report_progress(self) -> None:
        """Report the newest commits since the last call. It must be called regularly."""
        if self._commits:
            self._report(facts.NodeProgress(self._node, list(self._commits.values())))
            self._commits.clear()

    def _committed(self, worker: Worker, fact: facts.WorkerCommitted) -> None:
        self._ledger.committed(fact, worker.rank if fact.rank is None else fact.rank)
        self._step_took(fact.seconds)
        if worker.announced != fact.generation and not worker.reported_exit:
            worker.announced = fact.generation
            self._report(fact)
        else:
            self._commits[worker.id] = fact
