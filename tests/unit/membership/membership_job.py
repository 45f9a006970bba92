"""A machine whose agents and workers a test plays by hand, fact by fact."""

from typing import Any, TypeVar

from regrow.agent.held_tables import Feasible, HeldTables
from regrow.core.ids import NO_STATE, Generation, Instant, JobId, NodeId, Rank, StepNo, WorkerId
from regrow.core.job import JobSpec
from regrow.core.messages import facts, orders
from regrow.core.messages.observations import NodeSeen, WorkerObservation
from regrow.core.messages.tables import JoinGeneration, TableOrder
from regrow.core.messages.unions import Fact
from regrow.core.messages.vocabulary import ErrorReport, FaultKind, FaultSpec, Warmth
from regrow.core.phase import Phase
from regrow.core.records import Noted
from regrow.membership.machine import Command, EndJob, Membership

T = TypeVar("T")
OOM = ErrorReport("RuntimeError", "out of memory", "Traceback: train.py, line 7\nRuntimeError: out of memory", "line 7")


class Job:
    """A machine and what it said; in the place of orders that refer to a table, what a worker is told in the end."""

    def __init__(
        self,
        world: int = 3,
        *,
        faults: list[FaultSpec] | None = None,
        nodes: int = 1,
        slots: int | None = None,
        resume: bool = False,
        agents: bool = True,
        **changes: Any,
    ) -> None:
        fields: dict[str, Any] = {
            "job": JobId("unit"),
            "nproc": world // nodes,
            "nodes": nodes,
            "standbys": 0,
            "warmth": Warmth.BUILT,
            "max_faults": 100,
            "window": 3600.0,
            "max_restarts": None,
            "durable": False,
        }
        self.now: Instant = 100.0
        self._agents = agents
        self.machine = Membership(JobSpec(**{**fields, **changes}), faults or [], resume)
        self.said: list[Command | Feasible] = []
        self.tables: dict[NodeId, HeldTables] = {}
        for index in range(nodes):
            self.tell(facts.NodeJoined(NodeId(f"n{index}"), "host", slots or world // nodes, f"store{index}"))

    # --- facts

    def tell(self, fact: Fact, after: float = 0.01) -> list[Command]:
        self.now += after
        commands = self.machine.handle(fact, self.now)
        if isinstance(fact, facts.NodeJoined):
            self.tables[fact.node] = HeldTables()
        for command in commands:
            self.said += self.agreed(command) if self._agents else [command]
        assert not [each for each in commands if isinstance(each, Noted) and "was not foreseen" in each.text]
        return commands

    def agreed(self, command: Command) -> list[Command | Feasible]:
        """Commands as the agents complete them, which must match the machine, however the table came to a node."""
        if isinstance(command, TableOrder):
            held, newest = self.tables[command.node], self.machine.tables.newest
            assert newest is not None
            said = held.take(command)
            held.keep(newest)  # as another agent gives it
            assert held.get(newest.head.number) == newest and said in ([newest], []), (
                "the same as a whole and as a change"
            )
            return [command, *said]
        if not isinstance(command, JoinGeneration):
            return [command]
        roster = self.machine.roster
        (form,) = self.tables[roster.workers[command.worker].node].take(command)
        assert isinstance(form, orders.FormGeneration)
        if form.rank == 0:
            assert form.members == [roster.member(roster.workers[who], rank) for rank, who in roster.places.items()]
            assert form.stores == [node.store for node in roster.member_nodes()]
        assert roster.places[form.rank] == command.worker and form.generation == self.machine.generation
        return [form]

    def wait(self) -> list[Command]:
        deadline = self.machine.next_deadline()
        assert deadline is not None, "the machine waits for nothing"
        return self.tell(facts.TimeAdvanced(), after=max(0.0, deadline - self.now))

    def of(self, rank: int) -> WorkerId:
        return self.machine.roster.places[Rank(rank)]

    def standby(self) -> WorkerId:
        return self.machine.roster.standbys()[0].worker

    def ready(self, worker: WorkerId, state: int = NO_STATE, layout: str = "same", **more: Any) -> list[Command]:
        return self.tell(facts.WorkerReady(worker, StepNo(state), f"at {worker}", layout, **more))

    def halted(self, rank: int, state: int, generation: Generation | None = None) -> list[Command]:
        return self.tell(facts.WorkerHalted(self.of(rank), generation or self.machine.generation, StepNo(state)))

    def exited(self, worker: WorkerId, code: int = -9) -> list[Command]:
        return self.tell(facts.WorkerExited(worker, code, self.now))

    def committed(self, rank: int, step: int) -> list[Command]:
        generation = self.machine.generation
        return self.tell(facts.WorkerCommitted(self.of(rank), generation, StepNo(step), self.now, 0.1))

    def faulted(
        self, rank: int, step: int, error: ErrorReport = OOM, kind: FaultKind = FaultKind.BODY
    ) -> list[Command]:
        return self.tell(facts.WorkerFaulted(self.of(rank), self.machine.generation, StepNo(step), kind, error))

    def hung(self, rank: int, step: int, *, every: float = 2.0, **what: Any) -> list[Command]:
        """All agents look, twice: all others wait for `rank`, which stands still for longer than any bound."""
        self.now += 5000.0
        said: list[Command] = []
        for _ in range(2):
            sights = [self.sight(r, step, **(what if r == rank else {"waits": True, "calls": 1})) for r in self.ranks]
            said += self.tell(NodeSeen(NodeId("n0"), sights), after=every)
        return said

    def sight(self, rank: int, step: int, **what: Any) -> WorkerObservation:
        """Sight of a rank that stands still, in a step unless `what` says otherwise."""
        fields: dict[str, Any] = {"calls": 0, "phase": Phase.COMPUTING, "seconds": 4000.0, **what}
        return WorkerObservation(self.of(rank), self.machine.generation, StepNo(step), **fields)

    def seen(self, *sights: WorkerObservation) -> list[Command]:
        """An agent looks twice."""
        return [command for _ in range(2) for command in self.tell(NodeSeen(NodeId("n0"), list(sights)), after=1.0)]

    def finished(self, rank: int, state: int) -> list[Command]:
        return self.tell(facts.WorkerFinished(self.of(rank), self.machine.generation, StepNo(state)))

    def resumed(self, rank: int) -> list[Command]:
        return self.tell(facts.WorkerResumed(self.of(rank), self.machine.generation, 0.01, 0.02, 1000))

    # --- longer ways

    @property
    def ranks(self) -> range:
        return range(len(self.machine.roster.places))

    def built(self, state: int = 0) -> "Job":
        for rank in self.ranks:
            self.ready(self.of(rank), state)
        return self

    def joined(self) -> "Job":
        for rank in self.ranks:
            self.resumed(rank)
        return self

    def trained(self, step: int = 0) -> "Job":
        """Built, joined, and `step` committed by all."""
        self.built().joined()
        return self.stepped(step)

    def stepped(self, step: int) -> "Job":
        for rank in self.ranks:
            self.committed(rank, step)
        return self

    # --- what it said

    def all(self, kind: type[T]) -> list[T]:
        return [command for command in self.said if isinstance(command, kind)]

    def last(self, kind: type[T]) -> T:
        return self.all(kind)[-1]

    @property
    def end_codes(self) -> list[int]:
        return [end.code for end in self.all(EndJob)]

    @property
    def end(self) -> EndJob:
        ends = self.all(EndJob)
        assert len(ends) == 1, f"the job has ended {len(ends)} times"
        return ends[0]


def form(job: Job) -> orders.FormGeneration:
    return job.last(orders.FormGeneration)


def mend(job: Job, rank: int, step: int) -> None:
    job.exited(job.of(rank))
    if job.all(EndJob):
        return
    for other in job.ranks:
        if other != rank:
            job.halted(other, step)
    job.ready(job.of(rank))
    job.joined().stepped(step)
