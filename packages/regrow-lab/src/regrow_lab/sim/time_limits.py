"""The law of time: every incident ends within the worst case of its rung, and every hang is noticed in time.

Waits that were requested are no incidents. A further fault, or a late worker, restarts the time of an incident.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from regrow.core.ids import Instant, Seconds, WorkerId
from regrow.core.job import JobSpec
from regrow.core.messages import facts, orders
from regrow.core.messages.unions import Fact
from regrow.membership.machine import Membership
from regrow.membership.recovery import hangs
from regrow.membership.recovery.worst_case import Wait, unnoticed, waits, worst_cases
from regrow.membership.roster import BUILDING
from regrow.membership.states import Ended, Retaining, Waiting
from regrow_lab.sim.network import NetworkConditions
from regrow_lab.sim.script import IN_STEP, Doing
from regrow_lab.sim.workers import SimWorker

_MESSAGES = 12
"""Most consecutive messages of a rung: the order to halt, its answer, and so on."""
_TAIL = 30
"""Largest delay of a message, as a multiple of the mean."""
_WORK_S: Seconds = 1.0
"""Time of simulated work without a deadline: an update, a step, and progress that is reported once a second."""
_PARALYSED = (Doing.FORMING, Doing.HYDRATING, *sorted(IN_STEP))
_BEGIN_ANEW = facts.WorkerExited | facts.NodeJoined | facts.NodeLost | facts.NodeStopped
"""Facts that restart the time of an incident."""
_AT_ONCE: Seconds = 10.0
"""Times up to this are not checked: all limits are longer."""


class Entered(Protocol):
    """The coordinator's machine, or the recovery of a lost coordinator's state from the agents."""

    machine: Membership

    @property
    def entering(self) -> bool:
        """True while agents are being asked."""
        ...


class TimeLimits:
    """Watches one job's clock.

    Args:
        spec: the settings from which the limits are computed; the machine has its own.
        weather: delays of messages.
        workers: all simulated workers until now.
        complain: raises unless a law holds.
    """

    def __init__(
        self,
        spec: JobSpec,
        weather: NetworkConditions,
        workers: Mapping[WorkerId, SimWorker],
        complain: Callable[[bool, str], None],
    ) -> None:
        self._spec, self._workers, self._complain = spec, workers, complain
        self._travel = _WORK_S + _MESSAGES * ((weather.slow_by if weather.slow else 0.0) + _TAIL * weather.delay)
        self._lossy = weather.lost > 0
        """Facts can be lost, unlike on a real connection: then all ranks may block without a culprit."""
        self._since: Instant | None = None
        """Time of the newest fault of the open incident."""
        self._rungs: set[str] = set()
        """Rungs taken since then, and the highest of the incident."""
        self._known: tuple[bool, Membership | None, int] = (False, None, 0)
        """True while agents are being asked; the deciding machine; the faults of the incident."""
        self._elects = False
        """True if the coordinator was lost, and no other has taken over yet."""
        self._patience = 1.0
        self._stuck: dict[WorkerId, Instant] = {}
        """Ranks that hang in a step, and the time since which they do."""
        self._totals: dict[tuple[float, float], dict[str, Seconds]] = {}

    def disturbed(self, now: Instant) -> None:
        """Record a fault: the time of the open incident restarts."""
        if self._since is not None:
            self._since = now

    def coordinator_lost(self, now: Instant) -> None:
        """Record the loss of the coordinator: there is none until another is elected."""
        self._since, self._elects = now, True

    def stuck(self, worker: SimWorker, now: Instant) -> None:
        """Record a worker that hangs without ending."""
        self.disturbed(now)
        if worker.placed and worker.doing in _PARALYSED:
            # The time of earlier hangs restarts too: the others now wait for another rank, or not at all.
            self._stuck = dict.fromkeys([*self._stuck, worker.worker], now)

    def decided(self, fact: Fact, commands: Iterable[object], entered: Entered, now: Instant) -> None:
        """Check the time of the machine's answer to a fact."""
        self._check(now)
        late = any(isinstance(each, orders.FenceWorker) and each.dump_stacks for each in commands)
        if late:
            self._patience = min(hangs.MOST_PATIENCE, 2 * self._patience)
        machine = entered.machine
        incident, waiting = machine.incident, isinstance(machine.state, Waiting)
        known = entered.entering, machine, 0 if incident is None else incident.faults
        goes_on = "end" in self._rungs and not waiting
        anew = late or goes_on or isinstance(fact, _BEGIN_ANEW) or known != self._known
        self._known, self._elects = known, self._elects and entered.entering
        if isinstance(machine.state, Ended) or not (incident or waiting or entered.entering):
            self._since = None
            self._rungs.clear()
            return
        if self._since is None or anew:
            self._since = now
            self._rungs.clear()
        self._rungs.update(_taken(machine))

    # --- limits ------------------------------------------------------------------------------------------------

    def _check(self, now: Instant) -> None:
        for name, since in list(self._stuck.items()):
            if self._since is not None or not self._workers[name].alive:
                del self._stuck[name]  # it belongs to the open incident
                continue
            limit = unnoticed(self._spec, factor=self._factor(since), patience=self._patience) + self._travel
            took = f"{name} makes no progress for {now - since:.1f} s, of {limit:.1f} s allowed"
            self._complain(now - since <= limit, f"a worker that hangs is noticed in time: {took}")
        if self._since is None or now - self._since <= _AT_ONCE:
            return
        what, limit = self._limit(self._factor(self._since))
        self._complain(
            now - self._since <= limit,
            f"{what} ends in time: {now - self._since:.1f} s, of {limit:.1f} s allowed",
        )

    def _limit(self, factor: float) -> tuple[str, Seconds]:
        if self._known[0] or self._elects:
            wait = Wait.ELECTION if self._elects else Wait.REPORTS
            return wait.name.lower(), waits(self._spec, factor=factor)[wait] + self._travel
        key = factor, self._patience
        if key not in self._totals:
            cases = worst_cases(self._spec, factor=factor, patience=self._patience)
            self._totals[key] = {rung: case.total for rung, case in cases.items()}
        longest = "end" if "end" in self._rungs else max(sorted(self._rungs), key=self._totals[key].__getitem__)
        return longest, self._totals[key][longest] + self._travel

    def _factor(self, since: Instant) -> float:
        """Longest time that a worker may now block, by its activity, as a multiple of the basic limit."""
        if self._lossy:
            return hangs.BETWEEN
        placed = [worker for worker in self._workers.values() if worker.alive and worker.placed]
        healthy = any(w.state >= 0 and w.generation > 0 and not w.hung and not w.stalled for w in placed)
        if not healthy or any(worker.doing is Doing.AFTER or worker.holding for worker in placed):
            return hangs.BETWEEN
        return hangs.COMPUTING if any(worker.slow_until > since for worker in placed) else 1.0


def _taken(machine: Membership) -> Iterable[str]:
    """The rungs in progress; the highest of the incident counts."""
    incident = machine.incident
    if isinstance(machine.state, Waiting):
        yield "end"
    if incident is None:
        return
    yield incident.rung
    if isinstance(machine.state, Retaining):
        yield "all"  # that rung follows once all have left their state
    if incident.planned:
        yield "preempt" if incident.kind == "preempt" else "grow"
    if incident.rung == "standby" and machine.roster.count(*BUILDING):
        yield "fork"  # the standby was still starting, or waits before its script
