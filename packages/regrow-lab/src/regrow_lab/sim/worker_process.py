"""A simulated process: it has one activity at a time, and may hang, stall, be slow or end at any moment."""

from typing import Any, cast

from regrow.core.ids import NO_STATE, Generation, Instant, Seconds, StepNo, WorkerId
from regrow.core.messages import orders
from regrow.core.messages.vocabulary import Warmth
from regrow_lab.sim.collectives import Group, Peer
from regrow_lab.sim.script import Doing
from regrow_lab.sim.worker_host import WorkerHost


class SimProcess:
    """One process, independent of its program.

    Args:
        spawn: the order that started it.
        warmth: how far it prepares itself as a standby.
        around: the world.
    """

    def __init__(self, spawn: orders.SpawnWorker, warmth: Warmth, around: WorkerHost[Any]) -> None:
        self.worker: WorkerId = spawn.worker
        self.spawn = spawn
        self.rank = spawn.rank
        self.placed = spawn.role.placed
        self.state = NO_STATE
        self.generation = Generation(0)
        self.doing = Doing.BUILDING
        self.ready = False
        """True if it has all inputs for the update of `state`, and all ranks have voted for the update, or will."""
        self.hung = False
        self.stalled = False
        self.slow_until: Instant = float("-inf")
        """Time until which it only computes."""
        self.since: Instant = around.now()
        self.group: Group | None = None
        self._warmth = warmth
        self._around = around
        self._ticket = 0
        self._form: orders.FormGeneration | None = None
        self._halt: orders.HaltGeneration | None = None
        self._halted_in = Generation(0)
        self._halt_at: StepNo | None = None
        self._announced = Generation(0)
        self.holding = ""
        self._over = False
        self._armed = {spec.fault: spec for spec in spawn.faults}

    @property
    def alive(self) -> bool:
        """True if the process exists."""
        return self.doing is not Doing.DEAD

    @property
    def ticket(self) -> int:
        """A number that changes with each change of activity."""
        return self._ticket

    @property
    def active(self) -> bool:
        """True if it acts in its generation, as far as it knows."""
        return self.alive and self.group is not None and self.doing is not Doing.HALTED

    def end(self, code: int) -> None:
        """End the process at once."""
        if not self.alive:
            return
        self._leave_group(reset=True)
        self.hung = self.stalled = False
        self._enter(Doing.DEAD)
        self._around.exited(self, code)

    def hang(self) -> None:
        """Hang: no activity and no answer any more."""
        if self.alive:
            self.hung = True
            self._around.hung(self)

    def stall(self) -> None:
        """Stop the training thread; another thread still answers."""
        if self.alive:
            self.stalled = True
            self._around.hung(self)

    def slow_down(self, lasts: Seconds) -> None:
        """Compute until this time has passed, whatever the orders."""
        if self.alive:
            self.slow_until = self._around.now() + lasts

    def later(self, delay: Seconds, what: str, *arguments: object) -> None:
        """Call a method of this worker, unless it has changed its activity by then."""
        ticket = self._ticket

        def act() -> None:
            slow = self.slow_until - self._around.now()
            if ticket != self._ticket or not self.alive or self.hung or self.stalled:
                return
            if slow > 0:
                self._around.after(slow, act)
                return
            getattr(self, what)(*arguments)

        self._around.after(delay, act)

    def _enter(self, doing: Doing) -> None:
        self.doing, self.since = doing, self._around.now()
        self._ticket += 1
        self._around.entered(self, doing)

    def _wait(self, doing: Doing) -> None:
        self._enter(doing)
        self.later(self._around.script.patience, "gives_up")

    def _leave_group(self, *, reset: bool) -> None:
        if self.group is not None:
            self.group.leave(cast(Peer, self), reset=reset)
            self.group = None
