"""Relay of the facts from this node's workers, to those who need them here and to the coordinator."""

import time
from collections.abc import Callable

from regrow.agent.checkpoints.writer_client import WriterClient
from regrow.agent.committed_steps import CommittedSteps
from regrow.agent.data_desk import DataDesk
from regrow.agent.output import OutputPump
from regrow.agent.state_copies.store import CopyStore
from regrow.agent.workers.worker import Worker
from regrow.core.ids import NodeId, Seconds, WorkerId
from regrow.core.messages import facts
from regrow.core.messages.checkpoints import SnapshotForDisk
from regrow.core.messages.copies import SnapshotTaken, StateKept
from regrow.core.messages.data import OrderDeclared, ProducerServed, ProducerWanted
from regrow.core.messages.sights import StacksTaken
from regrow.core.messages.unions import AgentFact, WorkerFact


class WorkerFactRelay:
    """Passes on what workers say.

    Args:
        tell: tells the coordinator.
        node: this one.
        ledger, data, vault, desk, output: each hears what concerns it.
        step_took: hears how long each step took.
    """

    def __init__(
        self,
        tell: Callable[[AgentFact], None],
        *,
        node: NodeId,
        ledger: CommittedSteps,
        data: DataDesk,
        vault: CopyStore,
        desk: WriterClient,
        output: OutputPump,
        step_took: Callable[[Seconds], None],
    ) -> None:
        self._tell = tell
        self._node = node
        self._ledger = ledger
        self._data = data
        self._vault = vault
        self._desk = desk
        self._output = output
        self._step_took = step_took
        self._commits: dict[WorkerId, facts.WorkerCommitted] = {}

    def said(self, worker: Worker, fact: WorkerFact) -> None:
        """A worker has said something."""
        match fact:
            case facts.WorkerStaged() | ProducerServed():
                pass  # what is staged is kept with the worker: it counts only if the step commits without it
            case OrderDeclared():
                self._ledger.stated(fact, time.monotonic())
            case ProducerWanted():
                self._data.wanted(fact, worker.generation)
            case SnapshotTaken():
                error = self._vault.snapshot_taken(fact, worker.pid or 0)
                if fact.asked:
                    self._tell(StateKept(fact.worker, fact.step, error))
            case facts.WorkerCommitted():
                self._committed(worker, fact)
            case _ if worker.told:
                pass  # another thread of it was quicker than its end, and slower than the news
            case StacksTaken():
                self._output.keep(worker.id, fact.text)
            case SnapshotForDisk():
                self._desk.hear(fact, worker.pid)
            case facts.WorkerFailed(error=error):
                self._output.keep(worker.id, error.traceback)
                self._tell(fact)
            case _:
                self._tell(fact)

    def tell_progress(self) -> None:
        """The newest commits since the last call; to be repeated now and then."""
        if self._commits:
            self._tell(facts.NodeProgress(self._node, list(self._commits.values())))
            self._commits.clear()

    def _committed(self, worker: Worker, fact: facts.WorkerCommitted) -> None:
        self._ledger.committed(fact, worker.rank if fact.rank is None else fact.rank)
        self._step_took(fact.seconds)
        if worker.announced != fact.generation and not worker.told:
            worker.announced = fact.generation
            self._tell(fact)
        else:
            self._commits[worker.id] = fact
