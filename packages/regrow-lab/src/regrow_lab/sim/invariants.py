"""Invariants of a job at every moment and under all faults, checked against the actions of simulated workers."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec.structs import astuple

from regrow.core.errors import RegrowError
from regrow.core.ids import Generation, Instant, NodeId, StepNo, WorkerId
from regrow.core.job import JobSpec
from regrow.core.messages import facts, orders
from regrow.core.messages.copies import ForgetCopies
from regrow.core.messages.succession import NodeReport
from regrow.core.messages.tables import JoinGeneration, completed, ranks_of
from regrow.core.messages.unions import WorkerOrder
from regrow.core.messages.vocabulary import Member, Role
from regrow.core.records import (
    PLANNED,
    GenerationFormed,
    IncidentClosed,
    IncidentOpened,
    Noted,
    Record,
    WorkerGone,
    WorldChanged,
)
from regrow.membership.machine import Command, EndJob, Membership
from regrow.membership.restartable import RestartableMachine
from regrow.membership.scaling import Limits
from regrow.membership.states import Ended, Releasing, Saving, Training
from regrow_lab.sim.exposure import ExposureLaw
from regrow_lab.sim.memory_laws import MemoryLaws
from regrow_lab.sim.moves import moved
from regrow_lab.sim.time_limits import TimeLimits
from regrow_lab.sim.workers import SimWorker


class InvariantBroken(RegrowError):
    """The state machine made a decision that breaks a law."""


def require(holds: bool, law: str) -> None:
    """Raise `InvariantBroken` unless it holds."""
    if not holds:
        raise InvariantBroken(law)


class Invariants:
    """Watches one job.

    Args:
        spec: settings with which the job was started.
        workers: all simulated workers until now.
        limits: the law of the duration of incidents.
        durable: the step of the newest checkpoint on disk.
    """

    def __init__(
        self,
        spec: JobSpec,
        workers: Mapping[WorkerId, SimWorker],
        limits: TimeLimits,
        durable: Callable[[], StepNo],
    ) -> None:
        self._spec = spec
        self.limits = limits
        self._workers, self._durable = workers, durable
        self.memory = MemoryLaws(workers, durable, require)
        self.exposure = ExposureLaw(workers, require)
        self._spawned: dict[WorkerId, NodeId] = {}
        self._fenced: set[WorkerId] = set()
        self._known_gone: set[WorkerId] = set()
        self._stores: dict[NodeId, str] = {}
        """Address of the store of each present node."""
        self._tables: dict[WorkerId, Generation] = {}
        self._forms: dict[WorkerId, orders.FormGeneration] = {}
        """Order for the last generation that each worker was to enter."""
        self._formed = Generation(0)
        self._limits = Limits.of(spec)
        self._members: list[Member] = []
        """Members of the newest generation."""
        self._released: set[WorkerId] = set()
        """Workers that were released before the job's end, since the newest generation was formed."""
        self._excused: set[WorkerId] = set()
        """Released workers whose node drains, or whose rank was moved."""
        self._draining: set[NodeId] = set()
        self._closed: set[NodeId] = set()
        """Draining nodes on which no worker may be started any more."""
        self._committed: dict[StepNo, int] = {}
        """Size of the world in which each step was committed, for steps that may still be run again."""
        self._newest = StepNo(0)
        """The first step that no worker has committed yet."""
        self._foretold: WorldChanged | None = None
        """A change that a coordinator recorded, but failed before it could order it."""
        self._fresh = True
        """True if no generation has been formed since the start of all workers."""
        self._floor = StepNo(0)
        """Every rank has had the state of this step since the last restart, or it was on disk then."""
        self._faults_at: list[Instant] = []
        self._gone_records: Counter[WorkerId] = Counter()
        self.opened: dict[int, IncidentOpened] = {}
        self.closed: list[IncidentClosed] = []
        self.restarts = 0
        self.end: EndJob | None = None

    # --- facts and decisions of the machine --------------------------------------------------------------------

    def learned(self, exit: facts.WorkerExited) -> None:
        """Record that the machine knows of a worker's end."""
        self._known_gone.add(exit.worker)

    def reported(self, report: NodeReport) -> None:
        """Record that the machine received a node's list of workers: others were never started, or have ended.

        If a listed worker should have been fenced, that order was lost, and its coordinator has failed since. No other
        worker has replaced it, or the newest table would show that.
        """
        there = {past.worker for past in report.workers if past.code is None}
        self._known_gone |= {worker for worker, home in self._spawned.items() if home == report.node} - there
        self._fenced -= {past.worker for past in report.workers if not past.fenced} - self._known_gone

    @property
    def world(self) -> int:
        """Number of ranks of the newest generation."""
        return len(self._members)

    @property
    def all_on_disk(self) -> bool:
        """True if every committed step is in a durable checkpoint."""
        return self._durable() >= self._newest

    def all_at(self, step: StepNo) -> bool:
        """True if all ranks are active, and have the state of this step or a newer one."""
        living = [worker for worker in self._workers.values() if worker.active]
        return len(living) == self.world and all(worker.state >= step for worker in living)

    def joined(self, node: facts.NodeJoined) -> None:
        """Record a node that the machine is about to learn of."""
        self._stores[node.node] = node.store

    def draining(self, node: NodeId, machine: Membership) -> None:
        """Record a draining node that the machine is about to learn of.

        Workers may still be started on it if it joined while the agents were being asked, or if the job ends anyway.
        """
        self._draining.add(node)
        if (known := machine.roster.nodes.get(node)) is not None and not known.away and self.memory.stop_by is None:
            self._closed.add(node)

    def lost(self, node: NodeId) -> None:
        """Record a node that is lost or ordered to stop: its workers count as ended, and soon end."""
        self._stores.pop(node, None)
        self.memory.lost(node)
        self._draining.discard(node)
        self._closed.discard(node)
        theirs = {worker for worker, home in self._spawned.items() if home == node}
        self._fenced, self._known_gone = self._fenced | theirs, self._known_gone | theirs

    def check_commands(self, commands: Sequence[Command], machine: Membership) -> list[Command | orders.FormGeneration]:
        """The commands, each `JoinGeneration` expanded to the order that the worker must finally receive."""
        table = machine.tables.newest
        if table is None or not any(isinstance(command, JoinGeneration) for command in commands):
            return list(commands)
        expanded: list[Command | orders.FormGeneration] = []
        holders = ranks_of(table.head.holders)
        for command in commands:
            if isinstance(command, JoinGeneration):
                require(command.table == table.head.number, "a worker that joins a generation is sent its table")
                form = self._forms[command.worker] = completed(command, table, holders)
                expanded.append(form)
            else:
                expanded.append(command)
        return expanded

    def received(self, order: WorkerOrder) -> None:
        """Check an order that a worker receives from its agent."""
        if isinstance(order, orders.FormGeneration):
            meant = self._forms[order.worker]
            same = all(one is other or one == other for one, other in zip(astuple(order), astuple(meant), strict=True))
            require(same or order.generation < meant.generation, "an agent completes an order as meant")

    def decided(self, commands: Sequence[Command | orders.FormGeneration], machine: Membership, now: Instant) -> None:
        """Check the machine's answer to a fact. Raises `InvariantBroken`."""
        require(self.end is None or not commands, "nothing is ordered after the end")
        together: set[WorkerId] = set()
        forms = [command for command in commands if isinstance(command, orders.FormGeneration)]
        for command in commands:
            require(self.end is None, "the end of the job is its last command")
            match command:
                case orders.SpawnWorker():
                    require(command.worker not in self._spawned, f"{command.worker} is spawned once")
                    require(command.node in self._stores, f"{command.worker} is spawned on a node of the job")
                    require(command.node not in self._closed, f"{command.worker} is not spawned on a closed node")
                    alone = command.role is not Role.RANK or self._spawned.keys() <= self._known_gone | together
                    require(alone, "workers are started again only when all earlier ones are gone")
                    self.memory.spawned(command)
                    self._spawned[command.worker] = command.node
                    together.add(command.worker)
                case orders.FenceWorker():
                    self._fenced.add(command.worker)
                    if command.dump_stacks and (target := self._workers.get(command.worker)) is not None:
                        slow = target.slow_until > now and not target.hung and not target.stalled
                        ends = isinstance(machine.state, Saving | Ended)  # nobody goes on, and the disk waits for it
                        require(ends or not slow, f"{command.worker} is only slow, and must not be ended for it")
                case orders.HaltGeneration():
                    require(self._tables.get(command.worker) == command.generation, "only members are halted")
                case orders.ReleaseWorker(goes_on=False) if not isinstance(machine.state, Releasing):
                    self._let_go(command.worker, machine)
                case orders.FormGeneration() if command is forms[0]:
                    self._formation(forms)
                    self._change(commands)
                    self._members = forms[0].members
                    self._released.clear()
                case ForgetCopies():
                    self.memory.lost(command.node)
                case orders.StopNode(grace=0.0):
                    self.lost(command.node)  # An agent that came too late; a node that is given back ends by itself.
                case EndJob():
                    self.end = command
                    require(bool(command.diagnosis) == (command.code != 0), "a failure has a diagnosis, success none")
                case Record():
                    self._recorded(command, now, forming=bool(forms))
        if self.end is None:
            self._standing(machine)
        if forms:
            self.exposure.formed(forms[0].members, commands)

    def _formation(self, forms: list[orders.FormGeneration]) -> None:
        first = forms[0]
        table = (first.generation, first.step, first.members, first.holders, first.stores)
        require(
            all((f.generation, f.step, f.members, f.holders, f.stores) == table for f in forms),
            "all members of a generation are sent the same table",
        )
        require(first.generation > self._formed, "generations only grow")
        replicas, rest = divmod(len(first.members), self._spec.unit)
        require([m.rank for m in first.members] == list(range(len(first.members))), "ranks are dense, one worker each")
        require(rest == 0 and self._limits.allow(replicas), f"{len(first.members)} ranks are an allowed world")
        slots = [(m.node, m.local_rank) for m in first.members]
        require(len(set(slots)) == len(slots), f"no slot of a node is given away twice: {slots}")
        require(sorted(f.worker for f in forms) == sorted(m.worker for m in first.members), "all members get orders")
        require(len({m.worker for m in first.members}) == len(first.members), "no worker holds two ranks")
        places = {m.rank: m.worker for m in first.members}
        require(all(places[f.rank] == f.worker for f in forms), "each member is sent its own rank")
        for member in first.members:
            require(member.worker not in self._fenced, f"{member.worker} was fenced and never comes back")
            require(member.worker not in self._known_gone, f"{member.worker} is known to be gone")
            require(bool(member.endpoint), f"{member.worker} can be reached")
        homes = {member.node for member in first.members}
        require(homes <= self._stores.keys(), "members are on nodes of the job")
        require(sorted(first.stores) == sorted(self._stores[node] for node in homes), "stores are on members' nodes")
        restored = {f.rank for f in forms if f.restore is not None}
        require(bool(first.holders) or len(restored) == len(forms), "some rank holds the state, or all read copies")
        for rank in first.holders:
            holder = self._workers[places[rank]]
            has = holder.state == first.step or (holder.ready and holder.state == first.step - 1)
            require(has, f"{holder.worker} holds state@{first.step}, not @{holder.state}")
        parts = {self._workers[m.worker].holding for m in first.members}
        have = {self._workers[places[r]].holding for r in {*first.holders, *restored}}
        require(have == parts, "holders and the copies that are read make up the whole state")
        self.memory.formed(forms, parts, fresh=self._fresh)
        require(first.step >= self._floor, f"step {first.step}: all ranks had committed up to {self._floor}")
        came = self._newest + any(self._workers[m.worker].ready for m in first.members)
        require(self._fresh or first.step <= came, f"step {first.step} was never reached")
        known = {m.worker for m in first.members} | (self._released - self._known_gone - self._fenced)
        # A leaver takes no newer state with it, and does not hold back workers that need nothing from it.
        sets = ({m.worker for m in first.members}, known)
        newest = max(self._reached(self._workers[worker] for worker in those) for those in sets)
        counts = first.step == newest or (bool(restored) and first.step > newest)
        require(counts, f"a generation begins at the newest state, that of leavers included: {first.step}, {newest}")
        for member in self._members:
            gone = self._fenced | self._known_gone | self._released
            require(member.worker in known | gone, f"{member.worker} has left without an order")
        self._nobody_else_acts(first.generation)
        self._formed = first.generation
        self._newest, self._fresh = first.step if self._fresh else max(self._newest, first.step), False
        # Steps that only lost workers had committed do not count as committed any more.
        self._committed = {step: world for step, world in self._committed.items() if step < first.step}
        for form in forms:
            self._tables[form.worker] = form.generation

    def _reached(self, workers: Iterable[SimWorker]) -> StepNo:
        """The newest state that a worker has, or that all workers with the newest state can compute themselves."""
        states = [(worker.state, worker.ready) for worker in workers]
        newest = max(state for state, _ in states)
        return StepNo(newest + all(ready for state, ready in states if state == newest))

    def _let_go(self, worker: WorkerId, machine: Membership) -> None:
        """Check a worker that is released before the job's end, because the others can go on without it."""
        require(worker in {m.worker for m in self._members}, f"{worker}, which is released, was in the job")
        self._released.add(worker)
        if self._spawned[worker] in self._draining or moved(machine, worker):
            self._excused.add(worker)

    def _change(self, commands: Sequence[Command | orders.FormGeneration]) -> None:
        """Check that the size of the world is recorded when it changes, and only then."""
        changes = [command for command in commands if isinstance(command, WorldChanged)]
        forms = [command for command in commands if isinstance(command, orders.FormGeneration)]
        require(len(changes) <= 1, "one change of the world's size at a time")
        if not changes and self._foretold is not None:
            changes = [self._foretold]
        self._foretold = None
        before = self.world // self._spec.unit or self._spec.replicas
        after = len(forms[0].members) // self._spec.unit
        if before != after:
            require(bool(changes), f"from {before} to {after} replicas, without a record of the change")
        for change in changes:
            require((change.before, change.after) == (before, after), f"{change}, not {before} to {after}")
            require(change.step == forms[0].step, "a change records its first step")
        require(after < before or self._released <= self._excused, "no worker leaves a job that needs it")

    def _nobody_else_acts(self, generation: Generation) -> None:
        for worker in self._workers.values():
            if worker.active and not worker.hung and worker.worker not in self._fenced:
                require(worker.generation >= generation, f"{worker.worker} still acts in an older generation")

    def _recorded(self, line: Record, now: Instant, *, forming: bool) -> None:
        match line:
            case IncidentOpened():
                require(len(self.opened) == len(self.closed), "one incident at a time")
                require(line.incident not in self.opened, "an incident is opened once")
                self.opened[line.incident] = line
                if line.kind not in PLANNED:
                    self._spent(now)
            case IncidentClosed():
                require(line.incident in self.opened, "a closed incident was opened before")
                require(line.incident not in {c.incident for c in self.closed}, "an incident is closed once")
                times = (line.detect, line.abort, line.regroup, line.hydrate, line.redo, line.total)
                require(all(time >= 0.0 for time in times), f"no stage takes negative time: {times}")
                require(line.faults >= 1 or line.kind in PLANNED, "an incident has a fault, or was planned")
                require(line.steps_lost >= 0 and (line.faults > 0 or line.steps_lost == 0), "a plan loses no step")
                self.closed.append(line)
            case WorldChanged() if not forming:
                self._foretold = line
            case Noted() if "was not foreseen" in line.text:
                raise InvariantBroken(line.text)
            case Noted() if line.text.startswith("all workers are started again"):
                self.restarts += 1
                if not self.memory.restarted(line.text, {self._workers[m.worker].holding for m in self._members}):
                    self._floor = self._durable()
                self._committed.clear()
                self._released.clear()
                self._fresh = True
                self._spent(now)
            case GenerationFormed():
                self.memory.stood()
            case WorkerGone():
                self._gone_records[line.worker] += 1
                require(self._gone_records[line.worker] == 1, f"the end of {line.worker} is recorded once")

    def _spent(self, now: Instant) -> None:
        self._faults_at = [at for at in self._faults_at if now - at < self._spec.window]
        self._faults_at.append(now)
        require(len(self._faults_at) <= self._spec.max_faults, "the budget of faults is kept")

    def _standing(self, machine: Membership) -> None:
        if isinstance(machine.state, Training) and machine.incident is None:
            for node in machine.roster.usable_nodes():
                enough = len(machine.roster.standbys(node.node)) >= self._spec.standbys
                needed = not self.memory.refuted and node.failed_standbys < 3
                require(enough or not needed, "every usable node has all its standbys")

    def waited(self, machine: RestartableMachine, now: Instant) -> None:
        """Check that the machine has handled all passed deadlines. Raises `InvariantBroken`."""
        deadline = machine.next_deadline()
        late = deadline is not None and deadline <= now
        require(not late, f"a deadline that has passed is handled: {machine.machine.state}")

    # --- actions of workers ------------------------------------------------------------------------------------

    def acted(self, worker: SimWorker) -> None:
        """Check that a worker acts in its own generation. Raises `InvariantBroken`."""
        sent = self._tables.get(worker.worker, Generation(0))
        fenced = worker.worker in self._fenced
        acts = f"{worker.worker} acts in generation {worker.generation}, not {sent}"
        require(fenced or worker.generation == sent, acts)

    def committed(self, worker: SimWorker, step: StepNo) -> None:
        """Check a committed step. Raises `InvariantBroken`, for example if all ranks had committed it already."""
        self.acted(worker)
        if worker.worker in self._fenced:
            return  # It ends soon, and its result is discarded.
        require(step >= self._floor, f"step {step} was committed by all ranks and is run again by {worker.worker}")
        world = self._committed.setdefault(step, self.world)
        require(world == self.world, f"step {step} is committed by worlds of {world} and of {self.world}")
        require(step <= self._newest, f"step {step} is committed before step {self._newest}")
        self._newest = max(self._newest, StepNo(step + 1))
        states = [self._workers[member.worker].state for member in self._members]
        self._floor = max(self._floor, min(states))

    def over(self, machine: Membership) -> None:
        """Check the end of the run. Raises `InvariantBroken` unless it is success, or one failure with its reason."""
        require(self.end is not None, f"the job went silent in {machine.state}, generation {machine.generation}")
        require(isinstance(machine.state, Ended), "a job that has ended stays ended")
        if self.end is not None and self.end.code == 0:
            require(len(self.opened) == len(self.closed), "a job that ended well has closed its incidents")
