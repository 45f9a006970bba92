"""Simulation of one job, which jumps from one incident to the next. A seed always gives the same result."""

import heapq
import math
from collections import deque
from enum import StrEnum

from regrow.core.ids import Instant, Seconds
from regrow.observe.goodput import Spent
from regrow_lab.fleet.accounting import FleetAccount, JobOutcome
from regrow_lab.fleet.arrivals import CapacityChange, FleetFault, capacity, faults
from regrow_lab.fleet.costs import START, CostTable, StageTimes
from regrow_lab.fleet.deciding import Decide, Remedy, Situation, Trouble, plainly
from regrow_lab.fleet.precedents import precedent
from regrow_lab.fleet.scenario import FleetScenario, PolicyTable

_NEVER: Instant = math.inf


class JobPhase(StrEnum):
    """Phase of the job."""

    WAITING = "waiting"
    """It waits for nodes."""
    MENDING = "mending"
    TRAINING = "training"


def simulate(scenario: FleetScenario, policy: PolicyTable, seed: int, decide: Decide | None = None) -> JobOutcome:
    """Simulate one job under one policy.

    Args:
        scenario: the job, its faults and its capacity.
        policy: the policy.
        seed: of the random draws; all policies of a seed meet the same faults.
        decide: chooses the remedy for an incident; None: the policy's own, for regrow by its coordinator's machine.

    Raises:
        UsageError: the costs of a rung are missing.
    """
    if decide is None:
        decide = precedent if policy.recovers == "regrow" else plainly(policy)
    return SimulatedJob(scenario, policy, seed, decide).run()


class SimulatedJob:
    """One simulated job.

    Args:
        scenario, policy, seed, decide: as in `simulate`.
    """

    def __init__(self, scenario: FleetScenario, policy: PolicyTable, seed: int, decide: Decide) -> None:
        self._job, self._policy, self._decide = scenario.job, policy, decide
        self._nodes, self._total = scenario.nodes, scenario.nodes + policy.spares
        self._notice = scenario.capacity.notice
        self._costs = CostTable(policy.set_of_costs, scenario.costs)
        self._account = FleetAccount(scenario, policy)
        self._faults = faults(scenario, seed, spares=policy.spares)
        self._changes = capacity(scenario.capacity, self._total, seed)
        self._fault: FleetFault | None = next(self._faults, None)
        self._change: CapacityChange | None = next(self._changes, None)
        self._repairs: list[Instant] = []
        self._given = self._total
        self._phase = JobPhase.WAITING
        self._size = self._nodes
        """Number of nodes of the present world, or of the next one during a recovery."""
        self._pieces: deque[tuple[Spent | None, Seconds]] = deque()
        """Remaining stages of a recovery; None as the name: a gate that opens when there are enough nodes."""
        self._gone: set[int] = set()
        """Nodes whose memory was lost in the present incident."""
        self._stages, self._shrinks = StageTimes(), False
        self._cycle: Seconds = 0.0
        """Training time since the last checkpoint was written."""
        self._stalling: Seconds = 0.0
        """Remaining time of the writing of a checkpoint."""

    def run(self) -> JobOutcome:
        """Simulate until all work is done, or until the time limit."""
        self._shrinks = self._policy.elastic
        start = self._costs.of(START, self._size * self._job.ranks_per_node).total
        self._pieces.extend([(None, 0.0), (Spent.FIRST_STEP, start)])
        self._phase = JobPhase.MENDING
        until = self._job.until
        while True:
            now = self._account.wall
            done = now + self._left() if self._phase is JobPhase.TRAINING else _NEVER
            piece = now + self._pieces[0][1] if self._phase is JobPhase.MENDING else _NEVER
            change = self._change.at if self._change else _NEVER
            repair = self._repairs[0] if self._repairs else _NEVER
            fault = self._fault.at if self._fault else _NEVER
            soonest = min(done, piece, change, repair, fault, until)
            self._pass(soonest - now)
            # Capacity first: the capacity at time 0 counts for the start.
            if soonest == change:
                self._capacity_changes()
            elif soonest == repair:
                heapq.heappop(self._repairs)
                self._more_nodes()
            elif soonest == done:
                return self._account.outcome(finished=True)
            elif soonest == until:
                return self._account.outcome(finished=False)
            elif soonest == piece:
                self._next_piece()
            else:
                self._fault_happens()

    # --- nodes -------------------------------------------------------------------------------------------------

    @property
    def _healthy(self) -> int:
        return max(0, self._given - len(self._repairs))

    def _fitting(self) -> int:
        """Number of nodes of the largest possible world; 0: none is possible."""
        unit = self._job.replica_nodes
        if not self._policy.elastic:
            return self._nodes if self._healthy >= self._nodes else 0
        nodes = min(self._nodes, self._healthy) // unit * unit
        return nodes if nodes >= max(unit, self._policy.least_nodes) else 0

    def _capacity_changes(self) -> None:
        if self._change is None:
            return
        change, self._change = self._change, next(self._changes, None)
        before, most = self._healthy, self._total if change.most is None else min(self._total, change.most)
        self._given = max(0, most - change.away)
        if self._healthy > before:
            self._more_nodes()
        elif self._healthy < self._size and self._phase is not JobPhase.WAITING and change.at > 0:
            self._nodes_leave()

    def _more_nodes(self) -> None:
        if self._phase is JobPhase.WAITING:
            self._phase = JobPhase.MENDING  # the gate is checked again
        elif self._phase is JobPhase.TRAINING:
            self._grow()

    def _grow(self) -> None:
        if self._policy.elastic and self._fitting() > self._size:
            self._account.struck(Trouble.GROW)
            self._size = self._fitting()
            self._mend(Trouble.GROW, 0.0)

    def _nodes_leave(self) -> None:
        """Handle an announced departure: if the notice is long enough, the state is saved first."""
        rung = self._decision(Trouble.DRAIN).rung
        peers = self._policy.from_peers
        needs = self._costs.of(rung, self._ranks).total if peers else self._policy.checkpoint_stall
        self._account.struck(Trouble.DRAIN)
        if self._notice >= needs and (peers or self._policy.checkpoint_every):
            self._mend(Trouble.DRAIN, 0.0)
            return
        self._gone.update(range(self._healthy, self._size))
        self._mend(Trouble.NODE, 0.5)

    # --- faults ------------------------------------------------------------------------------------------------

    def _fault_happens(self) -> None:
        if self._fault is None:
            return
        fault, self._fault = self._fault, next(self._faults, None)
        spare = fault.place - self._nodes
        if spare >= 0:
            if spare < self._healthy - self._size and self._phase is not JobPhase.WAITING:
                heapq.heappush(self._repairs, fault.at + fault.repair)
            return
        members = min(self._size, self._healthy)
        if fault.place >= members:
            return
        struck = min(fault.nodes, members - fault.place)
        if fault.trouble is Trouble.NODE:
            for _ in range(struck):
                heapq.heappush(self._repairs, fault.at + fault.repair)
        self._account.struck(fault.kind)
        self._gone.update(range(fault.place, fault.place + struck))
        if fault.trouble is Trouble.JOB:
            self._gone.update(range(self._size))
        self._mend(fault.trouble, fault.within)

    def _survives(self) -> bool:
        """True if all of the state is still in some node's memory."""
        unit = self._job.replica_nodes
        replicas = self._size // unit
        if replicas > 1:
            places = {place % unit for place in self._gone}
            return not any(all(r * unit + place in self._gone for r in range(replicas)) for place in places)
        if not self._policy.buddy_every or self._size < 2:
            return not self._gone
        return not any((place + 1) % self._size in self._gone for place in self._gone)

    def _decision(self, trouble: Trouble) -> Remedy:
        policy = self._policy
        spare, survives = self._healthy >= self._size, self._survives()
        return self._decide(Situation(trouble, spare, policy.standbys > 0, policy.elastic, survives))

    def _mend(self, trouble: Trouble, within: float) -> None:
        """Begin a recovery, or restart the one in progress."""
        job, planned = self._job, trouble in (Trouble.DRAIN, Trouble.GROW)
        mending = self._decision(trouble)
        ranks = self._ranks
        pieces: list[tuple[Spent | None, Seconds]] = []
        if self._phase is JobPhase.TRAINING and not planned and not self._stalling:
            lost = within * job.step * self._nodes / self._size
            if self._gone and self._size == job.replica_nodes and self._policy.buddy_every:
                lost *= self._policy.buddy_every
            self._account.give_up(lost, self._size)
        if mending.from_checkpoint and planned and self._policy.checkpoint_every:
            if self._phase is JobPhase.TRAINING:
                pieces.append((Spent.CHECKPOINT, self._policy.checkpoint_stall))
                self._account.checkpointed()
                self._cycle = 0.0
        elif mending.from_checkpoint:
            self._account.back_to_checkpoint()
            self._cycle = 0.0
        stages = self._costs.of(mending.rung, ranks)
        if self._phase is JobPhase.TRAINING or stages.total > self._stages.total:
            self._stages = stages
        stages, self._shrinks = self._stages, self._shrinks or mending.resizes
        detect = 0.0 if planned else self._policy.hang if trouble is Trouble.HANG else stages.detect
        pieces += [(Spent.DETECT, detect), (Spent.ABORT, stages.abort), (None, 0.0), (Spent.REGROUP, stages.regroup)]
        self._pieces = deque([*pieces, (Spent.HYDRATE, stages.hydrate), (Spent.REDO, stages.redo)])
        self._phase, self._stalling = JobPhase.MENDING, 0.0

    @property
    def _ranks(self) -> int:
        return self._size * self._job.ranks_per_node

    def _next_piece(self) -> None:
        """End the present stage, and begin the next one."""
        if self._pieces[0][0] is None and not self._gate_opens():
            self._phase = JobPhase.WAITING
            return
        self._pieces.popleft()
        if self._pieces:
            return
        self._phase, self._shrinks, self._stages = JobPhase.TRAINING, False, StageTimes()
        self._gone.clear()
        self._account.running = 0.0
        if self._healthy < self._size:
            self._nodes_leave()
        else:
            self._grow()

    def _gate_opens(self) -> bool:
        if self._healthy >= self._size:
            return True
        if self._shrinks and self._fitting():
            self._size = self._fitting()
            return True
        return False

    # --- time --------------------------------------------------------------------------------------------------

    def _pass(self, seconds: Seconds) -> None:
        if seconds <= 0:
            return
        account, healthy = self._account, self._healthy
        if self._phase is JobPhase.TRAINING:
            self._train(seconds)
        elif self._phase is JobPhase.WAITING:
            account.passes(seconds, Spent.CAPACITY, self._size, healthy)
        else:
            spent, left = self._pieces[0]
            account.passes(seconds, spent or Spent.CAPACITY, self._size, healthy)
            account.mending += seconds if spent is not Spent.FIRST_STEP else 0.0
            self._pieces[0] = (spent, max(0.0, left - seconds))

    def _train(self, seconds: Seconds) -> None:
        """Spend time on training and, in turn, on the writing of checkpoints."""
        every, stall = self._policy.checkpoint_every, self._policy.checkpoint_stall
        account, size, healthy = self._account, self._size, self._healthy
        if not every:
            account.trains(seconds, size, healthy)
            return
        if self._stalling:
            seconds = self._stall(seconds)
        before = min(seconds, max(0.0, every - self._cycle))
        account.trains(before, size, healthy)
        self._cycle += before
        seconds -= before
        if seconds <= 0:
            return
        turns, seconds = divmod(seconds, every + stall)
        if turns:
            account.passes(turns * stall, Spent.CHECKPOINT, size, healthy)
            account.trains((turns - 1) * every, size, healthy)
            account.checkpointed()
            account.trains(every, size, healthy)
        self._stalling = stall
        seconds = self._stall(seconds)
        if not self._stalling:
            account.trains(seconds, size, healthy)
            self._cycle = seconds

    def _stall(self, seconds: Seconds) -> Seconds:
        """Spend time on writing a checkpoint; returns the remaining time."""
        part = min(seconds, self._stalling)
        self._account.passes(part, Spent.CHECKPOINT, self._size, self._healthy)
        self._stalling -= part
        if self._stalling <= 0:
            self._stalling = self._cycle = 0.0
            self._account.checkpointed()
        return seconds - part

    def _left(self) -> Seconds:
        """Time until all work is done, if no event occurs."""
        every, stall = self._policy.checkpoint_every, self._policy.checkpoint_stall
        needs = max(0.0, self._job.work - self._account.work) * self._nodes / self._size
        if not every:
            return needs
        trained = 0.0 if self._stalling else self._cycle
        return float(self._stalling + needs + stall * max(0, math.ceil((trained + needs) / every) - 1))


def runs(scenario: FleetScenario, policy: PolicyTable, seeds: int) -> list[JobOutcome]:
    """Simulate one job for each of `seeds` seeds."""
    return [simulate(scenario, policy, seed) for seed in range(seeds)]
