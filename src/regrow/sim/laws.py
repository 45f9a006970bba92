"""What must hold at every moment of a job, whatever goes wrong. Checked against what simulated workers really do."""

from collections import Counter
from collections.abc import Mapping, Sequence

from regrow.core.errors import RegrowError
from regrow.core.events import IncidentClosed, IncidentOpened, JobEnded, Noted, Record, WorkerGone
from regrow.core.ids import Generation, Instant, NodeId, Rank, StepNo, WorkerId
from regrow.core.messages import (
    FenceWorker,
    FormGeneration,
    HaltGeneration,
    JobFacts,
    NodeJoined,
    Role,
    SpawnWorker,
    WorkerExited,
)
from regrow.membership.machine import Command, EndJob, Membership
from regrow.membership.states import Ended, Training
from regrow.sim.workers import SimWorker


class LawBroken(RegrowError):
    """The machine decided something that must never be."""


def require(holds: bool, law: str) -> None:
    """Raise `LawBroken` unless it holds."""
    if not holds:
        raise LawBroken(law)


class Laws:
    """Watches one job.

    Args:
        facts: what the job was started with.
        workers: all simulated workers that there have been.
    """

    def __init__(self, facts: JobFacts, workers: Mapping[WorkerId, SimWorker]) -> None:
        self._facts = facts
        self._workers = workers
        self._spawned: dict[WorkerId, NodeId] = {}
        self._fenced: set[WorkerId] = set()
        self._known_gone: set[WorkerId] = set()
        self._stores: dict[NodeId, str] = {}
        """Of the nodes that are there."""
        self._tables: dict[WorkerId, Generation] = {}
        self._formed = Generation(0)
        self._committed: dict[StepNo, set[Rank]] = {}
        self._floor = StepNo(0)
        """Every rank has committed all steps below this since the last restart."""
        self._faults_at: list[Instant] = []
        self._gone_records: Counter[WorkerId] = Counter()
        self.opened: dict[int, IncidentOpened] = {}
        self.closed: list[IncidentClosed] = []
        self.restarts = 0
        self.end: EndJob | None = None

    # --- what the machine says ---------------------------------------------------------------------------------

    def learned(self, exit: WorkerExited) -> None:
        """The machine was told of the end of a worker."""
        self._known_gone.add(exit.worker)

    def joined(self, node: NodeJoined) -> None:
        """The machine is about to be told of a node."""
        self._stores[node.node] = node.store

    def lost(self, node: NodeId) -> None:
        """The machine is about to be told of the loss of a node: its workers count as ended, and end in a moment."""
        del self._stores[node]
        theirs = {worker for worker, home in self._spawned.items() if home == node}
        self._fenced |= theirs
        self._known_gone |= theirs

    def decided(self, commands: Sequence[Command], machine: Membership, now: Instant) -> None:
        """The machine has answered a fact. Raises `LawBroken`."""
        require(self.end is None or not commands, "nothing is ordered after the end")
        together: set[WorkerId] = set()
        forms = [command for command in commands if isinstance(command, FormGeneration)]
        for command in commands:
            require(self.end is None, "the end of the job is its last command")
            match command:
                case SpawnWorker():
                    require(command.worker not in self._spawned, f"{command.worker} is spawned once")
                    require(command.node in self._stores, f"{command.worker} is spawned on a node that is there")
                    alone = command.role is not Role.RANK or self._spawned.keys() <= self._known_gone | together
                    require(alone, "all are started again only when nobody is left of those before")
                    self._spawned[command.worker] = command.node
                    together.add(command.worker)
                case FenceWorker():
                    self._fenced.add(command.worker)
                case HaltGeneration():
                    require(self._tables.get(command.worker) == command.generation, "who is halted was in it")
                case FormGeneration() if command is forms[0]:
                    self._formation(forms)
                case EndJob():
                    self.end = command
                    require(bool(command.diagnosis) == (command.code != 0), "a failure has a diagnosis, success none")
                case Record():
                    self._recorded(command, now)
        if self.end is None:
            self._standing(machine)

    def _formation(self, forms: list[FormGeneration]) -> None:
        first = forms[0]
        table = (first.generation, first.step, first.members, first.holders, first.stores)
        require(
            all((f.generation, f.step, f.members, f.holders, f.stores) == table for f in forms),
            "all members of a generation are sent the same table",
        )
        require(first.generation > self._formed, "generations only grow")
        require([m.rank for m in first.members] == list(range(self._facts.world)), "every rank has one worker")
        require(sorted(f.worker for f in forms) == sorted(m.worker for m in first.members), "every member is told")
        require(len({m.worker for m in first.members}) == len(first.members), "no worker holds two ranks")
        places = {m.rank: m.worker for m in first.members}
        require(all(places[f.rank] == f.worker for f in forms), "each is told its own rank")
        for member in first.members:
            require(member.worker not in self._fenced, f"{member.worker} was fenced and never comes back")
            require(member.worker not in self._known_gone, f"{member.worker} is known to be gone")
            require(bool(member.endpoint), f"{member.worker} can be reached")
        require(sorted(first.stores) == sorted(self._stores.values()), "keys live on the nodes that are there")
        require(bool(first.holders), "somebody holds the state")
        for rank in first.holders:
            holder = self._workers[places[rank]]
            require(holder.state == first.step, f"{holder.worker} holds state@{first.step}, not @{holder.state}")
        require(first.step >= self._floor, f"step {first.step}: all ranks had committed up to {self._floor}")
        newest = max(self._workers[m.worker].state for m in first.members)
        require(first.step == newest, "the newest state that is alive is the one that counts")
        self._nobody_else_acts(first.generation)
        self._formed = first.generation
        # What only lost workers had committed is not committed any more.
        self._committed = {step: ranks for step, ranks in self._committed.items() if step < first.step}
        for form in forms:
            self._tables[form.worker] = form.generation

    def _nobody_else_acts(self, generation: Generation) -> None:
        for worker in self._workers.values():
            if worker.active and not worker.hung and worker.worker not in self._fenced:
                require(worker.generation >= generation, f"{worker.worker} still acts in an older generation")

    def _recorded(self, line: Record, now: Instant) -> None:
        match line:
            case IncidentOpened():
                require(len(self.opened) == len(self.closed), "one incident at a time")
                require(line.incident not in self.opened, "an incident is opened once")
                self.opened[line.incident] = line
                self._spent(now)
            case IncidentClosed():
                require(line.incident in self.opened, "what is closed was opened")
                require(line.incident not in {c.incident for c in self.closed}, "an incident is closed once")
                times = (line.detect, line.abort, line.regroup, line.hydrate, line.redo, line.total)
                require(all(time >= 0.0 for time in times), f"no stage takes less than no time: {times}")
                require(line.steps_lost >= 0 and line.faults >= 1, "an incident has a fault")
                self.closed.append(line)
            case Noted() if line.text.startswith("all workers are started again"):
                self.restarts += 1
                self._floor = StepNo(0)
                self._committed.clear()
                self._spent(now)
            case WorkerGone():
                self._gone_records[line.worker] += 1
                require(self._gone_records[line.worker] == 1, f"{line.worker} is gone once")
            case JobEnded():
                pass

    def _spent(self, now: Instant) -> None:
        self._faults_at = [at for at in self._faults_at if now - at < self._facts.window]
        self._faults_at.append(now)
        require(len(self._faults_at) <= self._facts.max_faults, "the budget of faults is kept")

    def _standing(self, machine: Membership) -> None:
        if isinstance(machine.state, Training) and machine.incident is None:
            for node in machine.roster.nodes.values():
                enough = len(machine.roster.standbys(node.node)) >= self._facts.standbys
                require(enough or node.failed_standbys >= 3, "standbys are topped up")

    def waited(self, machine: Membership, now: Instant) -> None:
        """The machine was told that time has passed. Raises `LawBroken` where that changed nothing."""
        deadline = machine.next_deadline()
        require(deadline is None or deadline > now, f"a deadline that has passed is dealt with: {machine.state}")

    # --- what the workers do -----------------------------------------------------------------------------------

    def acted(self, worker: SimWorker) -> None:
        """A worker has done something in its generation. Raises `LawBroken`."""
        told = self._tables.get(worker.worker, Generation(0))
        fenced = worker.worker in self._fenced
        require(
            fenced or worker.generation == told, f"{worker.worker} acts in generation {worker.generation} of {told}"
        )

    def committed(self, worker: SimWorker, step: StepNo) -> None:
        """A worker has committed a step. Raises `LawBroken` where all had, already."""
        self.acted(worker)
        if worker.worker in self._fenced:
            return  # It ends in a moment, and what it did with it.
        require(step >= self._floor, f"step {step} was committed by all ranks and is run again by {worker.worker}")
        ranks = self._committed.setdefault(step, set())
        ranks.add(worker.rank)
        if len(ranks) == self._facts.world and step == self._floor:
            self._committed.pop(step)
            self._floor = StepNo(step + 1)

    def over(self, machine: Membership) -> None:
        """The run is over. Raises `LawBroken` unless it ended in success, or in one failure that says why."""
        require(self.end is not None, f"the job fell silent in {machine.state}, generation {machine.generation}")
        require(isinstance(machine.state, Ended), "what has ended stays so")
        if self.end is not None and self.end.code == 0:
            require(len(self.opened) == len(self.closed), "a job that went well has closed its incidents")
