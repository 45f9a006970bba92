"""The coordinator of a simulated job: the state machine of production on a virtual clock, with injected failures."""

from collections.abc import Callable, Sequence

from regrow.core.ids import Instant, NodeId
from regrow.core.job import JobSpec
from regrow.core.messages import facts, orders
from regrow.core.messages.copies import StateKept
from regrow.core.messages.replacements import ReplacementRefuted
from regrow.core.messages.succession import NodeReport, ReportNode
from regrow.core.messages.tables import JoinGeneration, TableOrder
from regrow.core.messages.unions import AgentOrder, Fact, WorkerOrder
from regrow.core.messages.vocabulary import FaultSpec
from regrow.membership.deadlines import ARRIVE_S
from regrow.membership.machine import Command, EndJob, Membership
from regrow.membership.restartable import RestartableMachine
from regrow.membership.states import Ended
from regrow.membership.succession.memory import CoordinatorLoss, JobMemory
from regrow.membership.succession.written import MemoryWriter, read
from regrow_lab.sim.copies import MemoryOrder
from regrow_lab.sim.disk import DiskOrder
from regrow_lab.sim.invariants import Invariants
from regrow_lab.sim.network import Alarm, Timeline


class DefectiveMembership(Membership):
    """Raises once for each of `defects`: before it has handled a fact, or after.

    Args:
        defects: `defect` or `late defect`; removed as they are raised.
        spec, faults, memory: as in `Membership`.
    """

    def __init__(
        self, defects: list[str], spec: JobSpec, faults: Sequence[FaultSpec], memory: JobMemory | None
    ) -> None:
        super().__init__(spec, faults, memory=memory)
        self._defects = defects

    def decide(self, event: Fact, now: Instant) -> None:
        """As in `Membership`. Raises `KeyError` for an injected defect."""
        if not self._defects:
            return super().decide(event, now)
        defect = self._defects.pop(0)
        if defect == "late defect":
            super().decide(event, now)
        raise KeyError(defect)


class SimCoordinator:
    """Passes facts to the state machine, and sends its orders.

    Args:
        spec, faults: as in `Membership`.
        laws: the invariants to check.
        timeline: the virtual time.
        send: sends an order to an agent.
    """

    def __init__(
        self,
        spec: JobSpec,
        faults: Sequence[FaultSpec],
        *,
        laws: Invariants,
        timeline: Timeline,
        send: Callable[[NodeId, AgentOrder], None],
    ) -> None:
        self.defects: list[str] = []
        """Defects that the machine will still raise."""
        self.log: list[tuple[Instant, Fact | Command | orders.FormGeneration]] = []
        self.end: EndJob | None = None
        self._make = lambda memory: DefectiveMembership(self.defects, spec, faults, memory=memory)
        self._machine = RestartableMachine(self._make)
        self._handover: bytes | None = None
        self.laws = laws
        self._timeline, self._send = timeline, send
        self._alarm = Alarm(timeline.at, self._ring)

    @property
    def machine(self) -> Membership:
        """The present state machine."""
        return self._machine.machine

    @property
    def there(self) -> bool:
        """True if a coordinator exists."""
        return self._handover is None

    def lose(self) -> None:
        """End its process; launchers of other nodes hold its state."""
        machine = self._machine
        self._handover = MemoryWriter(lambda: (machine.remember(), machine.nodes)).write()

    def succeed(self, loss: CoordinatorLoss) -> None:
        """Start an elected successor, to which agents then connect."""
        if self._handover is None:
            return
        memory, nodes = read(self._handover, 0.0)
        memory.loss, self._handover = loss, None
        expected = [node for node in nodes if node != loss.node]
        self._machine = RestartableMachine(self._make, memory, expected, self._timeline.now + ARRIVE_S)
        self.report(facts.TimeAdvanced())

    def report(self, fact: Fact) -> None:
        """Pass a fact to the machine now; it is lost if there is no coordinator."""
        now = self._timeline.now
        if self.end is not None or not self.there:
            return
        self.log.append((now, fact))
        if isinstance(fact, facts.WorkerExited):
            self.laws.learned(fact)
        elif isinstance(fact, StateKept | ReplacementRefuted | facts.StopRequested):
            self.laws.memory.apply(fact, self.machine.step, now)
        elif isinstance(fact, facts.WorkerCommitted) and fact.generation == self.machine.generation:
            self.laws.memory.committed(fact)
        elif isinstance(fact, NodeReport) and self._machine.awaits(fact):
            self.laws.reported(fact)
        commands = self._machine.handle(fact, now)
        reported = self.laws.check_commands(commands, self.machine)
        self.log.extend((now, command) for command in reported)
        self.laws.memory.ends = any(isinstance(command, EndJob) for command in commands)
        self.laws.decided(reported, self.machine, now)
        self.laws.limits.decided(fact, reported, self._machine, now)
        for command in commands:
            self._carry_out(command)
        if not isinstance(self.machine.state, Ended) and not self._machine.entering:
            self.laws.memory.ended_in_time(now)
        if isinstance(fact, facts.TimeAdvanced):
            self.laws.waited(self._machine, now)
        self._set_alarm()

    def _set_alarm(self) -> None:
        deadline = self._machine.next_deadline()
        if deadline is not None:
            self._alarm.set(deadline)

    def _ring(self) -> None:
        deadline = self._machine.next_deadline()
        if not self.there:
            return
        if deadline is not None and deadline <= self._timeline.now:
            self.report(facts.TimeAdvanced())
        else:
            self._set_alarm()

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, EndJob):
            self.end = command
        elif isinstance(
            command,
            orders.SpawnWorker
            | orders.FenceWorker
            | orders.StopNode
            | TableOrder
            | ReportNode
            | DiskOrder
            | MemoryOrder,
        ):
            self._send(command.node, command)
        elif isinstance(command, WorkerOrder | JoinGeneration):
            self._send(self.machine.roster.workers[command.worker].node, command)
