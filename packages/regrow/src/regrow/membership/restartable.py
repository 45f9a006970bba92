"""A machine that outlives a defect of its own: another one is put together from what the agents know of the job."""

import traceback
from collections.abc import Callable, Collection

from regrow.core import records as record
from regrow.core.ids import Instant, NodeId, WorkerId
from regrow.core.job import JobSpec
from regrow.core.messages import facts, orders
from regrow.core.messages.observations import NodeSeen
from regrow.core.messages.succession import NodeReport, ReportNode
from regrow.core.messages.unions import Fact
from regrow.membership import diagnosis as say
from regrow.membership.deadlines import ARRIVE_S
from regrow.membership.machine import Membership
from regrow.membership.orders import AnswerScale, Command, EndJob
from regrow.membership.succession.late_facts import aged, still_meant
from regrow.membership.succession.memory import GivenBack, JobMemory
from regrow.membership.view import JobView
from regrow.membership.workers import WorkerFailure

MOST_FAILURES = 3
"""Failures within the window of the job's faults after which it ends as before: the defect cannot be got around."""
_REPORTED = (
    facts.WorkerStarted
    | facts.WorkerReady
    | facts.WorkerHalted
    | facts.WorkerResumed
    | facts.WorkerCommitted
    | facts.WorkerFinished
    | facts.WorkerFaulted
    | facts.WorkerFailed
    | facts.WorkerExited
)
"""Facts in an agent's report."""


class _Takeover:
    """The time between two machines: whose report is awaited, and what is news meanwhile.

    Args:
        number: of the question.
        memory: what the last machine knew.
        joined: the agents that are there.
        deadline: for their reports, or, where none is there yet, for the agents to come.
        expected: nodes whose agents have still to come.
    """

    def __init__(
        self,
        number: int,
        memory: JobMemory,
        joined: dict[NodeId, facts.NodeJoined],
        deadline: Instant,
        expected: Collection[NodeId] = (),
    ) -> None:
        self.number = number
        self.memory, self.joined = memory, dict(joined)
        self.expected = set(expected)
        self._arrive_by, self._last = deadline, deadline + ARRIVE_S
        self._due = dict.fromkeys(joined, deadline)
        """Until when each of those that are there is to report."""
        self.reports: dict[NodeId, NodeReport] = {}
        self._news: list[tuple[Instant, Fact]] = []

    @property
    def awaited(self) -> list[NodeId]:
        """Nodes that have still to report."""
        return [node for node in self.joined if node not in self.reports]

    @property
    def deadline(self) -> Instant:
        """Time when the next report is overdue."""
        awaited = [self._due[node] for node in self.awaited]
        return min(awaited if awaited and not self.expected else [*awaited, self._arrive_by])

    def late(self, now: Instant) -> list[NodeId]:
        """Nodes whose report is overdue. Nodes that have not come in time are not awaited any more."""
        if now >= self._arrive_by:
            self.expected.clear()
        return [node for node in self.awaited if now >= self._due[node]]

    def lacks_table(self, now: Instant) -> ReportNode | None:
        """The question for a newer table than the last machine is known to have made."""
        known = 0 if self.memory.table is None else self.memory.table.head.number
        newest = max(self.reports.values(), key=lambda report: report.table, default=None)
        if newest is None or newest.table <= known:
            return None
        if newest.newest is not None:
            self.memory.table = newest.newest
            return None
        del self.reports[newest.node]
        self._due[newest.node] = max(self._due[newest.node], now + ARRIVE_S)
        return ReportNode(newest.node, self.number, table=True)

    def joins(self, fact: facts.NodeJoined, now: Instant) -> ReportNode:
        """An agent comes to another coordinator, and is asked. However late it comes, it has its time to answer.

        But one that comes after the last that is waited for, or again and again, has what is left of the whole.
        """
        self.joined[fact.node] = fact
        self._due[fact.node] = min(now + ARRIVE_S, self._last)
        self.expected.discard(fact.node)
        self.reports.pop(fact.node, None)
        # One before it is lost, as its report says by what is not in it.
        self._news = [
            each for each in self._news if not (isinstance(each[1], facts.NodeLost) and each[1].node == fact.node)
        ]
        return ReportNode(fact.node, self.number)

    def news(self, now: Instant) -> list[Fact]:
        """Facts received meanwhile, for a machine that knows all else.

        Nodes that are given back must be known before anything is begun with them: they are in the memory from now
        on, if their agents are there.
        """
        aged_facts = [aged(fact, now - since) for since, fact in self._news]
        self.memory.given_back += [
            GivenBack(fact.node, now + fact.grace, fact.reason, self.joined[fact.node].store)
            for fact in aged_facts
            if isinstance(fact, facts.NodeDraining | facts.DrainRequested) and fact.node in self.joined
        ]
        return aged_facts

    def receive(self, fact: Fact, now: Instant) -> None:
        match fact:
            case NodeReport():
                if fact.number == self.number and fact.node in self.joined:
                    self.reports[fact.node] = fact
            case facts.NodeLost() | facts.NodeStopped():
                self.expected.discard(fact.node)
                self.joined.pop(fact.node, None)
                self.reports.pop(fact.node, None)
                # Its notice ends with it: who comes after it on that node has none.
                self._news = [each for each in self._news if not _notice_of(fact.node, each[1])]
                self._news.append((now, fact))
            case facts.TimeAdvanced() | facts.NodeProgress() | NodeSeen():
                pass  # they are said again
            case _:
                # Also what stands in the report: that is entered once.
                self._news.append((now, fact))


def _notice_of(node: NodeId, fact: Fact) -> bool:
    return isinstance(fact, facts.NodeDraining | facts.DrainRequested) and fact.node == node


class RestartableMachine:
    """Behaves as the machine in it. An exception of that one ends it, and not the job.

    Args:
        make: a machine, for a new job (None) or with the memory of one that has failed.
        memory: of a coordinator that was lost; None: this is a new job.
        expected: the nodes of that job, whose agents come and are asked.
        deadline: until when they may come.
    """

    def __init__(
        self,
        make: Callable[[JobMemory | None], Membership],
        memory: JobMemory | None = None,
        expected: Collection[NodeId] = (),
        deadline: Instant = 0.0,
    ) -> None:
        self.machine = make(memory)
        self.crash = ""
        """Stacks of what has failed, for the record."""
        self._make = make
        self._joined: dict[NodeId, facts.NodeJoined] = {}
        self._takeover = None if memory is None else _Takeover(1, memory, {}, deadline, expected)
        self._succeeds = memory is not None
        """Agents that come are asked, until all have reported."""
        self._takeovers = 1 if memory is not None else 0
        self._failures: list[Instant] = []
        self._gone: set[WorkerId] = set()
        """Workers whose end was written down since a machine has failed."""

    @property
    def spec(self) -> JobSpec:
        """Specification with which the job was started."""
        return self.machine.spec

    @property
    def world(self) -> int:
        """Ranks of the present world, or of the one that is being formed."""
        return self.machine.world

    @property
    def nodes(self) -> list[NodeId]:
        """Those whose agents are there, or are expected."""
        expected = self._takeover.expected if self._takeover is not None else ()
        return [*self._joined, *expected]

    @property
    def entering(self) -> bool:
        """True while the agents are being asked, and nothing is decided."""
        return self._takeover is not None

    def remember(self) -> JobMemory:
        """Knowledge of the job that the agents could not give a successor."""
        return self.machine.remember() if self._takeover is None else self._takeover.memory

    def awaits(self, report: NodeReport) -> bool:
        """True if this is an answer of the agents for which all decisions wait."""
        return self._takeover is not None and report.number == self._takeover.number

    def snapshot(self) -> JobView:
        """The job as it was last known, for people."""
        return self.machine.snapshot()

    def next_deadline(self) -> Instant | None:
        """Latest time at which `TimeAdvanced` must be sent."""
        return self.machine.next_deadline() if self._takeover is None else self._takeover.deadline

    def handle(self, event: Fact, now: Instant) -> list[Command]:
        """Take in one fact; return what is to be done, in order. Raises what a machine raises that fails too often."""
        commands = self._handle(event, now)
        if not self._failures:
            return commands
        return [command for command in commands if not isinstance(command, record.WorkerGone) or self._is_news(command)]

    def _is_news(self, gone: record.WorkerGone) -> bool:
        """True if the end of a worker is not written down yet. A machine that fails soon after may not remember it."""
        if gone.worker in self._gone:
            return False
        self._gone.add(gone.worker)
        return True

    def _handle(self, event: Fact, now: Instant) -> list[Command]:
        self._enter(event)
        if self._takeover is not None:
            return self._between(self._takeover, event, now)
        try:
            return self.machine.handle(event, now)
        except Exception as error:  # noqa: BLE001 - whatever it is, another machine goes on
            return self._begin(error, event, now)

    def _enter(self, event: Fact) -> None:
        match event:
            case facts.NodeJoined():
                self._joined[event.node] = event
            case facts.NodeLost() | facts.NodeStopped():
                self._joined.pop(event.node, None)

    def _begin(self, error: Exception, event: Fact, now: Instant) -> list[Command]:
        """The machine has failed at a fact. Agents repeat theirs in their reports; what others said is heard again."""
        window = self.spec.window
        self._failures = [at for at in self._failures if now - at < window] + [now]
        self.crash += "".join(traceback.format_exception(error))
        if len(self._failures) > MOST_FAILURES:
            raise error
        self._takeovers += 1
        deadline = now + self.spec.node_deadline
        self._takeover = _Takeover(self._takeovers, self.machine.remember(), self._joined, deadline)
        answer = _meanwhile(event)
        if not (answer and not answer[0].accepted) and not isinstance(
            event, facts.NodeJoined | facts.NodeLost | facts.NodeStopped | _REPORTED
        ):
            self._takeover.receive(event, now)
        asked = [ReportNode(node, self._takeovers) for node in self._joined]
        # Its orders are not carried out, but what it had to say about the past is so.
        past = [command for command in self.machine.unsaid() if isinstance(command, record.Record)]
        note = record.Noted(at=now, text=say.coordinator_failed(error), worker=None)
        return [*past, note, *answer, *asked, *self._finish(self._takeover, now)]

    def _between(self, takeover: _Takeover, event: Fact, now: Instant) -> list[Command]:
        answer = _meanwhile(event)
        if answer and not answer[0].accepted:
            return [*answer]
        late: list[Command] = [*answer]
        if isinstance(event, facts.NodeJoined) and self._succeeds:
            late.append(takeover.joins(event, now))
        else:
            takeover.receive(event, now)
        if isinstance(event, facts.TimeAdvanced):
            reason = say.agent_silent(ARRIVE_S if self._succeeds else self.spec.node_deadline)
            for node in takeover.late(now):
                takeover.receive(facts.NodeLost(node, reason), now)
                self._joined.pop(node, None)
                late.append(orders.StopNode(node, reason, 0.0))
        return [*late, *self._finish(takeover, now)]

    def _finish(self, takeover: _Takeover, now: Instant) -> list[Command]:
        """All agents have reported: another machine goes on."""
        if takeover.awaited or takeover.expected:
            return []
        if (asked := takeover.lacks_table(now)) is not None:
            return [asked]
        self._takeover, self._succeeds = None, False
        news = takeover.news(now)
        # Who has failed since its agent's report is not begun anything with, as if the report said so.
        failures = [fact for fact in news if isinstance(fact, WorkerFailure)]
        self.machine = self._make(takeover.memory)
        try:
            commands = self.machine.take_over(list(takeover.joined.values()), takeover.reports, failures, now)
            news = [fact for fact in news if not isinstance(fact, WorkerFailure)]
        except Exception as error:  # noqa: BLE001 - as in `handle`
            commands = self._begin(error, facts.TimeAdvanced(), now)
        for fact in news:
            if commands and isinstance(commands[-1], EndJob):
                break
            commands = still_meant(commands, fact)
            commands += self._handle(fact, now)
        return commands


def _meanwhile(event: Fact) -> list[AnswerScale]:
    """Answers to people who ask for a change now. A node that goes in any case is noted, and dealt with later."""
    match event:
        case facts.DrainRequested(certain=True):
            return [AnswerScale(True, f"{event.node} is given back as soon as the coordinator works again")]
        case facts.ScaleRequested() | facts.FaultRequested() | facts.DrainRequested() | facts.MoveRequested():
            return [AnswerScale(False, "the coordinator is being restarted; ask again in a moment")]
        case _:
            return []
