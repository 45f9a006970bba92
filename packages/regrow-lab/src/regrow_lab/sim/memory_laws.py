"""Laws for a start of all workers from the state in memory, and for a job that was asked to stop."""

from collections.abc import Callable, Collection, Mapping, Sequence

from regrow.core.ids import NO_STATE, Instant, NodeId, StepNo, WorkerId
from regrow.core.messages import facts, orders
from regrow.core.messages.copies import StateKept
from regrow.core.messages.replacements import ReplacementRefuted
from regrow.core.messages.vocabulary import Role
from regrow.membership.recovery.newcomers import ATTEMPTS
from regrow_lab.sim.workers import SimWorker

_AT_ONCE = 0.001
IN_MEMORY = "which is in memory"


class MemoryLaws:
    """Watches one job. What counts is what the machine was told, and of nodes that it does not know to be lost.

    Args:
        workers: all simulated workers that there have been.
        durable: the step of the newest checkpoint on disk.
        require: raises unless a law holds.
    """

    def __init__(
        self,
        workers: Mapping[WorkerId, SimWorker],
        durable: Callable[[], StepNo],
        require: Callable[[bool, str], None],
    ) -> None:
        self._workers, self._durable, self._require = workers, durable, require
        self._kept: dict[NodeId, dict[str, StepNo]] = {}
        """The step at which each node has each part of the state."""
        self._times = 0
        """Number of starts of all workers from memory since a generation was formed."""
        self.refuted = False
        """No newcomer is to be used any more."""
        self.doubtful = False
        """A newcomer had trained before newcomers were refuted."""
        self._trained = False
        self.stop_by: Instant | None = None
        """Time when a job that was asked to stop has ended."""
        self.stop_at = StepNo(0)
        """Step that it was known to have done when it was asked to: agents report it once a second."""

    def apply(self, fact: StateKept | ReplacementRefuted | facts.StopRequested, step: StepNo, now: Instant) -> None:
        """The machine is about to be told, which knows of this step."""
        match fact:
            case StateKept(error=""):
                worker = self._workers[fact.worker]
                self._kept.setdefault(worker.spawn.node, {})[worker.holding] = fact.step
            case ReplacementRefuted():
                self.refuted, self.doubtful = True, self.doubtful or self._trained
            case facts.StopRequested() if self.stop_by is None or not fact.patience:
                self.stop_at = step if self.stop_by is None else self.stop_at
                self.stop_by = now + fact.patience
            case _:
                pass

    def committed(self, fact: facts.WorkerCommitted) -> None:
        """The machine is about to be told of a commit in its generation."""
        worker = self._workers[fact.worker]
        self._trained = self._trained or (worker.spawn.role is not Role.RANK and worker.alive)
        self.doubtful = self.doubtful or (self._trained and self.refuted)

    def lost(self, node: NodeId) -> None:
        """A node is lost, or has forgotten its copies."""
        self._kept.pop(node, None)

    def spawned(self, order: orders.SpawnWorker) -> None:
        """A worker is started."""
        again = order.role is Role.RANK and self.stop_by is not None
        self._require(not again, f"{order.worker} is started, of a job that was asked to stop")

    def restarted(self, text: str, parts: Collection[str]) -> bool:
        """All workers are started again; whether with what is in memory."""
        if IN_MEMORY in text:
            self._times += 1
            return True
        held = self.covered(parts)
        tried = self._times >= ATTEMPTS
        self._require(
            held <= self._durable() or tried,
            f"nodes have state@{held} in memory, and all start again from state@{self._durable()}: {text}",
        )
        return False

    def formed(self, forms: Sequence[orders.FormGeneration], parts: Collection[str], *, fresh: bool) -> None:
        """A generation is ordered."""
        restored = [form for form in forms if form.restore is not None]
        if restored and fresh:
            held = self.covered(parts)
            self._require(forms[0].step >= held, f"nodes have state@{held}, and state@{forms[0].step} is read")
        for form in restored:
            self._require(form.restore is not None and form.restore.step == form.step, "a copy is of the step to begin")

    def stood(self) -> None:
        """A generation stands."""
        self._times = 0

    def covered(self, parts: Collection[str]) -> StepNo:
        """The newest step of which nodes have all parts."""
        for step in sorted({step for held in self._kept.values() for step in held.values()}, reverse=True):
            if {part for held in self._kept.values() for part, at in held.items() if at == step} >= set(parts):
                return step
        return NO_STATE

    def ended_in_time(self, now: Instant) -> None:
        """The machine knows all that it was told, and has answered."""
        late = self.stop_by is not None and now > self.stop_by + _AT_ONCE
        self._require(not late, "a job that was asked to stop has ended within the time it was given")
