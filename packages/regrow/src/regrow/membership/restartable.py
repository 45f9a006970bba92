"""A membership machine that survives its own defects: it is replaced by one built from the agents' reports."""

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
"""Failures tolerated within the window of the job's faults; one more ends the job."""
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
"""Facts that an agent's report contains."""


class _Takeover:
    """The time between two machines: holds the awaited reports, and the facts that arrive meanwhile.

    Args:
        number: number of the request for reports.
        memory: knowledge of the last machine.
        joined: the connected agents.
        deadline: for their reports, and for expected agents to connect.
        expected: nodes whose agents have yet to connect.
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
        """Deadline of the report of each connected agent."""
        self.reports: dict[NodeId, NodeReport] = {}
        self._news: list[tuple[Instant, Fact]] = []

    @property
    def awaited(self) -> list[NodeId]:
        """Connected nodes whose reports are awaited."""
        return [node for node in self.joined if node not in self.reports]

    @property
    def deadline(self) -> Instant:
        """Time when the next report is overdue."""
        awaited = [self._due[node] for node in self.awaited]
        return min(awaited if awaited and not self.expected else [*awaited, self._arrive_by])

    def late(self, now: Instant) -> list[NodeId]:
        """Nodes whose report is overdue. Nodes that have not connected in time are no longer awaited."""
        if now >= self._arrive_by:
            self.expected.clear()
        return [node for node in self.awaited if now >= self._due[node]]

    def lacks_table(self, now: Instant) -> ReportNode | None:
        """Request for the newest table, if a node has a newer one than the last machine remembered; else None."""
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
        """Request the report of an agent that connects, due within `ARRIVE_S` however late the agent connects.

        An agent that connects very late or repeatedly gets no more than the rest of the whole time.
        """
        self.joined[fact.node] = fact
        self._due[fact.node] = min(now + ARRIVE_S, self._last)
        self.expected.discard(fact.node)
        self.reports.pop(fact.node, None)
        # The loss of the node's former agent needs no fact: its workers are missing in the new report.
        self._news = [
            each for each in self._news if not (isinstance(each[1], facts.NodeLost) and each[1].node == fact.node)
        ]
        return ReportNode(fact.node, self.number)

    def news(self, now: Instant) -> list[Fact]:
        """Facts received during the takeover, for a machine that knows everything else.

        Nodes that are given back must be known before anything is started on them, so they are added to the memory if
        their agents are connected.
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
                # The node's drain notice ends with its agent and does not hold for the next agent there.
                self._news = [each for each in self._news if not _notice_of(fact.node, each[1])]
                self._news.append((now, fact))
            case facts.TimeAdvanced() | facts.NodeProgress() | NodeSeen():
                pass  # These are sent again.
            case _:
                # Includes facts that are in the report too; the machine enters them only once.
                self._news.append((now, fact))


def _notice_of(node: NodeId, fact: Fact) -> bool:
    return isinstance(fact, facts.NodeDraining | facts.DrainRequested) and fact.node == node


class RestartableMachine:
    """Behaves like the machine that it wraps, but survives an exception in it: another machine takes over.

    Args:
        make: makes a machine, for a new job (None) or with the memory of a failed one.
        memory: memory of a lost coordinator; None: this is a new job.
        expected: the nodes of the lost coordinator's job, whose agents connect and are asked for reports.
        deadline: time until which these agents may connect.
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
        """Tracebacks of the machines' failures, for the record."""
        self._make = make
        self._joined: dict[NodeId, facts.NodeJoined] = {}
        self._takeover = None if memory is None else _Takeover(1, memory, {}, deadline, expected)
        self._succeeds = memory is not None
        """True while connecting agents are asked for reports, until all have reported."""
        self._takeovers = 1 if memory is not None else 0
        self._failures: list[Instant] = []
        self._gone: set[WorkerId] = set()
        """Workers whose end was recorded since the first failure of a machine."""

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
        """The nodes whose agents are connected or expected."""
        expected = self._takeover.expected if self._takeover is not None else ()
        return [*self._joined, *expected]

    @property
    def entering(self) -> bool:
        """True while reports of the agents are awaited and nothing is decided."""
        return self._takeover is not None

    def remember(self) -> JobMemory:
        """The knowledge about the job that a successor cannot get from the agents."""
        return self.machine.remember() if self._takeover is None else self._takeover.memory

    def awaits(self, report: NodeReport) -> bool:
        """True if decisions wait for this report."""
        return self._takeover is not None and report.number == self._takeover.number

    def snapshot(self) -> JobView:
        """The last known state of the job, for people."""
        return self.machine.snapshot()

    def next_deadline(self) -> Instant | None:
        """Latest time at which `TimeAdvanced` must be sent; None: nothing is awaited."""
        return self.machine.next_deadline() if self._takeover is None else self._takeover.deadline

    def handle(self, event: Fact, now: Instant) -> list[Command]:
        """Take one fact; return commands in order. Raises the machine's exception if it fails too often."""
        commands = self._handle(event, now)
        if not self._failures:
            return commands
        return [command for command in commands if not isinstance(command, record.WorkerGone) or self._is_news(command)]

    def _is_news(self, gone: record.WorkerGone) -> bool:
        """True if the worker's end is not recorded yet. A machine that fails right after an end may not remember it."""
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
        except Exception as error:  # noqa: BLE001 - after any exception another machine goes on
            return self._begin(error, event, now)

    def _enter(self, event: Fact) -> None:
        match event:
            case facts.NodeJoined():
                self._joined[event.node] = event
            case facts.NodeLost() | facts.NodeStopped():
                self._joined.pop(event.node, None)

    def _begin(self, error: Exception, event: Fact, now: Instant) -> list[Command]:
        """Begin a takeover after the machine failed at a fact. Agents repeat their facts; other facts are kept."""
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
        # The failed machine's orders are dropped; its records describe the past and are kept.
        past = [command for command in self.machine.undelivered() if isinstance(command, record.Record)]
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
            within = ARRIVE_S if self._succeeds else self.spec.node_deadline
            reason = f"it did not report its workers to the new coordinator within {within:g} s"
            for node in takeover.late(now):
                takeover.receive(facts.NodeLost(node, reason), now)
                self._joined.pop(node, None)
                late.append(orders.StopNode(node, reason, 0.0))
        return [*late, *self._finish(takeover, now)]

    def _finish(self, takeover: _Takeover, now: Instant) -> list[Command]:
        """Let another machine go on, once all agents have reported."""
        if takeover.awaited or takeover.expected:
            return []
        if (asked := takeover.lacks_table(now)) is not None:
            return [asked]
        self._takeover, self._succeeds = None, False
        news = takeover.news(now)
        # Failures since the reports are passed with them, so that nothing is started with these workers.
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
    """Answers to requests during a takeover. A drain that is certain is accepted, and handled after the takeover."""
    match event:
        case facts.DrainRequested(certain=True):
            return [AnswerScale(True, f"{event.node} is given back as soon as the coordinator works again")]
        case facts.ScaleRequested() | facts.FaultRequested() | facts.DrainRequested() | facts.MoveRequested():
            return [AnswerScale(False, "the coordinator is being restarted; ask again in a moment")]
        case _:
            return []
