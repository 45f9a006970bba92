"""History of an agent's workers, for a coordinator that takes the job over. Pure."""

import re
from dataclasses import dataclass

from regrow.agent.held_tables import Feasible
from regrow.core.ids import NO_STATE, Generation, NodeId, Rank, StepNo, WorkerId
from regrow.core.messages import facts, orders
from regrow.core.messages.succession import NodeReport, ReportNode, WorkerPast
from regrow.core.messages.tables import GenerationTable
from regrow.core.messages.unions import AgentFact

_NONE = Generation(0)
_IN_GENERATION = (
    facts.WorkerResumed | facts.WorkerCommitted | facts.WorkerHalted | facts.WorkerFinished | facts.WorkerFaulted
)
_OF_WORKERS = facts.WorkerReady | facts.WorkerFailed | _IN_GENERATION
_NUMBER = re.compile(r"\.w(\d+)$")


@dataclass
class _Life:
    """History of one worker; fields as in `WorkerPast`. `begins_at`: step with which its newest generation begins."""

    spawn: orders.SpawnWorker
    rank: Rank
    local_rank: int
    built_for: Rank
    built_slot: int
    built_world: int
    pid: int = 0
    script_ordered: bool = False
    generation: Generation = _NONE
    entered: Generation | None = None
    begins_at: StepNo = NO_STATE
    state_at: StepNo = NO_STATE
    stands: bool = False
    halting: bool = False
    planned: bool = False
    released: bool = False
    let_on: bool = False
    fenced: bool = False
    ready: facts.WorkerReady | None = None
    halted: facts.WorkerHalted | None = None
    finished: facts.WorkerFinished | None = None
    faulted: facts.WorkerFaulted | None = None
    failed: facts.WorkerFailed | None = None
    code: int | None = None

    def past(self) -> WorkerPast:
        fields = {name: value for name, value in vars(self).items() if name != "begins_at"}
        return WorkerPast(worker=self.spawn.worker, **fields)

    def enter(self, order: orders.FormGeneration) -> None:
        if order.generation <= self.generation:
            return  # A repeated order must not reset the history of this generation.
        self.rank, self.local_rank = order.rank, order.local_rank
        self.generation, self.begins_at = order.generation, order.step
        self.entered = order.generation if self.entered is None else self.entered
        self.stands = self.halting = self.planned = False
        self.halted = self.finished = self.faulted = None

    def received(self, fact: _OF_WORKERS) -> None:
        match fact:
            case facts.WorkerReady():
                self.ready = fact
                self.state_at = fact.state_at if fact.endpoint else self.state_at
            case facts.WorkerFailed():
                self.failed = fact
            case _:
                if fact.generation == self.generation:
                    self._received_in_generation(fact)

    def _received_in_generation(self, fact: _IN_GENERATION) -> None:
        match fact:
            case facts.WorkerResumed():
                self.stands, self.state_at = True, max(self.begins_at, self.state_at)
            case facts.WorkerCommitted():
                self.stands, self.state_at = True, StepNo(fact.step + 1)
            case facts.WorkerHalted():
                self.halted, self.state_at = fact, fact.state_at
            case facts.WorkerFinished():
                self.finished, self.state_at = fact, fact.state_at
            case facts.WorkerFaulted():
                self.faulted = fact


class NodeHistory:
    """The history of a node's workers.

    Args:
        node: name of the node.
    """

    def __init__(self, node: NodeId) -> None:
        self._node = node
        self._lives: dict[WorkerId, _Life] = {}
        self._table: GenerationTable | None = None
        self._generation = Generation(0)
        self._numbered = 0

    def ordered(self, order: Feasible) -> None:
        """Enter an order that is being carried out."""
        match order:
            case GenerationTable(head=head):
                self._table, self._generation = order, head.generation
                self._forget_ended()
                return
            case orders.SpawnWorker():
                if order.worker not in self._lives:
                    place = (order.rank, order.local_rank)
                    self._lives[order.worker] = _Life(order, *place, *place, order.world)
                    number = _NUMBER.search(order.worker)
                    self._numbered = max(self._numbered, int(number[1]) + 1 if number else 0)
                return
            case (
                orders.StartScript()
                | orders.FormGeneration()
                | orders.HaltGeneration()
                | orders.ReleaseWorker()
                | orders.FenceWorker()
            ):
                life = self._lives.get(order.worker)
            case _:
                return
        match order:
            case _ if life is None:
                pass
            case orders.StartScript():
                life.rank, life.local_rank, life.script_ordered = order.rank, order.local_rank, True
                life.built_for, life.built_slot = order.rank, order.local_rank
                life.built_world = order.world or life.built_world
            case orders.FormGeneration():
                life.enter(order)
            case orders.HaltGeneration():
                if order.generation == life.generation:
                    life.halting, life.planned = True, order.at is not None
            case orders.ReleaseWorker():
                life.let_on = True
                life.released = life.released or not order.goes_on
            case orders.FenceWorker():
                life.fenced = True

    def sent(self, fact: AgentFact) -> None:
        """Enter a fact that is being sent to the coordinator."""
        match fact:
            case facts.NodeProgress(commits=commits):
                for commit in commits:
                    self.sent(commit)
            case facts.WorkerStarted() if fact.worker in self._lives:
                self._lives[fact.worker].pid = fact.pid
            case facts.WorkerExited() if fact.worker in self._lives:
                # Ended workers of the newest table are remembered, as the reason of their end may matter.
                life = self._lives[fact.worker]
                life.code = fact.code if life.code is None else life.code
                self._forget_ended()
            case _ if isinstance(fact, _OF_WORKERS) and fact.worker in self._lives:
                self._lives[fact.worker].received(fact)
            case _:
                pass

    def report(self, asked: ReportNode) -> NodeReport:
        """The whole history, as the answer to `asked`."""
        pasts = [life.past() for life in self._lives.values()]
        table = 0 if self._table is None else self._table.head.number
        newest = self._table if asked.table else None
        return NodeReport(self._node, asked.number, pasts, table, self._numbered, newest)

    def _forget_ended(self) -> None:
        over = [
            worker
            for worker, life in self._lives.items()
            if life.code is not None and max(life.generation, life.spawn.generation) < self._generation
        ]
        for worker in over:
            del self._lives[worker]
