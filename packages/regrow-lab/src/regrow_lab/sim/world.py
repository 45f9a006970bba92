"""A whole job in virtual time: production's state machine, among simulated agents, workers and a network."""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec

from regrow.agent.held_tables import Feasible
from regrow.core.ids import Generation, Instant, NodeId, Rank, Seconds, WorkerId
from regrow.core.job import JobSpec
from regrow.core.messages import facts, orders
from regrow.core.messages.checkpoints import AbandonCheckpoint, FinishCheckpoint, WriteCheckpoint
from regrow.core.messages.copies import ForgetCopies, KeepState, ReportCopies, TakeSnapshot
from regrow.core.messages.succession import NodeReport, ReportNode
from regrow.core.messages.unions import AgentFact, AgentOrder, WorkerFact, WorkerOrder
from regrow.core.messages.vocabulary import FaultSpec, Member
from regrow.membership.machine import EndJob, Membership
from regrow.membership.states import Gathering
from regrow_lab.sim.agents import AgentHost, SimAgents
from regrow_lab.sim.collectives import Group, newest_size
from regrow_lab.sim.coordinator import SimCoordinator
from regrow_lab.sim.copies import CopyHost, SimCopies
from regrow_lab.sim.disk import DiskHost, SimDisk
from regrow_lab.sim.faults import SimFault, SimRequest, fault_action
from regrow_lab.sim.invariants import InvariantBroken, Invariants, require
from regrow_lab.sim.moves import asked
from regrow_lab.sim.network import Downlink, Network, NetworkConditions, Timeline
from regrow_lab.sim.observations import Lookout, watched
from regrow_lab.sim.script import Doing, SimScript
from regrow_lab.sim.stops import FailingNewcomers, stop_job
from regrow_lab.sim.time_limits import TimeLimits
from regrow_lab.sim.uplinks import SimLeaders, Uplinks
from regrow_lab.sim.worker_host import FOR_THE_AGENT
from regrow_lab.sim.workers import SimWorker


class World:
    """One simulated job. A plan and a seed always give the same run.

    Args:
        spec: the job's settings.
        script: the script of its workers.
        weather: delays and losses of messages.
        injected: faults of the simulated world.
        faults, requests: faults on demand, which the machine itself injects, and requests to the job.
        slots: slots of each of the first nodes, if more than its ranks at the start.
        seed: of all random draws.
        promised: settings for the time limits of recoveries; None: those of the job.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        script: SimScript | None = None,
        weather: NetworkConditions | None = None,
        injected: Sequence[SimFault] = (),
        faults: Sequence[FaultSpec] = (),
        requests: Sequence[SimRequest] = (),
        slots: int | None = None,
        seed: int = 0,
        promised: JobSpec | None = None,
    ) -> None:
        self.script = script or SimScript()
        self.workers: dict[WorkerId, SimWorker] = {}
        limits = TimeLimits(promised or spec, weather or NetworkConditions(), self.workers, require)
        self.laws = Invariants(spec, self.workers, limits, lambda: self.disk.durable)
        self.bad_moments: set[str] = set()
        """Faults until now, for tests that check if a failure was justified."""
        self._spec = spec
        self._weather = weather or NetworkConditions()
        self._rng = random.Random(seed)
        self._timeline = Timeline()
        self._coordinator = SimCoordinator(spec, faults, laws=self.laws, timeline=self._timeline, send=self._to_agent)
        self.log, self.defects, self.report = self._coordinator.log, self._coordinator.defects, self._coordinator.report
        self._network = Network(self._timeline, self._rng, self._weather)
        self._uplinks = Uplinks(self._network, self.report)
        self._leaders = SimLeaders(self._coordinator, self._uplinks, self._timeline, self.jitter, self._there)
        self._agents = SimAgents(AgentHost(self._network, self.after, self.say_of_agent, self._obey))
        self._groups: dict[Generation, Group] = {}
        ranks = partial(newest_size, self._groups)
        host = DiskHost(self.now, self._after_on, self.jitter, self.say_of_agent, self.reachable, ranks, require)
        self.disk = SimDisk(spec, max(1, self.script.parts), host)
        self.copies = SimCopies(CopyHost(self._after_on, self.jitter, self.say_of_agent, self.reachable))
        self.readable, self.fails = self.copies.read, FailingNewcomers(self.script).fails
        self._counts: dict[tuple[Rank | None, Doing], int] = {}
        self._injected = list(injected)
        self._unsent: dict[NodeId, dict[WorkerId, facts.WorkerCommitted]] = {}
        self._lookout = Lookout(
            self.workers,
            reachable=lambda worker: worker.spawn.node in self._connected and self.reachable(worker),
            now=self.now,
            at=self._timeline.at,
            say=self.say_of_agent,
        )
        self._lives: dict[NodeId, int] = {}
        """Number of agents that each node has lost; workers of lost agents cannot report any more."""
        self._downlinks: defaultdict[NodeId, Downlink] = defaultdict(Downlink)
        self._connected: set[NodeId] = set()
        self._losing: set[NodeId] = set()
        """Nodes that are lost, while the coordinator does not know it yet."""
        self._born: dict[WorkerId, int] = {}
        self._slots: dict[NodeId, int] = {}
        self._stays: dict[NodeId, Seconds | None] = {}
        self._backs: dict[NodeId, Seconds | None] = {}
        """Time from a drained node's end to its return."""
        for _ in range(spec.nodes):
            self._new_node(max(slots or 0, spec.nproc), None)
        for request in requests:
            self.after(request.after, lambda request=request: self._fulfil(request))  # type: ignore[misc]
        for number, fault in enumerate(self._injected):
            if fault.doing is None:
                self.after(fault.after, fault_action(self, fault, number))

    @property
    def machine(self) -> Membership:
        """The present state machine."""
        return self._coordinator.machine

    def run(self, horizon: Seconds = 200_000.0, most: int = 300_000) -> EndJob:
        """Run until the job has ended. Raises `InvariantBroken`, also if it has not ended by the horizon.

        Args:
            horizon: limit of virtual time.
            most: limit of the number of events.
        """
        stop, happened = self._timeline.now + horizon, 0
        while self._coordinator.end is None and self._timeline.now < stop and self._timeline.step():
            happened += 1
            require(happened <= most, f"the job ends within {most} events")
        self.laws.over(self.machine)
        if self._coordinator.end is None:
            raise InvariantBroken("the job has not ended")
        return self._coordinator.end

    # --- to and from the coordinator ---------------------------------------------------------------------------

    def _to_agent(self, node: NodeId, order: AgentOrder) -> None:
        """Send an order over the present connection; messages in flight are lost when the connection ends.

        Orders to an agent that is gone but not missed yet are lost too: the next agent of its node has its own
        connection. As on a stream, no order from before a `ReportNode` or `ForgetCopies` is repeated after it. No
        `SpawnWorker` is repeated at all: an agent that has forgotten the ended worker would record it as alive.
        """
        term = self._uplinks.term_of(node)
        if node not in self._connected - self._losing or term is None:
            return
        life, downlink = self._lives[node], self._downlinks[node]
        question = isinstance(order, ReportNode | ForgetCopies)
        place = downlink.place(question=question)

        def deliver() -> None:
            again = isinstance(order, orders.SpawnWorker) and order.worker in self.workers
            there = self._uplinks.term_of(node) == term and self._lives[node] == life
            if there and not again and downlink.arrives(place, question=question):
                self._agents.obey(node, order)

        self._network.send(("to", node), deliver, sure=isinstance(order, ReportNode))

    def _obey(self, node: NodeId, order: Feasible) -> None:
        match order:
            case orders.SpawnWorker():
                self._spawn(order)
            case orders.FenceWorker():
                self._fence(order)
            case orders.StopNode():
                self._stop(node)
            case WriteCheckpoint() | FinishCheckpoint() | AbandonCheckpoint():
                self.disk.obey(order)
            case ReportCopies() | ForgetCopies():
                self.copies.obey(order)
            case KeepState() if order.worker in self.workers:
                self.copies.keep(self.workers[order.worker], order)
            case TakeSnapshot() if order.worker in self.workers:
                self.disk.want(self.workers[order.worker], order.step)
            case _ if isinstance(order, WorkerOrder) and order.worker in self.workers:
                self.laws.received(order)
                self.workers[order.worker].order(order)

    # --- nodes -------------------------------------------------------------------------------------------------

    def _new_node(self, slots: int, stay: Seconds | None) -> None:
        node = NodeId(f"n{len(self._slots)}")
        self._slots[node], self._stays[node], self._lives[node] = slots, stay, 0
        self._network.send(node, lambda: self._join(node), sure=True)

    def _fulfil(self, request: SimRequest) -> None:
        node = NodeId(f"n{request.node}")
        match request.what:
            case "scale" | "move":
                self.report(asked(request))
            case "node":
                self._new_node(request.slots, request.stay)
            case "stop" | "signals":
                stop_job(self, self._coordinator, request)
            case _ if (
                self._uplinks.term_of(node) is not None
                and node in self._there()
                and not isinstance(self.machine.state, Gathering)
            ):
                self._backs[node], life = request.back, self._lives[node]
                self.laws.draining(node, self.machine)
                self.report(facts.NodeDraining(node, request.grace, "it is preempted"))
                self.after(request.grace, lambda: self._reclaim(node, life))

    def _reclaim(self, node: NodeId, life: int) -> None:
        """Remove a node, even with workers on it."""
        if self._lives[node] == life:
            self.bad_moments.add("reclaimed")
            self.lose(node, SimFault("node", back=self._backs[node]))

    def _stop(self, node: NodeId) -> None:
        """End an agent on the coordinator's order."""
        if node in self._losing or node not in self._connected:
            return
        self._losing.add(node)
        self._end_agent(node)
        for worker in self.workers.values():
            if worker.spawn.node == node:
                worker.end(-15)
        self._network.send(("from", node), partial(self._stopped, node, self._lives[node]), sure=True)

    def _stopped(self, node: NodeId, life: int) -> None:
        if node not in self._losing or self._lives[node] != life:
            return
        self._connected, self._losing = self._connected - {node}, self._losing - {node}
        self._leaders.report_lost(facts.NodeStopped(node))
        if (back := self._backs.get(node)) is not None:
            self.after(back, lambda: self._join(node))

    def _join(self, node: NodeId) -> None:
        store = f"store of {node}.{self._lives[node]}"
        stay, life = self._stays[node], self._lives[node]
        joined = facts.NodeJoined(node, f"host of {node}", self._slots[node], store, stay=stay)
        if node in self._losing:
            return
        if not self._coordinator.there:
            self.after(0.5, lambda: self._join(node))
            return
        self._connected.add(node)
        joined = msgspec.structs.replace(joined, copy_endpoint=self.copies.open(node, life))
        self._agents.begin(joined)
        self._leaders.register(joined)

    def _there(self) -> set[NodeId]:
        """Nodes whose agents run."""
        return self._connected - self._losing

    def lose_coordinator(self, node: NodeId, fault: SimFault) -> None:
        """Kill the coordinator together with its node, if that hosts it; other nodes then elect another one."""
        known = node in self._there() and self._uplinks.term_of(node) is not None
        if known and self._there() != {node} and not isinstance(self.machine.state, Gathering):
            self._leaders.lose(node)
            self.laws.limits.coordinator_lost(self.now())
            self.lose(node, SimFault("node", back=fault.back))

    def lose(self, node: NodeId, fault: SimFault) -> None:
        """Lose an agent, gone or stopped; the coordinator learns that at once, or when the lease is over."""
        if node not in self._connected or node in self._losing:
            return
        self.laws.limits.disturbed(self.now())
        self._losing.add(node)
        self._end_agent(node)
        lost = [worker for worker in self.workers.values() if worker.spawn.node == node and worker.alive]
        known = self.jitter(0.01) if fault.how == "node" else self._spec.node_lease
        ends = 0.0 if fault.how == "node" else self._spec.node_lease + self._rng.uniform(0.0, 20.0)
        for worker in lost:
            self.after(ends, lambda worker=worker: worker.end(-9))  # type: ignore[misc]
        self.after(known, lambda: self._lost(node, fault, lost))

    def _end_agent(self, node: NodeId) -> None:
        self._lives[node] += 1
        self._agents.end(node)
        self.disk.forget(node)
        self.copies.forget(node)

    def _lost(self, node: NodeId, fault: SimFault, lost: Sequence[SimWorker]) -> None:
        self.bad_moments.add(f"lost {type(self.machine.state).__name__.lower()}")
        self._connected.discard(node)
        self._losing.discard(node)
        self._leaders.report_lost(facts.NodeLost(node, fault.how))
        if fault.back is not None:
            self.after(fault.back, lambda: self._join(node))

    def reachable(self, worker: SimWorker) -> bool:
        """True if a worker's messages reach the coordinator: not if its agent is gone."""
        return self._born[worker.worker] == self._lives[worker.spawn.node]

    # --- agents ------------------------------------------------------------------------------------------------

    def _spawn(self, order: orders.SpawnWorker) -> None:
        if order.worker in self.workers:
            return
        worker = SimWorker(order, order.warmth or self._spec.warmth, self)
        self.workers[order.worker] = worker
        self._born[order.worker] = self._lives[order.node]
        self.say_of_agent(order.node, facts.WorkerStarted(order.worker, 1000 + len(self.workers)))
        self.entered(worker, Doing.BUILDING)
        worker.start()

    def _fence(self, order: orders.FenceWorker) -> None:
        worker = self.workers.get(order.worker)
        if worker is not None:
            self.after(self.jitter(0.005), lambda: worker.end(-9))

    def say_of_agent(self, node: NodeId, fact: AgentFact) -> None:
        """Send a fact from a node's agent."""
        self._agents.reported(node, fact)
        self._uplinks.send(node, ("from", node), fact, sure=isinstance(fact, NodeReport))

    def hung(self, worker: SimWorker) -> None:
        """Have the agents observe a worker without progress; the coordinator decides."""
        self.bad_moments.add("hang")
        self.laws.limits.stuck(worker, self.now())
        self._lookout.watch()

    def progressed(self, worker: SimWorker, commit: facts.WorkerCommitted) -> None:
        """Record a commit; the agent reports it within a second."""
        self.laws.committed(worker, commit.step)
        self.disk.committed(commit.step, by_all=self.laws.all_at(commit.step))
        node = worker.spawn.node
        if not self._unsent.get(node):
            self.after(1.0, lambda: self._report_progress(node))
        self._unsent.setdefault(node, {})[worker.worker] = commit

    def _report_progress(self, node: NodeId) -> None:
        unsent, self._unsent[node] = self._unsent[node], {}
        commits = {worker: commit for worker, commit in unsent.items() if self.reachable(self.workers[worker])}
        self.say_of_agent(node, facts.NodeProgress(node, list(commits.values())))

    # --- interface for workers ---------------------------------------------------------------------------------

    def now(self) -> Instant:
        """The time."""
        return self._timeline.now

    def after(self, delay: Seconds, action: Callable[[], None]) -> None:
        """Schedule an action after a delay."""
        self._timeline.after(delay, action)

    def _after_on(self, node: NodeId, delay: Seconds, action: Callable[[], None]) -> None:
        life = self._lives[node]
        self.after(delay, lambda: action() if self._lives[node] == life else None)

    def jitter(self, around: Seconds) -> Seconds:
        """A random time of about this length."""
        return around * self._rng.uniform(0.7, 1.3)

    def say(self, worker: SimWorker, fact: WorkerFact) -> None:
        """Carry a fact to the coordinator."""
        if isinstance(fact, facts.WorkerResumed):
            self.laws.acted(worker)
        if isinstance(fact, FOR_THE_AGENT) or not self.reachable(worker):
            return
        self._agents.reported(worker.spawn.node, fact)
        self._uplinks.send(worker.spawn.node, worker.worker, fact)

    def exited(self, worker: SimWorker, code: int) -> None:
        """Report a process's end; the report is never lost, because the node would count as lost with it."""
        self.laws.limits.disturbed(self.now())
        overtakes = self._rng.random() < self._weather.overtaking_exit
        channel = ("exit", worker.worker) if overtakes else worker.worker
        late = self._rng.uniform(0.0, self._weather.late_exit) if self._weather.late_exit else 0.0
        if self.reachable(worker):
            fact = facts.WorkerExited(worker.worker, code, self._timeline.now)
            self._agents.reported(worker.spawn.node, fact)
            self._uplinks.send(worker.spawn.node, channel, fact, sure=True, extra=late)
        if not self.script.with_session and code != 0:
            _trouble_peers(self.workers.values(), self._rng, self.after)

    def group(self, generation: Generation, members: list[Member]) -> Group:
        """The groups of a generation, the same for all its members."""
        if generation not in self._groups:
            self._groups[generation] = Group(generation, members, self._rng)
        return self._groups[generation]

    def entered(self, worker: SimWorker, doing: Doing) -> None:
        """Trigger the faults of this activity, and observe workers that may block for ever in a collective."""
        self.disk.entered(worker, doing)
        if watched(worker):
            self._lookout.watch()
        place = worker.rank if worker.placed else None
        nth = self._counts[place, doing] = self._counts.get((place, doing), 0) + 1
        for number, fault in enumerate(self._injected):
            if (fault.rank, fault.doing, fault.nth) == (place, doing, nth):
                self.after(fault.after, fault_action(self, fault, number, worker))


def _trouble_peers(
    peers: Iterable[SimWorker], rng: random.Random, after: Callable[[Seconds, Callable[[], None]], None]
) -> None:
    """Let peers of a script without a session end with an error of their own, or hang."""
    for peer in peers:
        if peer.alive and peer.doing is Doing.AFTER and rng.random() < 0.5:
            after(rng.uniform(0.0, 0.5), partial(peer.end, 1))
